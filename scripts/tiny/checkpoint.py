"""Writes and reads the pair as checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tiny import settings as s
from tiny.draft import Draft
from tiny.tokens import save_tokenizer


def save_target(model: LlamaForCausalLM, directory: Path) -> None:
    """Write the target in bf16, with its tokenizer and chat template."""
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = s.EOS
    model.generation_config.pad_token_id = s.PAD
    model.save_pretrained(directory)
    save_tokenizer(directory)


def save_draft(draft: Draft, directory: Path) -> None:
    """Write the draft in bf16. No embedding: the engine gives it the target's."""
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in draft.state_dict().items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": s.VOCAB,
        "draft_vocab_size": s.VOCAB,
        "hidden_size": s.HIDDEN,
        "intermediate_size": s.DRAFT_FEED_FORWARD,
        "num_hidden_layers": 1,
        "num_attention_heads": s.HEADS,
        "num_key_value_heads": s.KV_HEADS,
        "head_dim": s.HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": s.MAX_POSITION,
        "rms_norm_eps": s.NORM_EPS,
        "rope_theta": s.ROPE_THETA,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": s.BOS,
        "eos_token_id": s.EOS,
        "pad_token_id": s.PAD,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_target(directory: Path, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def load_draft(directory: Path, dtype: torch.dtype = torch.bfloat16) -> Draft:
    draft = Draft().to(dtype)
    draft.load_state_dict(load_file(directory / "model.safetensors"))
    return draft.eval()


def random_draft(seed: int = 0) -> Draft:
    """Make a randomly initialised draft in bf16, weights normal with deviation 0.02 and norms 1: the floor."""
    generator = torch.Generator().manual_seed(seed)
    draft = Draft().to(torch.bfloat16)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
    return draft.eval()
