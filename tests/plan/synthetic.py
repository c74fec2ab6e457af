"""Checkpoints of large models without their weights: headers with the names, dtypes and shapes of the published files.

Written from the models' own configurations; no data follows the headers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Entry = tuple[str, str, tuple[int, ...]]  # name, dtype, shape
SIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I32": 4}


def write(folder: Path, config: dict[str, Any], entries: Iterable[Entry], *, shards: int = 4) -> Path:
    """Write ``config.json``, an index and header-only shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    parts: list[dict[str, Any]] = [{} for _ in range(shards)]
    weight_map = {}
    for number, (name, dtype, shape) in enumerate(entries):
        part = number % shards
        size = SIZES[dtype]
        for length in shape:
            size *= length
        parts[part][name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [0, size]}
        weight_map[name] = f"model-{part + 1:05}-of-{shards:05}.safetensors"
    for part, header in enumerate(parts):
        text = json.dumps(header).encode()
        path = folder / f"model-{part + 1:05}-of-{shards:05}.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def bf16(name: str, *shape: int) -> Iterator[Entry]:
    yield f"{name}.weight", "BF16", shape


def int4(name: str, rows: int, columns: int) -> Iterator[Entry]:
    """compressed-tensors, pack-quantized: eight to an int32, a bf16 scale for 32."""
    yield f"{name}.weight_packed", "I32", (rows, columns // 8)
    yield f"{name}.weight_scale", "BF16", (rows, columns // 32)
    yield f"{name}.weight_shape", "I32", (2,)


def nvfp4(name: str, rows: int, columns: int) -> Iterator[Entry]:
    yield f"{name}.weight", "U8", (rows, columns // 2)
    yield f"{name}.weight_scale", "F8_E4M3", (rows, columns // 16)
    yield f"{name}.weight_scale_2", "F32", ()
    yield f"{name}.input_scale", "F32", ()


def fp8_channel(name: str, rows: int, columns: int) -> Iterator[Entry]:
    yield f"{name}.weight", "F8_E4M3", (rows, columns)
    yield f"{name}.weight_scale", "BF16", (rows, 1)


def fp8_block(name: str, rows: int, columns: int) -> Iterator[Entry]:
    yield f"{name}.weight", "F8_E4M3", (rows, columns)
    yield f"{name}.weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))


def mlp(name: str, hidden: int, width: int, kind: Any, names: tuple[str, str, str]) -> Iterator[Entry]:
    gate, up, down = names
    yield from kind(f"{name}.{gate}", width, hidden)
    yield from kind(f"{name}.{up}", width, hidden)
    yield from kind(f"{name}.{down}", hidden, width)


GLU = ("gate_proj", "up_proj", "down_proj")


def kimi(kind: Any, *, prefix: str = "language_model.", vision: bool = True) -> Iterator[Entry]:
    """Kimi-K2: 61 layers of MLA, 384 experts in all but the first."""
    hidden = 7168
    yield from bf16(f"{prefix}model.embed_tokens", 163840, hidden)
    yield from bf16(f"{prefix}lm_head", 163840, hidden)
    yield from bf16(f"{prefix}model.norm", hidden)
    for layer in range(61):
        name = f"{prefix}model.layers.{layer}"
        yield from bf16(f"{name}.input_layernorm", hidden)
        yield from bf16(f"{name}.post_attention_layernorm", hidden)
        yield from bf16(f"{name}.self_attn.q_a_proj", 1536, hidden)
        yield from bf16(f"{name}.self_attn.q_a_layernorm", 1536)
        yield from bf16(f"{name}.self_attn.q_b_proj", 64 * 192, 1536)
        yield from bf16(f"{name}.self_attn.kv_a_proj_with_mqa", 576, hidden)
        yield from bf16(f"{name}.self_attn.kv_a_layernorm", 512)
        yield from bf16(f"{name}.self_attn.kv_b_proj", 64 * 256, 512)
        yield from bf16(f"{name}.self_attn.o_proj", hidden, 64 * 128)
        if layer == 0:
            yield from mlp(f"{name}.mlp", hidden, 18432, bf16, GLU)
            continue
        yield from bf16(f"{name}.mlp.gate", 384, hidden)
        yield f"{name}.mlp.gate.e_score_correction_bias", "F32", (384,)
        yield from mlp(f"{name}.mlp.shared_experts", hidden, 2048, bf16, GLU)
        for expert in range(384):
            yield from mlp(f"{name}.mlp.experts.{expert}", hidden, 2048, kind, GLU)
    if vision:
        yield from moonvit()


def moonvit() -> Iterator[Entry]:
    yield from bf16("vision_tower.patch_embed.proj", 1152, 3, 14, 14)
    yield from bf16("vision_tower.patch_embed.pos_emb", 64, 64, 1152)
    for block in range(27):
        name = f"vision_tower.encoder.blocks.{block}"
        yield from bf16(f"{name}.wqkv", 3 * 1152, 1152)
        yield from bf16(f"{name}.wo", 1152, 1152)
        yield from bf16(f"{name}.mlp.fc0", 4304, 1152)
        yield from bf16(f"{name}.mlp.fc1", 1152, 4304)
    yield from bf16("mm_projector.proj.0", 4608, 4608)
    yield from bf16("mm_projector.proj.2", 7168, 4608)


def glm47(kind: Any = fp8_channel) -> Iterator[Entry]:
    """GLM-4.7: 92 layers of GQA, 160 experts in all but the first three, and an MTP layer."""
    hidden = 5120
    yield from bf16("model.embed_tokens", 151552, hidden)
    yield from bf16("lm_head", 151552, hidden)
    for layer in range(93):
        name = f"model.layers.{layer}"
        for part, rows in (("q_proj", 96 * 128), ("k_proj", 8 * 128), ("v_proj", 8 * 128)):
            yield from kind(f"{name}.self_attn.{part}", rows, hidden)
            yield f"{name}.self_attn.{part}.bias", "BF16", (rows,)
        yield from kind(f"{name}.self_attn.o_proj", hidden, 96 * 128)
        yield from bf16(f"{name}.self_attn.q_norm", 128)
        yield from bf16(f"{name}.input_layernorm", hidden)
        if layer < 3:
            yield from mlp(f"{name}.mlp", hidden, 12288, kind, GLU)
            continue
        yield from bf16(f"{name}.mlp.gate", 160, hidden)
        yield from mlp(f"{name}.mlp.shared_experts", hidden, 1536, kind, GLU)
        for expert in range(160):
            yield from mlp(f"{name}.mlp.experts.{expert}", hidden, 1536, kind, GLU)
    yield from bf16("model.layers.92.eh_proj", hidden, 2 * hidden)
    yield from bf16("model.layers.92.embed_tokens", 151552, hidden)
    yield from bf16("model.layers.92.shared_head.head", 151552, hidden)
    yield from bf16("model.layers.92.enorm", hidden)


def qwen35() -> Iterator[Entry]:
    """Qwen3.5-397B: 60 layers, three of four with linear attention, 512 experts; experts in NVFP4, the rest in bf16."""
    hidden = 4096
    yield from bf16("model.language_model.embed_tokens", 248320, hidden)
    yield from bf16("lm_head", 248320, hidden)
    for layer in range(60):
        name = f"model.language_model.layers.{layer}"
        if layer % 4 == 3:
            yield from qwen35_attention(f"{name}.self_attn", hidden)
        else:
            keys, values = 16 * 128, 64 * 128
            yield from bf16(f"{name}.linear_attn.in_proj_qkv", 2 * keys + values, hidden)
            yield from bf16(f"{name}.linear_attn.in_proj_z", values, hidden)
            yield from bf16(f"{name}.linear_attn.in_proj_a", 64, hidden)
            yield from bf16(f"{name}.linear_attn.in_proj_b", 64, hidden)
            yield from bf16(f"{name}.linear_attn.conv1d", 2 * keys + values, 1, 4)
            yield f"{name}.linear_attn.A_log", "F32", (64,)
            yield f"{name}.linear_attn.dt_bias", "BF16", (64,)
            yield from bf16(f"{name}.linear_attn.norm", 128)
            yield from bf16(f"{name}.linear_attn.out_proj", hidden, values)
        yield from qwen35_experts(f"{name}.mlp", hidden, nvfp4)
    yield from bf16("mtp.fc", hidden, 2 * hidden)
    yield from qwen35_attention("mtp.layers.0.self_attn", hidden)
    yield from qwen35_experts("mtp.layers.0.mlp", hidden, bf16)
    for block in range(27):
        yield from bf16(f"model.visual.blocks.{block}.attn.qkv", 3 * 1152, 1152)
        yield from bf16(f"model.visual.blocks.{block}.attn.proj", 1152, 1152)
        yield from bf16(f"model.visual.blocks.{block}.mlp.linear_fc1", 4304, 1152)
        yield from bf16(f"model.visual.blocks.{block}.mlp.linear_fc2", 1152, 4304)
    yield from bf16("model.visual.merger.linear_fc1", 4608, 4608)
    yield from bf16("model.visual.merger.linear_fc2", 4096, 4608)


def qwen35_attention(name: str, hidden: int) -> Iterator[Entry]:
    yield from bf16(f"{name}.q_proj", 2 * 32 * 256, hidden)
    yield from bf16(f"{name}.k_proj", 2 * 256, hidden)
    yield from bf16(f"{name}.v_proj", 2 * 256, hidden)
    yield from bf16(f"{name}.o_proj", hidden, 32 * 256)


def qwen35_experts(name: str, hidden: int, kind: Any) -> Iterator[Entry]:
    yield from bf16(f"{name}.gate", 512, hidden)
    yield from bf16(f"{name}.shared_expert_gate", 1, hidden)
    yield from mlp(f"{name}.shared_expert", hidden, 1024, bf16, GLU)
    for expert in range(512):
        yield from mlp(f"{name}.experts.{expert}", hidden, 1024, kind, GLU)


def minimax() -> Iterator[Entry]:
    """MiniMax-M2.5: 62 layers of GQA, 256 experts, FP8 in blocks."""
    hidden = 3072
    yield from bf16("model.embed_tokens", 200064, hidden)
    yield from bf16("lm_head", 200064, hidden)
    for layer in range(62):
        name = f"model.layers.{layer}"
        yield from fp8_block(f"{name}.self_attn.q_proj", 48 * 128, hidden)
        yield from fp8_block(f"{name}.self_attn.k_proj", 8 * 128, hidden)
        yield from fp8_block(f"{name}.self_attn.v_proj", 8 * 128, hidden)
        yield from fp8_block(f"{name}.self_attn.o_proj", hidden, 48 * 128)
        yield f"{name}.block_sparse_moe.gate.weight", "F32", (256, hidden)
        yield f"{name}.block_sparse_moe.e_score_correction_bias", "F32", (256,)
        for expert in range(256):
            yield from mlp(f"{name}.block_sparse_moe.experts.{expert}", hidden, 1536, fp8_block, ("w1", "w3", "w2"))
