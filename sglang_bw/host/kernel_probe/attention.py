"""Attention of the Triton backend: draft decode, verify and prefill."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from sglang_bw.host.kernel_probe.engine import AbsentError, Case, call, find
from sglang_bw.host.kernel_probe.shapes import ATTENTION, PREFILL, Attention

_REQUESTS = 32
_DRAFT_TOKENS = 4
_CACHE_SLOTS = 1 << 16
_CONTEXT = 1 << 17
_KV_TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}

_DECODE = (
    "kernels.ops.attention.decode_attention:decode_attention_fwd",
    "srt.layers.attention.triton_ops.decode_attention:decode_attention_fwd",
)
_EXTEND = tuple(place.replace("decode", "extend") for place in _DECODE)


def cases() -> Iterator[Case]:
    """Return the cases of this module."""
    for shape in ATTENTION:
        for kv in _KV_TYPES:
            yield Case("attention", f"decode, {kv} cache", shape.model, partial(_decode, shape, kv))
            for tree in (True, False):
                name = f"verify a {'tree' if tree else 'chain'}, {kv} cache"
                yield Case("attention", name, shape.model, partial(_extend, shape, kv, _DRAFT_TOKENS, tree=tree))
    for shape in PREFILL:
        for kv in _KV_TYPES:
            yield Case("attention", f"prefill, {kv} cache", shape.model, partial(_extend, shape, kv, 512, tree=False))


def _cuda(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="cuda")


def _caches(shape: Attention, kv: str) -> tuple[torch.Tensor, torch.Tensor]:
    keys = _cuda(_CACHE_SLOTS, shape.kv_heads, shape.qk_dim, dtype=_KV_TYPES[kv])
    if shape.absorbed:
        return keys, keys[..., : shape.v_dim]
    return keys, _cuda(_CACHE_SLOTS, shape.kv_heads, shape.v_dim, dtype=_KV_TYPES[kv])


def _kv_splits(shape: Attention) -> int:
    splits = 8
    try:
        splits = find("srt.runtime_context:get_exec")().kernel.triton_attention_num_kv_splits
        if shape.absorbed:
            cap = find("srt.layers.attention.triton_backend:_mla_decode_kv_splits_cap")
            splits = cap(splits, torch.cuda.get_device_properties(0).multi_processor_count, _CONTEXT)
    except AbsentError:
        pass
    return int(splits)


def _pdl() -> bool:
    try:
        return bool(find("kernels.jit.utils:is_arch_support_pdl")())
    except AbsentError:
        return False


def _decode(shape: Attention, kv: str) -> None:
    keys, values = _caches(shape, kv)
    splits = _kv_splits(shape)
    call(
        find(*_DECODE),
        q=_cuda(_REQUESTS, shape.heads, shape.qk_dim),
        k_buffer=keys,
        v_buffer=values,
        o=_cuda(_REQUESTS, shape.heads, shape.v_dim),
        kv_indptr=_cuda(_REQUESTS + 1, dtype=torch.int32),
        kv_indices=_cuda(_CACHE_SLOTS, dtype=torch.int64),
        attn_logits=_cuda(_REQUESTS, shape.heads, splits, shape.v_dim, dtype=torch.float32),
        attn_lse=_cuda(_REQUESTS, shape.heads, splits, dtype=torch.float32),
        num_kv_splits=_cuda(_REQUESTS, dtype=torch.int32),
        max_kv_splits=splits,
        sm_scale=shape.qk_dim**-0.5,
        k_scale=1.0,
        v_scale=1.0,
        has_mla=shape.absorbed,
        use_pdl=_pdl(),
    )


def _extend(shape: Attention, kv: str, tokens_per_request: int, *, tree: bool) -> None:
    keys, values = _caches(shape, kv)
    tokens = _REQUESTS * tokens_per_request
    mask: dict[str, Any] = {"custom_mask": None, "mask_indptr": None}
    if tree:
        mask = {
            "custom_mask": _cuda(tokens * _CONTEXT, dtype=torch.bool),
            "mask_indptr": _cuda(_REQUESTS + 1, dtype=torch.int64),
        }
    call(
        find(*_EXTEND),
        q_extend=_cuda(tokens, shape.heads, shape.qk_dim),
        k_extend=_cuda(tokens, shape.kv_heads, shape.qk_dim),
        v_extend=_cuda(tokens, shape.kv_heads, shape.v_dim),
        o_extend=_cuda(tokens, shape.heads, shape.v_dim),
        k_buffer=keys,
        v_buffer=values,
        qo_indptr=_cuda(_REQUESTS + 1, dtype=torch.int64),
        kv_indptr=_cuda(_REQUESTS + 1, dtype=torch.int32),
        kv_indices=_cuda(_CACHE_SLOTS, dtype=torch.int64),
        is_causal=True,
        max_len_extend=tokens_per_request,
        k_scale=1.0,
        v_scale=1.0,
        sm_scale=shape.qk_dim**-0.5,
        **mask,
    )
