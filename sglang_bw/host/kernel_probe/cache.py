"""What a speculative round launches for the KV cache: slots, pages, indices, and moves of accepted tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from sglang_bw.host.kernel_probe.engine import AbsentError, Case, call, find, launch
from sglang_bw.host.kernel_probe.tensors import (
    CONTEXT,
    INT32,
    REQUESTS,
    ROUNDS,
    STEPS,
    TREE_TOP_K,
    cuda,
    power_of_two,
    requests,
    shape_of,
)

_CACHE_SLOTS = 1 << 20
_PAGES = (1, 64)


def cases() -> Iterator[Case]:
    """Return the cases of this module."""
    for top_k, width in ROUNDS:
        for page in _PAGES:
            name = f"cache indices of the draft steps, pages of {page}"
            yield Case("cache", name, shape_of(top_k, width), partial(_draft_kv_indices, top_k, page))
    for page in _PAGES[1:]:
        yield Case("cache", f"pages for prefill, pages of {page}", "any", partial(_pages_for_prefill, page))
        yield Case("cache", f"pages for decode, pages of {page}", "any", partial(_pages_for_decode, page))
    for name, run in _CACHE.items():
        yield Case("cache", name, "any", run)
    for row_bytes in (256, 4096, 16384):
        yield Case("cache", "move accepted tokens", f"{row_bytes} bytes a token", partial(_move, row_bytes))
    for kv, dtype in (("bf16", torch.bfloat16), ("fp8", torch.uint8)):
        yield Case("cache", f"store and load MLA, {kv} cache", "MLA 512 + 64", partial(_mla_buffer, dtype))


def _draft_slots() -> None:
    batch = requests()
    for top_k in (1, TREE_TOP_K):
        slots = cuda(REQUESTS * top_k * STEPS)
        try:
            assign = find("kernels.ops.speculative.cache_locs:assign_draft_cache_locs_contiguous_func")
        except AbsentError:
            kernel = find("srt.speculative.eagle_info_v2:assign_draft_cache_locs_page_size_1")
            launch(
                kernel,
                (REQUESTS,),
                **batch,
                out_cache_loc=slots,
                pool_len=CONTEXT,
                topk=top_k,
                speculative_num_steps=STEPS,
            )
            continue
        call(
            assign,
            **batch,
            out_cache_loc=slots,
            topk=top_k,
            num_cols=STEPS,
            positions=cuda(REQUESTS * top_k),
        )


def _verify_slots() -> None:
    batch = requests()
    arguments = {
        "req_pool_indices": batch["req_pool_indices"],
        "req_to_token": batch["req_to_token"],
        "start_offset": batch["seq_lens"],
        "end_offset": batch["seq_lens"],
        "batch_size": REQUESTS,
        "draft_token_num": STEPS + 1,
        "device": "cuda",
    }
    places = "kernels.ops.speculative.cache_locs", "srt.speculative.eagle_info_v2"
    call(find(*(f"{place}:assign_extend_cache_locs_func" for place in places)), **arguments)
    try:
        call(find("kernels.ops.speculative.cache_locs:assign_extend_cache_locs_uniform_func"), **arguments)
    except AbsentError:
        return


def _accepted_slots() -> None:
    size = REQUESTS * (STEPS + 1)
    tensors = cuda(size, dtype=INT32), cuda(size), cuda(size)
    try:
        fill = find("kernels.ops.speculative.eagle:fill_accept_out_cache_loc_func")
    except AbsentError:
        kernel = find("srt.speculative.eagle_info_v2:fill_accepted_out_cache_loc")
        kernel[(size,)](*tensors, power_of_two(size))
        return
    fill(*tensors, size)


def _draft_kv_indices(top_k: int, page: int) -> None:
    batch = requests()
    kernel = find(
        "kernels.ops.speculative.cache_locs:generate_draft_decode_kv_indices",
        "srt.speculative.spec_utils:generate_draft_decode_kv_indices",
    )
    launch(
        kernel,
        (STEPS, REQUESTS, top_k),
        req_pool_indices=batch["req_pool_indices"],
        req_to_token=batch["req_to_token"],
        paged_kernel_lens=batch["seq_lens"],
        kv_indices=cuda(STEPS, _CACHE_SLOTS),
        kv_indptr=cuda(STEPS, REQUESTS * top_k + 1, dtype=INT32),
        positions=cuda(REQUESTS * top_k),
        pool_len=CONTEXT,
        row_stride=CONTEXT,
        kv_indices_stride=_CACHE_SLOTS,
        kv_indptr_stride=REQUESTS * top_k + 1,
        bs_upper=power_of_two(REQUESTS),
        iter_upper=power_of_two(STEPS),
        num_tokens_upper=power_of_two(REQUESTS * top_k),
        page_size=page,
    )


def _kv_indices() -> None:
    kernel = find(
        "kernels.ops.attention.kv_indices:create_flashinfer_kv_indices_triton",
        "srt.layers.attention.utils:create_flashinfer_kv_indices_triton",
    )
    for blocks in (1, 8):
        launch(
            kernel,
            (REQUESTS, blocks),
            req_to_token_ptr=cuda(REQUESTS, CONTEXT, dtype=INT32),
            req_pool_indices_ptr=cuda(REQUESTS),
            page_kernel_lens_ptr=cuda(REQUESTS),
            kv_indptr=cuda(REQUESTS + 1, dtype=INT32),
            kv_start_idx=None,
            kv_indices_ptr=cuda(_CACHE_SLOTS),
            req_to_token_ptr_stride=CONTEXT,
            TOKEN_BLOCK_PARALLEL=blocks > 1,
        )


def _kv_splits() -> None:
    backend = find("srt.layers.attention.triton_backend:TritonAttnBackend")
    facts = SimpleNamespace(
        num_head=8,
        num_kv_head=1,
        max_kv_splits=8,
        device_core_count=torch.cuda.get_device_properties(0).multi_processor_count,
        static_kv_splits=False,
        split_tile_size=None,
        enable_deterministic=False,
        _is_hip=False,
    )
    backend.get_num_kv_splits(facts, cuda(REQUESTS, dtype=INT32), cuda(REQUESTS))


def _pages_for_prefill(page: int) -> None:
    kernel = find("kernels.ops.memory.allocator:alloc_extend_kernel", "srt.mem_cache.allocator:alloc_extend_kernel")
    launch(
        kernel,
        (REQUESTS,),
        pre_lens_ptr=cuda(REQUESTS),
        seq_lens_ptr=cuda(REQUESTS),
        last_loc_ptr=cuda(REQUESTS),
        free_page_ptr=cuda(_CACHE_SLOTS // page),
        out_indices=cuda(_CACHE_SLOTS),
        bs_upper=power_of_two(REQUESTS),
        page_size=page,
        max_num_extend_tokens=8192,
    )


def _pages_for_decode(page: int) -> None:
    kernel = find("kernels.ops.memory.allocator:alloc_decode_kernel", "srt.mem_cache.allocator:alloc_decode_kernel")
    launch(
        kernel,
        (REQUESTS,),
        seq_lens_ptr=cuda(REQUESTS),
        last_loc_ptr=cuda(REQUESTS),
        free_page_ptr=cuda(_CACHE_SLOTS // page),
        out_indices=cuda(REQUESTS),
        bs_upper=power_of_two(REQUESTS),
        page_size=page,
    )


def _last_slots() -> None:
    places = "kernels.ops.memory.common", "srt.mem_cache.common"
    find(*(f"{place}:get_last_loc_triton" for place in places))(
        cuda(REQUESTS, CONTEXT, dtype=INT32), cuda(REQUESTS), cuda(REQUESTS)
    )


def _write_table() -> None:
    places = "kernels.ops.memory.common", "srt.mem_cache.common"
    kernel = find(*(f"{place}:write_req_to_token_pool_triton" for place in places))
    kernel[(REQUESTS,)](
        cuda(REQUESTS, CONTEXT, dtype=INT32),
        cuda(REQUESTS),
        cuda(REQUESTS),
        cuda(REQUESTS),
        cuda(REQUESTS),
        cuda(REQUESTS),
        cuda(_CACHE_SLOTS),
        CONTEXT,
    )


class _Strides:
    """Bytes of a token in each buffer, known on the host as well, for the engine's choice of tiles."""

    dtype = torch.uint64

    def __init__(self, value: int) -> None:
        self._value = value

    def __getitem__(self, _index: int) -> _Strides:
        return self

    def item(self) -> int:
        return self._value

    def data_ptr(self) -> int:
        return 0


