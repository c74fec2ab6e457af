"""What a checkpoint should weigh, worked out from ``config.json`` alone: an estimate, and marked as one."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter

from sglang_bw.plan.inventory import Inventory, Part, Role, Slot
from sglang_bw.plan.shapes import LinearState, ModelShape

# A name of each role as published checkpoints have it, to ask what the quantization leaves out.
_NAMES = {
    Role.EXPERT: "model.layers.5.mlp.experts.0.gate_proj",
    Role.SHARED: "model.layers.5.mlp.shared_experts.gate_proj",
    Role.DENSE: "model.layers.5.mlp.gate_proj",
    Role.HEADS: "model.layers.5.self_attn.o_proj",
    Role.KV_HEADS: "model.layers.5.self_attn.k_proj",
    Role.LATENT_UP: "model.layers.5.self_attn.kv_b_proj",
    Role.WHOLE_ATTENTION: "model.layers.5.self_attn.q_a_proj",
    Role.LINEAR: "model.layers.5.linear_attn.out_proj",
}
_LAYER = re.compile(r"layers\.(\d+)\.")
_MTP_NAME = "mtp.layers.0.mlp.experts.0.gate_proj"


def estimate(shape: ModelShape) -> Inventory:
    """Return the bytes of a checkpoint of this shape by role and layer."""
    counted: Counter[Slot] = Counter()
    for layer in range(shape.layers):
        _add_layer(counted, shape, layer, "model")
    if shape.mtp_layers:
        _add_layer(counted, shape, shape.layers - 1, "mtp")
        _add(counted, shape, Role.WHOLE, "mtp", -1, 2 * shape.hidden * shape.hidden)
    table = shape.vocab * shape.hidden
    if not _is_eagle3(shape):
        _add(counted, shape, Role.EMBEDDING, "model", -1, table)
    else:
        _add(counted, shape, Role.WHOLE, "model", -1, 3 * shape.hidden * shape.hidden)  # fc: three hidden states to one
    if not shape.tied:
        _add(counted, shape, Role.HEAD, "model", -1, (shape.draft_vocab or shape.vocab) * shape.hidden)
    if tower := shape.vision:
        _add(counted, shape, Role.VISION, "model", -1, tower.layers * 4 * tower.hidden**2)
        _add(counted, shape, Role.WHOLE_VISION, "model", -1, tower.layers * 2 * tower.hidden * tower.width)
    return Inventory(dict(counted), measured=False)


def _is_eagle3(shape: ModelShape) -> bool:
    return "eagle3" in shape.architecture.lower()


def _add_layer(counted: Counter[Slot], shape: ModelShape, layer: int, part: Part) -> None:
    # An EAGLE-3 layer reads the token's embedding beside the hidden state.
    inputs = shape.hidden * (2 if _is_eagle3(shape) else 1)
    where = -1 if part == "mtp" else layer
    if shape.attention[layer] == "linear" and part == "model" and shape.linear:
        _add(counted, shape, Role.LINEAR, part, where, _linear_elements(shape.linear, shape.hidden))
    elif shape.latent:
        for role, elements in _latent_elements(shape, inputs, layer).items():
            _add(counted, shape, role, part, where, elements)
    else:
        queries = shape.heads * shape.head_dim
        gate = 2 if shape.gated_attention else 1
        _add(counted, shape, Role.HEADS, part, where, queries * (inputs * gate + shape.hidden))
        _add(counted, shape, Role.KV_HEADS, part, where, inputs * shape.kv_heads * (shape.head_dim + shape.v_head_dim))
    _add_mlp(counted, shape, layer, part, where)


def _add_mlp(counted: Counter[Slot], shape: ModelShape, layer: int, part: Part, where: int) -> None:
    experts = shape.experts
    if experts and (layer in experts.layers or part == "mtp"):
        _add(counted, shape, Role.EXPERT, part, where, experts.count * 3 * shape.hidden * experts.width)
        _add(counted, shape, Role.SHARED, part, where, 3 * shape.hidden * experts.shared)
        _add(counted, shape, Role.WHOLE, part, where, experts.count * shape.hidden)
    else:
        _add(counted, shape, Role.DENSE, part, where, 3 * shape.hidden * shape.intermediate)


def _latent_elements(shape: ModelShape, inputs: int, layer: int) -> dict[Role, int]:
    latent = shape.latent
    assert latent is not None
    queries = shape.heads * (latent.nope + latent.rope)
    whole = inputs * (latent.q_rank + latent.width)
    if shape.indexer and layer in shape.indexer.owners:
        index = shape.indexer
        whole += latent.q_rank * index.heads * index.dim + shape.hidden * (index.dim + index.heads)
    return {
        Role.WHOLE_ATTENTION: whole,
        Role.HEADS: (latent.q_rank or inputs) * queries + shape.heads * latent.v * shape.hidden,
        Role.LATENT_UP: latent.kv_rank * shape.heads * (latent.nope + latent.v),
    }


def _linear_elements(state: LinearState, hidden: int) -> int:
    keys, values = state.key_heads * state.key_dim, state.value_heads * state.value_dim
    mixing = hidden * (2 * keys + 2 * values) + values * hidden
    if state.kind == "gdn":
        return mixing + hidden * 2 * state.value_heads
    low_rank = 2 * (hidden * state.value_dim + state.value_dim * values)
    return mixing - hidden * values + low_rank + hidden * state.value_heads


def _add(counted: Counter[Slot], shape: ModelShape, role: Role, part: Part, layer: int, elements: int) -> None:
    if not elements:
        return
    bits = _bits(shape, role, part)
    wide = bits >= 16 and role in _NAMES
    counted[Slot(part, role, layer, wide)] += int(elements * bits / 8)


def _bits(shape: ModelShape, role: Role, part: Part) -> float:
    quantization, plain = shape.quantization, 8.0 * shape.dtype_bytes
    name = _NAMES.get(role)
    if name is None or not quantization.name:
        return plain
    if part == "mtp" and _is_skipped(_MTP_NAME, quantization.skipped):
        return plain
    if _is_skipped(name, _about(shape, role, quantization.skipped)):
        return plain
    if role is not Role.EXPERT and not quantization.everywhere:
        return 8.0 if quantization.name == "modelopt_mixed" else plain
    return quantization.bits


def _about(shape: ModelShape, role: Role, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out patterns of a layer that does not have the role: a dense first layer says nothing of the experts."""
    sparse = shape.experts.layers if shape.experts else frozenset()
    if role not in (Role.EXPERT, Role.SHARED, Role.DENSE):
        return patterns
    wanted = role is not Role.DENSE
    numbered = [(pattern, _LAYER.search(pattern)) for pattern in patterns]
    return tuple(pattern for pattern, layer in numbered if layer is None or (int(layer[1]) in sparse) is wanted)


def _is_skipped(name: str, patterns: tuple[str, ...]) -> bool:
    return any(_matches(name, pattern) for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error:
            return False
    # Layers are listed one by one: what is left out in some layer is left out in all.
    general = re.sub(r"\.\d+\.", ".5.", pattern.removesuffix("*").replace("language_model.", ""))
    return (
        fnmatch.fnmatchcase(name, f"*{general.lstrip('*')}*")
        if "*" in pattern
        else name.startswith(general) or (pattern.startswith("mtp") and name.startswith("mtp"))
    )
