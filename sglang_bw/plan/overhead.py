"""What is neither weights nor KV cache: the driver, the loader, graphs, activations. Rules of thumb are marked."""

from __future__ import annotations

from sglang_bw.host.boards import Board
from sglang_bw.plan.fraction import prefill_sizes
from sglang_bw.plan.settings import EngineSettings
from sglang_bw.plan.shapes import ModelShape, Parallel

_MIB = 1 << 20

# Beyond the bytes of the weights, loading leaves this much taken: allocator blocks that are not full, handles of
# cuBLAS, kernels' modules. From the logs of field-data: 0.4 to 0.7 GiB on 96 GB boards at TP4 and TP8.
LOADER_REST = 450 * _MIB
# nvidia-smi's total minus the total that CUDA reports: 495 MiB of 32,607, 551 of 81,559, 606 of 143,771, 638 of
# 97,887, 719 of 183,359. Fitted as a constant and a part.
_DRIVER_MIB, _DRIVER_PART = 450, 0.0014
# The process's CUDA context, and NCCL's channels and buffers. 94.08 to 94.14 GiB of 95.0 are free in the logs at TP8.
_CONTEXT_MIB, _NCCL_MIB = 500, 440
_DISPATCH_TOKENS_BEFORE = 1024
_LEAST_DISPATCH_TOKENS = 4096
# Tokens between two catch-ups of a draft that rests (patch 0031 of the 0.5.23 series).
_CATCH_UP = 16


def free_at_start(board: Board, parallel: Parallel) -> int:
    """Return the bytes free on an idle board once the engine's process and its communicators are up."""
    taken = _DRIVER_MIB + _DRIVER_PART * board.memory_mib + _CONTEXT_MIB + (_NCCL_MIB if parallel.gpus > 1 else 0)
    return int((board.memory_mib - taken) * _MIB)


def all_to_all(target: ModelShape, parallel: Parallel, settings: EngineSettings) -> int:
    """Return the bytes of FlashInfer's all-to-all workspace, allocated while the model is built.

    For every GPU of the group: tokens x (what is dispatched + what comes back). NVFP4 dispatch halves a byte an
    element and adds a scale for 16; a draft that is not quantized asks for 16 bits.
    """
    if settings.a2a != "flashinfer" or not target.experts:
        return 0
    hidden, active = target.hidden, target.experts.active
    dispatched = (2 * hidden if settings.eagle else hidden // 2 + hidden // 16) + 8 * active
    group = parallel.tp
    per_gpu = _DISPATCH_TOKENS_BEFORE
    if settings.release.a2a_tokens_follow_chunk:
        per_gpu = max(settings.chunked_prefill_size, _LEAST_DISPATCH_TOKENS)
    tokens = per_gpu * (group if not settings.release.a2a_tokens_follow_chunk else 1)
    return group * tokens * (dispatched + 2 * hidden)


def graphs(target: ModelShape, settings: EngineSettings) -> int:
    """Estimate the bytes of captured graphs by the rule that the engine reserves by.

    2 MiB for each request of the largest decode graph, twice that with a draft, whose own steps and verification are
    captured too; 1.5 GiB for prefill with MLA, else 8 MiB for each size.
    """
    decode = 2 * settings.decode_max_bs * (2 if settings.eagle or settings.own_config_draft else 1)
    prefill = 0
    if settings.prefill_graph:
        prefill = 1536 if target.latent else 8 * len(prefill_sizes(settings.chunked_prefill_size))
    return (decode + prefill) * _MIB


def draft_upkeep(target: ModelShape, settings: EngineSettings, requests: int) -> int:
    """Return the bytes of hidden states that are kept where a policy may stop drafting: 16 tokens of each request."""
    return requests * _CATCH_UP * 3 * target.hidden * 2 if settings.choices else 0


def speculative_graph_buffers(target: ModelShape, settings: EngineSettings) -> int:
    """Return the bytes of FlashInfer's indices and masks for the graphs of speculation, multi-head attention only.

    Every captured token row has an index of 4 bytes and a mask of one for each token of the longest request
    (`FlashInferAttnBackend.init_cuda_graph_state`): verify and draft-extend of each step count; a draft's own steps
    have indices. A policy that may stop drafting has decode graphs and a draft-extend of 16 tokens beside them.
    """
    if not settings.flashinfer or not settings.eagle or target.latent:
        return 0
    rows = sum(2 * (steps + 1) for steps in settings.choices or (max(settings.draft_tokens, 1) - 1,))
    rows += 1 + _CATCH_UP if settings.choices else 0
    drafts = settings.topk * sum(steps for steps in settings.choices or (settings.steps,) if steps > 1)
    return settings.decode_max_bs * settings.context_length * (5 * rows + 4 * drafts)


def activations(target: ModelShape, parallel: Parallel, settings: EngineSettings) -> int:
    """Estimate the bytes of one prefill pass: a dozen hidden states in 16 bits, and what the experts work on."""
    tokens = max(settings.chunked_prefill_size, 2048)
    a_token = 12 * 2 * target.hidden
    if target.experts:
        a_token += target.experts.active * (2 * target.hidden + 6 * target.experts.width // parallel.moe_tp)
    else:
        a_token += 6 * target.intermediate // parallel.tp
    return tokens * a_token
