"""The engine's memory defaults, restated: what ``--mem-fraction-static`` becomes when nobody sets it.

From ``arg_groups/memory_hook.py`` of 0.5.23 and ``server_args.py`` of the releases before 0.5.19. In MiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sglang_bw.host.boards import Board
from sglang_bw.plan.releases import Release
from sglang_bw.plan.settings import EngineSettings, choices, decodes_on_flashinfer
from sglang_bw.plan.shapes import ModelShape, Parallel, Vision

_GIB = 1024
_REQUESTS_WITH_SPECULATION = 48


def restate(
    asked: Mapping[str, Any],
    target: ModelShape,
    draft: ModelShape | None,
    board: Board,
    parallel: Parallel,
    release: Release,
) -> EngineSettings:
    """Restate what the engine would resolve.

    :param asked: what the user or recipe sets, by the engine's field names: ``mem_fraction_static``,
        ``kv_cache_dtype``, ``max_running_requests``, ``cuda_graph_max_bs``, ``speculative_algorithm``, ...
    :param draft: the draft model; ``None`` with a target's own MTP head, or without speculation.
    :raises CheckpointError: numbers that make no sense.
    """
    algorithm = asked.get("speculative_algorithm")
    algorithm = "EAGLE" if algorithm == "NEXTN" else algorithm
    requests = asked.get("max_running_requests")
    chunk, graph = tier(board.memory_mib, parallel.tp, release)
    chunk = asked.get("chunked_prefill_size") or chunk
    limit = _REQUESTS_WITH_SPECULATION if algorithm and release.requests_known_first else None
    max_bs = _decode_max_bs(asked, graph, requests or limit, release)
    prefill = _prefill_graph(asked, target, parallel, release)
    fraction = asked.get("mem_fraction_static")
    steps, topk, tokens = _speculation(asked, target, algorithm)
    settings = EngineSettings(
        release=release,
        mem_fraction_static=0.5 if fraction is None else float(fraction),
        kv_cache_dtype=str(asked.get("kv_cache_dtype") or "auto"),
        draft_kv_cache_dtype=asked.get("speculative_draft_kv_cache_dtype"),
        page_size=int(asked.get("page_size") or 1),
        chunked_prefill_size=int(chunk),
        decode_max_bs=int(max_bs),
        prefill_graph=prefill,
        max_running_requests=requests or (_REQUESTS_WITH_SPECULATION if algorithm else None),
        max_total_tokens=asked.get("max_total_tokens"),
        context_length=int(asked.get("context_length") or target.context),
        algorithm=algorithm,
        draft_is_mtp=bool(algorithm) and algorithm != "NGRAM" and draft is None,
        steps=steps,
        topk=topk,
        draft_tokens=tokens,
        choices=choices(asked, steps),
        flashinfer=decodes_on_flashinfer(asked),
        a2a=str(asked.get("moe_a2a_backend") or "none"),
        quantization=str(asked.get("quantization") or ""),
        disable_radix_cache=bool(asked.get("disable_radix_cache")),
        disable_overlap=bool(asked.get("disable_overlap_schedule")),
        max_mamba_cache_size=asked.get("max_mamba_cache_size"),
        mamba_ratio=float(asked.get("mamba_full_memory_ratio") or 0.9),
        mamba_extra_buffer="full"
        if target.linear and release.version >= (0, 5, 13) and not asked.get("disable_radix_cache")
        else "none",
        mamba_dtype=asked.get("mamba_ssm_dtype"),
        swa_ratio=float(asked.get("swa_full_tokens_ratio") or 0.8),
        sparse_scaled=_sparse_scaled(asked, target, board),
        language_only=bool(asked.get("language_only")),
        gpu_transport=asked.get("mm_feature_transport") in ("cuda_ipc", "cuda_vmm"),
        symm_mem_gib=4.0 if asked.get("enable_symm_mem") else 0.0,
        head_by_attention=bool(asked.get("enable_dp_lm_head")),
        dense_whole=asked.get("moe_dense_tp_size") == 1,
        redundant_experts=int(asked.get("ep_num_redundant_experts") or 0),
        fraction_is_default=fraction is None,
    )
    settings = with_default_fraction(settings, target, board, parallel)
    settings.check()
    return settings


def with_default_fraction(
    settings: EngineSettings, target: ModelShape, board: Board, parallel: Parallel
) -> EngineSettings:
    """Return the settings with the fraction that the engine would choose for them, unless a user chose."""
    if not settings.fraction_is_default:
        return settings
    reserved = reserved_mib(
        board.memory_mib,
        parallel,
        settings.release,
        chunk=settings.chunked_prefill_size,
        decode_max_bs=settings.decode_max_bs,
        prefill_tokens=prefill_sizes(settings.chunked_prefill_size) if settings.prefill_graph else None,
        latent=target.latent is not None,
        algorithm=settings.algorithm,
        deepep=settings.a2a == "deepep",
    )
    fraction = fraction_of(board.memory_mib, reserved, None if settings.language_only else target.vision)
    return replace(settings, mem_fraction_static=fraction)


def tier(memory_mib: int, tp: int, release: Release) -> tuple[int, int]:
    """Return the default prefill chunk in tokens, and the largest captured decode batch."""
    few = tp < 4
    if memory_mib < 20 * _GIB:
        return 2048, 8
    if memory_mib < 35 * _GIB:
        return (4096, 48 if few else 160) if release.large_small_boards else (2048, 24 if few else 80)
    if memory_mib < 60 * _GIB:
        return 4096, 32 if few else 160
    if memory_mib < 160 * _GIB:
        return 8192, 256 if few else 512
    return 16384, 512


def reserved_mib(
    memory_mib: int,
    parallel: Parallel,
    release: Release,
    *,
    chunk: int,
    decode_max_bs: int,
    prefill_tokens: list[int] | None,
    latent: bool,
    algorithm: str | None = None,
    deepep: bool = False,
) -> float:
    """Return what the default fraction leaves free for activations and graphs, in MiB.

    :param prefill_tokens: captured prefill sizes; ``None`` without prefill graph.
    :param latent: whether the model has MLA.
    """
    reserved = 512 + 1.5 * max(chunk, 2048) + parallel.tp * parallel.pp / 8 * _GIB + 2 * decode_max_bs
    if parallel.dp > 1:
        reserved += decode_max_bs * parallel.dp * (4.5 if decode_max_bs > 300 else 3)
    if prefill_tokens is not None:
        reserved += 1.5 * _GIB if latent else 8 * len(prefill_tokens)
        reserved += _GIB if deepep and release.deepep_reserve else 0
    if memory_mib > 60 * _GIB:
        reserved = max(reserved, 10 * _GIB)
    if deepep and release.deepep_reserve and decode_max_bs:
        reserved += 2 * _GIB
    return reserved + release.draft_reserve_mib(algorithm)


def fraction_of(memory_mib: int, reserved: float, vision: Vision | None) -> float:
    """Return the default fraction; a vision tower lowers it by 5 % or more, with its size."""
    fraction = round((memory_mib - reserved) / memory_mib, 3)
    if vision is None:
        return fraction
    size = vision.layers * vision.hidden**2 / (24 * 1024**2)
    return fraction * 0.95 * max(0.8, min(1.05, 1 - 0.1 * (size - 1)))


def prefill_sizes(most: int) -> list[int]:
    """Return the captured prefill sizes in tokens, up to ``most``."""
    sizes = [
        *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), *range(1280, 4097, 256),
        *range(4608, most + 1, 512),
    ]  # fmt: skip
    return [size for size in sizes if size <= most]


def decode_sizes(most: int, *, speculative: bool) -> list[int]:
    """Return the captured decode batches, up to ``most``."""
    if most < 1:
        return []
    sizes = (
        [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, most + 1, 16)]
        if speculative
        else [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most + 1, 32)]
    )
    sizes = [size for size in sizes if size <= most]
    return sizes if most in sizes else [*sizes, most]


def _decode_max_bs(asked: Mapping[str, Any], default: int, requests: int | None, release: Release) -> int:
    if asked.get("disable_cuda_graph") or asked.get("disable_decode_cuda_graph"):
        return 0
    if sizes := asked.get("cuda_graph_bs_decode") or asked.get("cuda_graph_bs"):
        return int(max(sizes)) if isinstance(sizes, list) else int(sizes)
    given = asked.get("cuda_graph_max_bs_decode") or asked.get("cuda_graph_max_bs")
    if given is not None:
        return int(given)
    return min(default, requests) if requests and release.graphs_follow_requests else default


def _prefill_graph(asked: Mapping[str, Any], target: ModelShape, parallel: Parallel, release: Release) -> bool:
    if (
        asked.get("disable_cuda_graph")
        or asked.get("disable_prefill_cuda_graph")
        or asked.get("disable_piecewise_cuda_graph")
    ):
        return False
    if backend := asked.get("cuda_graph_backend_prefill"):
        return bool(backend != "disabled")
    if parallel.pp > 1 or (target.linear and target.linear.kind == "kda"):
        return bool(asked.get("enable_piecewise_cuda_graph"))
    a2a = str(asked.get("moe_a2a_backend") or "none")
    captured = {"none", "deepep", "megamoe", "flashinfer"} if release.version >= (0, 5, 16) else {"none"}
    if a2a not in captured or (parallel.dp > 1 and release.version < (0, 5, 16)):
        return False
    multimodal = target.multimodal and not asked.get("language_only")
    return bool(asked.get("enable_piecewise_cuda_graph")) or release.captures_prefill(
        target.architecture, multimodal=multimodal
    )


def _speculation(asked: Mapping[str, Any], target: ModelShape, algorithm: str | None) -> tuple[int, int, int]:
    if algorithm is None:
        return 0, 1, 0
    # The engine's own choice where nothing is set: a tree for Llama, a chain of three for all others.
    steps, topk, tokens = (5, 4, 8) if target.architecture == "LlamaForCausalLM" else (3, 1, 4)
    steps = int(asked.get("speculative_num_steps") or steps)
    topk = int(asked.get("speculative_eagle_topk") or (1 if asked.get("speculative_num_steps") else topk))
    tokens = int(asked.get("speculative_num_draft_tokens") or (steps + 1 if topk == 1 else tokens))
    return steps, topk, tokens


def _sparse_scaled(asked: Mapping[str, Any], target: ModelShape, board: Board) -> bool:
    if not target.indexer:
        return False
    named = {asked.get(f"dsa_{phase}_backend") for phase in ("prefill", "decode")} - {None}
    if named:
        return "trtllm" not in named and named != {"tilelang"}
    # FP8 latents: trtllm, without scales, on Blackwell; GLM on SM12x and all of Hopper use layouts with scales.
    blackwell = int(board.arch.removeprefix("sm")) >= 100
    glm_on_sm12x = board.arch.startswith("sm12") and target.architecture.startswith("GlmMoeDsa")
    return not blackwell or glm_on_sm12x
