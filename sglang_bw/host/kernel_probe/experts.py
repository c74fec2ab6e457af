"""The Triton MoE path, as the engine runs it, and the block-FP8 linear layer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from sglang_bw.host.kernel_probe.engine import Case, call, find
from sglang_bw.host.kernel_probe.shapes import DENSE, MOE, Dense, Moe

# The engine's default configurations change where a batch has more tokens than the layer has experts.
_TOKENS = (16, 8192)
_BLOCK = 128
_INT4_GROUP = 32
_FP8 = torch.float8_e4m3fn

_EXPERTS = (
    "srt.layers.moe.moe_runner.triton_utils.fused_moe:fused_experts_impl",
    "srt.layers.moe.fused_moe_triton.fused_moe:fused_experts_impl",
)
_KERNELS = ("kernels.ops.moe.fused_moe_triton_kernels", "srt.layers.moe.fused_moe_triton.fused_moe_triton_kernels")
_LINEAR = (
    "kernels.ops.gemm.fp8_kernel:w8a8_block_fp8_matmul_triton",
    "srt.layers.quantization.fp8_kernel:w8a8_block_fp8_matmul_triton",
)


def cases() -> Iterator[Case]:
    """Return the cases of this module."""
    for shape in MOE:
        for weights in shape.formats:
            for tokens in _TOKENS:
                name = f"experts, {weights}, {tokens} tokens"
                yield Case("moe", name, shape.model, partial(_experts, shape, weights, tokens))
        yield Case("moe", "sum of the experts", shape.model, partial(_sum, shape))
    for layer in DENSE:
        for tokens in _TOKENS:
            yield Case("linear", f"fp8 block, {tokens} tokens", layer.model, partial(_linear, layer, tokens))


def _cuda(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="cuda")


def _blocks(size: int) -> int:
    return -(-size // _BLOCK)


def _weights(shape: Moe, weights: str) -> dict[str, Any]:
    """Return the weights of both layers and how they are quantized, as arguments of the engine's function."""
    gate_up, hidden, width, experts = 2 * shape.width, shape.hidden, shape.width, shape.experts
    sizes = {"w1": (gate_up, hidden), "w2": (hidden, width)}
    if weights == "int4":
        return {
            **{name: _cuda(experts, n, k // 2, dtype=torch.uint8) for name, (n, k) in sizes.items()},
            **{f"{name}_scale": _cuda(experts, n, k // _INT4_GROUP) for name, (n, k) in sizes.items()},
            "use_int4_w4a16": True,
            "block_shape": [0, _INT4_GROUP],
        }
    if weights == "bf16":
        return {name: _cuda(experts, n, k) for name, (n, k) in sizes.items()}
    kind = weights.removeprefix("fp8 ")
    scales: dict[str, tuple[int, ...]] = dict.fromkeys(sizes, (experts,))
    if kind == "block":
        scales = {name: (experts, _blocks(n), _blocks(k)) for name, (n, k) in sizes.items()}
    elif kind == "channel":
        scales = {name: (experts, n, 1) for name, (n, _) in sizes.items()}
    return {
        **{name: _cuda(experts, n, k, dtype=_FP8) for name, (n, k) in sizes.items()},
        **{f"{name}_scale": _cuda(*size, dtype=torch.float32) for name, size in scales.items()},
        "use_fp8_w8a8": True,
        "per_channel_quant": kind == "channel",
        "block_shape": [_BLOCK, _BLOCK] if kind == "block" else None,
    }


def _experts(shape: Moe, weights: str, tokens: int) -> None:
    call(
        find(*_EXPERTS),
        hidden_states=_cuda(tokens, shape.hidden),
        topk_weights=_cuda(tokens, shape.top_k, dtype=torch.float32),
        topk_ids=_cuda(tokens, shape.top_k, dtype=torch.int32),
        inplace=True,
        filter_expert=False,
        **_weights(shape, weights),
    )


def _sum(shape: Moe) -> None:
    call(
        find(*(f"{module}:moe_sum_reduce_triton" for module in _KERNELS)),
        input=_cuda(_TOKENS[1], shape.top_k, shape.hidden),
        output=_cuda(_TOKENS[1], shape.hidden),
        routed_scaling_factor=1.0,
    )


def _linear(layer: Dense, tokens: int) -> None:
    call(
        find(*_LINEAR),
        A=_cuda(tokens, layer.columns, dtype=_FP8),
        B=_cuda(layer.rows, layer.columns, dtype=_FP8),
        As=_cuda(tokens, _blocks(layer.columns), dtype=torch.float32),
        Bs=_cuda(_blocks(layer.rows), _blocks(layer.columns), dtype=torch.float32),
        block_size=[_BLOCK, _BLOCK],
        output_dtype=torch.bfloat16,
    )