def _move(row_bytes: int) -> None:
    pool = find("srt.mem_cache.memory_pool:MHATokenToKVPool")
    buffers = SimpleNamespace(
        layer_num=61,
        data_ptrs=cuda(122, dtype=torch.uint64),
        data_strides=_Strides(row_bytes),
        device="cuda",
        _slot_move_pointer_buffers=list,
    )
    pool._init_kv_copy_and_warmup(buffers)


def _mla_buffer(dtype: torch.dtype) -> None:
    places = "kernels.ops.kvcache.mla_buffer", "srt.mem_cache.utils"
    tokens = 4096
    arguments = {
        "kv_buffer": cuda(_CACHE_SLOTS, 1, 576, dtype=dtype),
        "loc": cuda(tokens),
        "cache_k_nope": cuda(tokens, 1, 512, dtype=dtype),
        "cache_k_rope": cuda(tokens, 1, 64, dtype=dtype),
    }
    for name in ("set_mla_kv_buffer_triton", "get_mla_kv_buffer_triton"):
        call(find(*(f"{place}:{name}" for place in places)), **arguments)


_CACHE: dict[str, Callable[[], Any]] = {
    "slots of the draft": _draft_slots,
    "slots of verify": _verify_slots,
    "slots of accepted tokens": _accepted_slots,
    "indices for attention": _kv_indices,
    "splits of decode attention": _kv_splits,
    "last slot of a request": _last_slots,
    "write the table": _write_table,
}
