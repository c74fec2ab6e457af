"""A tiny model of the Kimi-K2.5 classes with random weights, in bf16 and INT4, and an EAGLE-3 draft for it.

The text model is DeepSeek-V3's: latent attention of the real head sizes, one dense layer and six with routed and
shared experts. Every expert has weights of its own and some of them are chosen more often, so that a rebalance moves
experts, and moving them wrongly changes the tokens. A token has the same experts in every layer, by numbers in its
embedding that the routers read and nothing writes to: with random routers, kernels that round differently choose other
experts now and then, and what comes of that is no longer rounding. INT4 as Kimi ships it: compressed-tensors, groups of
32 weights, experts only. The vision tower has no weights: it is built and never run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from plan_record import MLA_MOE, TINY

# With fewer layers the three that EAGLE-3 captures by default (2, the middle, the last but two) are not three.
LAYERS, EXPERTS, DENSE = 7, 16, 1
TEXT = MLA_MOE | {
    # The smallest that DeepEP's kernels are compiled for.
    "hidden_size": 2048, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 8,
    "intermediate_size": 1024, "moe_intermediate_size": 512, "n_routed_experts": EXPERTS, "num_experts_per_tok": 4,
    "first_k_dense_replace": DENSE, "q_lora_rank": 512, "vocab_size": 1024, "max_position_embeddings": 4096,
    "routed_scaling_factor": 1.0, "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 1.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
VISION = {
    "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64, "mm_hidden_size": 64,
    "vt_hidden_size": 64, "init_pos_emb_height": 4, "init_pos_emb_width": 4, "text_hidden_size": TEXT["hidden_size"],
}  # fmt: skip
DRAFT = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu",
    "hidden_size": TEXT["hidden_size"], "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 128, "vocab_size": TEXT["vocab_size"], "draft_vocab_size": TEXT["vocab_size"], "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": False, "dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
GROUP = 32
QUANTIZATION = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "input_activations": None, "output_activations": None,
            "weights": {
                "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True,
                "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax",
                "observer_kwargs": {},
            },
        }
    },
}  # fmt: skip
# A processor as Kimi's checkpoints bring one; it holds what the engine asks of it at start-up.
PROCESSOR = """
from transformers import AutoTokenizer


