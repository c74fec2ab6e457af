"""Divide a checkpoint among GPUs as the engine's loader does."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_bw.plan.inventory import Inventory, Part, Role, Slot
from sglang_bw.plan.shapes import ModelShape, Parallel

_VOCAB_PADDING = 64
# Bits of a weight, scales included, of what `--quantization` makes of a 16-bit checkpoint while loading.
ONLINE_BITS = {"fp8": 8.0, "w8a8_fp8": 8.0, "w8a8_int8": 8.0, "modelopt_fp8": 8.0, "mxfp8": 8.25, "nvfp4_online": 4.5}


@dataclass(frozen=True)
class Loading:
    """What of the engine's settings changes the division.

    :ivar shared_whole: every GPU holds the shared experts whole, as with an all-to-all among expert groups.
    :ivar dense_whole: every GPU holds the dense MLPs whole (``--moe-dense-tp-size 1``).
    :ivar head_by_attention: the output head is divided by attention groups (``--enable-dp-lm-head``).
    :ivar redundant_experts: copies of experts beyond the model's own.
    :ivar online: method that ``--quantization`` names for a checkpoint that is not quantized.
    """

    shared_whole: bool = False
    dense_whole: bool = False
    head_by_attention: bool = False
    redundant_experts: int = 0
    online: str = ""


def rank_bytes(
    inventory: Inventory, shape: ModelShape, parallel: Parallel, loading: Loading, stage: int = 0, part: Part = "model"
) -> int:
    """Return the bytes of weights on one GPU of a pipeline stage."""
    first, end = parallel.stage(shape.layers, stage)
    online = ONLINE_BITS.get(loading.online) if not shape.quantization.name else None
    total = 0.0
    for slot, count in inventory.bytes.items():
        if slot.part != part or not _is_here(slot, first, end, stage, parallel.pp, shape.tied):
            continue
        shrink = online / (8 * shape.dtype_bytes) if online and slot.wide else 1.0
        total += count * shrink * _share(slot.role, shape, parallel, loading)
    return math.ceil(total)


def tables_bytes(shape: ModelShape, parallel: Parallel, loading: Loading) -> tuple[int, int]:
    """Return the bytes on one GPU of the embedding, and of the output head, of a model of this shape."""
    rows = shape.hidden * shape.dtype_bytes
    embedding = shape.vocab * rows * _share(Role.EMBEDDING, shape, parallel, loading)
    head = (shape.draft_vocab or shape.vocab) * rows * _share(Role.HEAD, shape, parallel, loading)
    return math.ceil(embedding), math.ceil(head)


def _is_here(slot: Slot, first: int, end: int, stage: int, stages: int, tied: bool) -> bool:
    if slot.layer >= 0:
        return first <= slot.layer < end
    if slot.role is Role.HEAD:
        return stage == stages - 1
    if slot.role is Role.EMBEDDING:
        return stage == 0 or (tied and stage == stages - 1)
    return True


def _share(role: Role, shape: ModelShape, parallel: Parallel, loading: Loading) -> float:
    """Return the part of a role's bytes that one GPU holds."""
    attn, tp = parallel.attn_tp, parallel.tp
    embedding = attn if parallel.dp > 1 else tp
    head = attn if loading.head_by_attention else tp
    experts = shape.experts.count if shape.experts else 1
    shares = {
        Role.EMBEDDING: _padding(shape.vocab, embedding) / embedding,
        Role.HEAD: _padding(shape.draft_vocab or shape.vocab, head) / head,
        Role.EXPERT: (experts + loading.redundant_experts) / experts / tp,
        Role.SHARED: 1.0 if loading.shared_whole else 1 / tp,
        Role.DENSE: 1.0 if loading.dense_whole else 1 / tp,
        Role.HEADS: 1 / attn,
        Role.KV_HEADS: max(1 / attn, 1 / max(1, shape.kv_heads)),
        Role.LATENT_UP: 2 / attn,  # the engine keeps a second, transposed copy for absorbed attention
        Role.LINEAR: 1 / attn,
        Role.VISION: 1 / tp,
    }
    return shares.get(role, 1.0)


def _padding(rows: int, groups: int) -> float:
    unit = _VOCAB_PADDING * groups
    return math.ceil(rows / unit) * unit / rows
