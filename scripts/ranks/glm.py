"""A tiny GLM-4.x mixture of experts with random weights: a model whose experts stock's EPLB cannot move.

Its widths are those of the tiny Kimi-K2.5, so that the same draft fits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .kimi import TEXT, Weights, blocks

_SHARED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "moe_intermediate_size",
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group", "first_k_dense_replace",
    "vocab_size", "max_position_embeddings", "hidden_act", "norm_topk_prob", "routed_scaling_factor", "attention_bias",
    "tie_word_embeddings", "bos_token_id", "eos_token_id",
)  # fmt: skip
CONFIG = {name: TEXT[name] for name in _SHARED} | {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_key_value_heads": 2, "head_dim": 128,
    "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "use_qk_norm": False, "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
}  # fmt: skip


def write(folder: Path) -> Path:
    """Write the checkpoint."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    tensors = dict(blocks(Weights(3), _attention, int4=False))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _attention(weights: Weights, name: str) -> Iterator[tuple[str, Any]]:
    hidden, width = CONFIG["hidden_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * width, CONFIG["num_key_value_heads"] * width
    for part, out in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"{name}.{part}.weight", weights.linear(out, hidden)
    yield f"{name}.o_proj.weight", weights.linear(hidden, queries)