class Media:
    media_proc_cfg = {
        "patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 64, "patch_limit_on_one_side": 16,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }


class TinyProcessor:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.image_processor = self.media_processor = Media()

    @classmethod
    def from_pretrained(cls, path, **_):
        return cls(AutoTokenizer.from_pretrained(path))

    @classmethod
    def register_for_auto_class(cls, _="AutoProcessor"):
        pass
"""
_STD = 1.0
# In the first EXPERTS numbers of an embedding: those of its experts, the first one's first, and of all others. By the
# last layer the residual has grown threefold, and their scores are still 0.05 apart.
_CHOSEN, _OTHERS = (5.0, 4.0, 3.0, 2.0), -2.0
_PREFER = 1.5  # natural logarithm: how much likelier the first expert is than one in the middle
_WRITES = ("o_proj.weight", "down_proj.weight", "down_proj.weight_scale")


class Weights:
    """Random tensors; the same ones every time."""

    def __init__(self, seed: int) -> None:
        import torch

        self.dice = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float) -> Any:
        """Return a bf16 tensor."""
        import torch

        return (torch.randn(shape, generator=self.dice) * std).to(torch.bfloat16)

    def linear(self, out: int, inner: int) -> Any:
        """Return a matrix whose product with a unit-variance vector has variance one."""
        return self.normal(out, inner, std=inner**-0.5)

    def packed(self, name: str, out: int, inner: int) -> Iterator[tuple[str, Any]]:
        """Yield a matrix of four-bit weights, eight to an integer, with the scale of each group."""
        import torch

        whole = torch.randint(-(2**31), 2**31, (out, inner // 8), generator=self.dice, dtype=torch.int64)
        yield f"{name}.weight_packed", whole.to(torch.int32)
        # Uniform over -8..7: a standard deviation of 4.6.
        spread = 0.75 + 0.5 * torch.rand((out, inner // GROUP), generator=self.dice)
        yield f"{name}.weight_scale", (spread * inner**-0.5 / 4.6).to(torch.bfloat16)
        yield f"{name}.weight_shape", torch.tensor([out, inner], dtype=torch.int32)


Attention = Callable[[Weights, str], Iterator[tuple[str, Any]]]
"""Yields the tensors of a layer's attention, whose name it gets."""


def write(folder: Path, *, int4: bool) -> Path:
    """Write the target's checkpoint."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    text = TEXT | ({"quantization_config": QUANTIZATION} if int4 else {})
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text,
        "vision_config": VISION, "dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
        "media_placeholder_token_id": 3, "tie_word_embeddings": False,
    } | ({"quantization_config": QUANTIZATION} if int4 else {})  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / "target" / name, folder / name)
    (folder / "processing_tiny.py").write_text(PROCESSOR)
    processor = {"processor_class": "TinyProcessor", "auto_map": {"AutoProcessor": "processing_tiny.TinyProcessor"}}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    tensors = {f"language_model.{name}": tensor for name, tensor in target(Weights(1), int4=int4)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_draft(folder: Path) -> Path:
    """Write the draft's checkpoint."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(DRAFT, indent=1))
    save_file(dict(draft(Weights(2))), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def target(weights: Weights, *, int4: bool) -> Iterator[tuple[str, Any]]:
    """Yield the text model's tensors by their names."""
    return blocks(weights, _attention, int4=int4)


def blocks(weights: Weights, attention: Attention, *, int4: bool) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a model of these sizes, whatever its attention."""
    for name, tensor in _blocks(weights, attention, int4=int4):
        if name.endswith(_WRITES):
            tensor[:EXPERTS] = 0  # what the routers read stays as it was embedded
        yield name, tensor


def experts_of_tokens(weights: Weights) -> Any:
    """Return the experts of every token, (vocabulary, experts per token), the highest score first."""
    import torch

    likely = torch.linspace(_PREFER, -_PREFER, EXPERTS).exp().expand(TEXT["vocab_size"], EXPERTS)
    return torch.multinomial(likely, len(_CHOSEN), generator=weights.dice)


def _blocks(weights: Weights, attention: Attention, *, int4: bool) -> Iterator[tuple[str, Any]]:
    import torch

    hidden, vocabulary = TEXT["hidden_size"], TEXT["vocab_size"]
    embedding = weights.normal(vocabulary, hidden, std=_STD)
    embedding[:, :EXPERTS] = _OTHERS
    scores = torch.tensor(_CHOSEN, dtype=embedding.dtype).expand(vocabulary, -1)
    embedding.scatter_(1, experts_of_tokens(weights), scores)
    yield "model.embed_tokens.weight", embedding
    yield "lm_head.weight", weights.linear(vocabulary, hidden)
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}.{norm}.weight", torch.ones(hidden, dtype=torch.bfloat16)
        yield from attention(weights, f"{name}.self_attn")
        if layer < DENSE:
            yield from _mlp(weights, f"{name}.mlp", TEXT["intermediate_size"])
            continue
        yield f"{name}.mlp.gate.weight", torch.eye(EXPERTS, hidden, dtype=torch.bfloat16)
        yield f"{name}.mlp.gate.e_score_correction_bias", torch.zeros(EXPERTS)
        yield from _mlp(weights, f"{name}.mlp.shared_experts", TEXT["moe_intermediate_size"])
        for expert in range(EXPERTS):
            yield from _mlp(weights, f"{name}.mlp.experts.{expert}", TEXT["moe_intermediate_size"], int4=int4)


def _attention(weights: Weights, name: str) -> Iterator[tuple[str, Any]]:
    import torch

    hidden, heads, rank = TEXT["hidden_size"], TEXT["num_attention_heads"], TEXT["kv_lora_rank"]
    nope, rope, value = TEXT["qk_nope_head_dim"], TEXT["qk_rope_head_dim"], TEXT["v_head_dim"]
    yield f"{name}.q_a_proj.weight", weights.linear(TEXT["q_lora_rank"], hidden)
    yield f"{name}.q_a_layernorm.weight", torch.ones(TEXT["q_lora_rank"], dtype=torch.bfloat16)
    yield f"{name}.q_b_proj.weight", weights.linear(heads * (nope + rope), TEXT["q_lora_rank"])
    yield f"{name}.kv_a_proj_with_mqa.weight", weights.linear(rank + rope, hidden)
    yield f"{name}.kv_a_layernorm.weight", torch.ones(rank, dtype=torch.bfloat16)
    yield f"{name}.kv_b_proj.weight", weights.linear(heads * (nope + value), rank)
    yield f"{name}.o_proj.weight", weights.linear(hidden, heads * value)


def _mlp(weights: Weights, name: str, inner: int, *, int4: bool = False) -> Iterator[tuple[str, Any]]:
    hidden = TEXT["hidden_size"]
    for part, out, width in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        if int4:
            yield from weights.packed(f"{name}.{part}", out, width)
        else:
            yield f"{name}.{part}.weight", weights.linear(out, width)


def draft(weights: Weights) -> Iterator[tuple[str, Any]]:
    """Yield the draft's tensors by their names."""
    import torch

    hidden, inner, width = DRAFT["hidden_size"], DRAFT["intermediate_size"], DRAFT["head_dim"]
    queries, keys = DRAFT["num_attention_heads"] * width, DRAFT["num_key_value_heads"] * width
    yield "fc.weight", weights.linear(hidden, 3 * hidden)
    yield "lm_head.weight", weights.linear(DRAFT["draft_vocab_size"], hidden)
    yield "norm.weight", torch.ones(hidden, dtype=torch.bfloat16)
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        yield f"midlayer.{norm}.weight", torch.ones(hidden, dtype=torch.bfloat16)
    for part, out in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"midlayer.self_attn.{part}.weight", weights.linear(out, 2 * hidden)
    yield "midlayer.self_attn.o_proj.weight", weights.linear(hidden, queries)
    for part, out, width in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        yield f"midlayer.mlp.{part}.weight", weights.linear(out, width)
