"""What a checkpoint's tensors are for: bytes by role and layer, which is what dividing them needs.

Names are those of the published checkpoints. A name that says nothing counts as held whole by every GPU.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Literal, NamedTuple

from sglang_bw.plan.headers import Tensor

Part = Literal["model", "mtp"]


class Role(Enum):
    """How a tensor is divided among GPUs."""

    EMBEDDING = "embedding"  # by rows, padded
    HEAD = "head"  # by rows, padded
    EXPERT = "routed experts"  # by experts, then by width
    SHARED = "shared experts"  # by width, or whole with an all-to-all
    DENSE = "dense MLP"  # by width
    HEADS = "attention"  # by heads
    KV_HEADS = "keys and values"  # by KV heads, never less than one
    LATENT_UP = "latent up-projection"  # by heads; a copy for the absorbed form
    WHOLE_ATTENTION = "attention, whole"  # on every GPU: low-rank inputs, indexer
    LINEAR = "linear attention"  # by heads
    VISION = "vision tower"  # attention by heads
    WHOLE_VISION = "vision tower, whole"
    WHOLE = "norms, routers"  # on every GPU


class Slot(NamedTuple):
    """Where bytes belong.

    :ivar layer: -1 outside the layers.
    :ivar wide: whether they are weights of a linear layer in 16 bits or more, which ``--quantization`` would shrink.
    """

    part: Part
    role: Role
    layer: int
    wide: bool


@dataclass(frozen=True)
class Inventory:
    """Bytes of a checkpoint by :class:`Slot`.

    :ivar measured: false when they were worked out from ``config.json``.

    """

    bytes: Mapping[Slot, int]
    measured: bool

    def total(self, part: Part | None = None) -> int:
        """Bytes in all, or of one part."""
        return sum(count for slot, count in self.bytes.items() if part in (None, slot.part))

    def has(self, role: Role, part: Part = "model") -> bool:
        """Tell whether any tensor has this role."""
        return any(slot.role is role and slot.part == part for slot in self.bytes)


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|decoder_layers|mtp_layers)\.(\d+)\.")
_MTP = re.compile(r"\.(mtp|nextn|mtp_layers|mtp_block)\.")
_WIDE_DTYPES = {"BF16", "F16", "F32"}
_NUMBERS = re.compile(r"\.\d+(?=\.)")

# First match wins; a pattern is searched in the name without layer and expert numbers.
_TOWER = r"(^|\.)(vision_tower|visual|vision_model|vision_encoder|vit|audio_tower|mm_projector|multi_modal_projector)\."
_ROLES: tuple[tuple[str, Role], ...] = (
    (_TOWER + r".*\b(wqkv|wo|qkv|q_proj|k_proj|v_proj|out_proj|attn\.proj)\.", Role.VISION),
    (_TOWER, Role.WHOLE_VISION),
    (r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed)\.(weight|qweight)", Role.EMBEDDING),
    (r"(^|\.)(lm_head|output|shared_head\.head|head)\.(weight|qweight|scales|qzeros|weight_\w+)$", Role.HEAD),
    (r"\.shared_experts?\.", Role.SHARED),
    (r"\.experts\.", Role.EXPERT),
    (
        r"\b(gate|router|shared_expert_gate)\.(weight|bias|e_score|wg|classifier)|e_score_correction_bias|\.tid2eid",
        Role.WHOLE,
    ),
    (r"norm\b|layernorm|\.ln_\d", Role.WHOLE),
    (r"\.(linear_attn|kda|mamba|mixer|delta_net)\.", Role.LINEAR),
    (
        r"\.(q_a_proj|kv_a_proj_with_mqa|fused_qkv_a_proj_with_mqa|wq_a|wkv_a)\b|\.indexer\.|\.compressor\.",
        Role.WHOLE_ATTENTION,
    ),
    (r"\.kv_b_proj\.", Role.LATENT_UP),
    (r"\.(k_proj|v_proj|wk|wv)\.", Role.KV_HEADS),
    (r"\.(q_proj|q_b_proj|o_proj|out_proj|qkv_proj|c_attn|query_key_value|wq|wo|g_proj|sinks)\b", Role.HEADS),
    (
        r"\.(gate_proj|up_proj|down_proj|gate_up_proj|fc1|fc2|dense_h_to_4h|dense_4h_to_h|w1|w2|w3|c_fc|c_proj)\.",
        Role.DENSE,
    ),
)
_COMPILED = tuple((re.compile(pattern), role) for pattern, role in _ROLES)


def take(tensors: Iterable[Tensor], layers: int, *, measured: bool = True) -> Inventory:
    """Sort tensors.

    :param layers: layers of the model; numbers from there on are the multi-token-prediction head.
    """
    counted: Counter[Slot] = Counter()
    for tensor in tensors:
        counted[_slot(tensor, layers)] += tensor.bytes
    return Inventory(dict(counted), measured)


def _slot(tensor: Tensor, layers: int) -> Slot:
    # Hundreds of thousands of names differ in the expert's number alone.
    head, experts, tail = tensor.name.partition(".experts.")
    number, dot, rest = tail.partition(".")
    name = f"{head}{experts}{rest}" if dot and number.isdigit() else tensor.name
    return _sorted(name, tensor.dtype in _WIDE_DTYPES and len(tensor.shape) >= 2, layers)


@lru_cache(maxsize=100_000)
def _sorted(name: str, matrix: bool, layers: int) -> Slot:
    match = _LAYER.search(name)
    layer = int(match[1]) if match else -1
    dotted = "." + _NUMBERS.sub("", name)
    role = next((role for pattern, role in _COMPILED if pattern.search(dotted)), Role.WHOLE)
    vision = role in (Role.VISION, Role.WHOLE_VISION)
    beyond = layer >= layers and not vision
    part: Part = "mtp" if beyond or _MTP.search(dotted) else "model"
    wide = matrix and name.endswith(("weight", "_proj")) and role in _LINEAR_LAYERS
    return Slot(part, role, -1 if vision or part == "mtp" else layer, wide)


_LINEAR_LAYERS = {
    Role.EXPERT, Role.SHARED, Role.DENSE, Role.HEADS, Role.KV_HEADS, Role.LATENT_UP, Role.WHOLE_ATTENTION, Role.LINEAR,
}  # fmt: skip
