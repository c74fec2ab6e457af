"""What a speculative round launches around the model: draft, tree, verify, commit, and the cache's bookkeeping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from sglang_bw.host.kernel_probe.engine import AbsentError, Case, call, find, launch
from sglang_bw.host.kernel_probe.shapes import DRAFT_VOCABULARY, VOCABULARY

# The largest batch that is captured as a graph: several kernels hold one element a request in registers.
_REQUESTS = 512
_STEPS = 3
_TREE_TOP_K = 4
_CONTEXT = 1 << 17
_CACHE_SLOTS = 1 << 20
_PAGES = (1, 64)
_INT32, _INT64 = torch.int32, torch.int64


def cases() -> Iterator[Case]:
    """Return the cases of this module."""
    for name, run in _ROUND.items():
        yield Case("speculation", name, "any", run)
    for top_k, width in ((1, _STEPS + 1), (_TREE_TOP_K, 16)):
        shape = f"top-k {top_k}, {width} tokens"
        yield Case("speculation", "tree build", shape, partial(_tree_build, top_k, width))
        yield Case("speculation", "greedy verify", shape, partial(_greedy_verify, width))
        for page in _PAGES:
            name = f"cache indices of the draft steps, pages of {page}"
            yield Case("cache", name, shape, partial(_draft_kv_indices, top_k, page))
    for page in _PAGES[1:]:
        yield Case("cache", f"pages for prefill, pages of {page}", "any", partial(_pages_for_prefill, page))
        yield Case("cache", f"pages for decode, pages of {page}", "any", partial(_pages_for_decode, page))
    for name, run in _CACHE.items():
        yield Case("cache", name, "any", run)
    for row_bytes in (256, 4096, 16384):
        yield Case("cache", "move accepted tokens", f"{row_bytes} bytes a token", partial(_move, row_bytes))
    for kv, dtype in (("bf16", torch.bfloat16), ("fp8", torch.uint8)):
        yield Case("cache", f"store and load MLA, {kv} cache", "MLA 512 + 64", partial(_mla_buffer, dtype))


def _cuda(*size: int, dtype: torch.dtype = _INT64) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="cuda")


def _requests() -> dict[str, torch.Tensor]:
    return {
        "req_pool_indices": _cuda(_REQUESTS),
        "req_to_token": _cuda(_REQUESTS, _CONTEXT, dtype=_INT32),
        "seq_lens": _cuda(_REQUESTS),
    }


def _argmax_of_draft() -> None:
    for vocabulary in (DRAFT_VOCABULARY, VOCABULARY):
        call(
            find("kernels.ops.speculative.topk1:draft_topk1_postprocess"),
            next_token_logits=_cuda(_REQUESTS, vocabulary, dtype=torch.bfloat16),
            positions=_cuda(_REQUESTS),
            draft_tokens=_cuda(_REQUESTS, _STEPS),
        )


def _row_argmax() -> None:
    row_argmax = find("kernels.ops.speculative.row_argmax:row_argmax")
    for requests in (1, 64):
        row_argmax(_cuda(requests, VOCABULARY, dtype=torch.float32))


def _chain_tree() -> None:
    requests = _requests()
    call(
        find("kernels.ops.speculative.eagle:build_chain_tree"),
        bonus_tokens=_cuda(_REQUESTS, dtype=_INT32),
        draft_tokens=_cuda(_REQUESTS, _STEPS),
        seq_lens=requests["seq_lens"],
        req_pool_indices=requests["req_pool_indices"],
        req_to_token=requests["req_to_token"],
    )


def _tree_build(top_k: int, width: int) -> None:
    call(
        find("kernels.ops.speculative.spec_tree:sgl_build_tree_kernel_triton"),
        parent_list=_cuda(_REQUESTS, top_k * (_STEPS - 1) + 1),
        selected_index=_cuda(_REQUESTS, width - 1),
        verified_seq_len=_cuda(_REQUESTS),
        tree_mask=_cuda(_REQUESTS * width * (width + 1024), dtype=torch.bool),
        positions=_cuda(_REQUESTS * width),
        retrieve_index=_cuda(_REQUESTS, width),
        retrieve_next_token=_cuda(_REQUESTS, width),
        retrieve_next_sibling=_cuda(_REQUESTS, width),
        topk=top_k,
        depth=_STEPS,
        draft_token_num=width,
    )


def _greedy_verify(width: int) -> None:
    call(
        find("kernels.ops.speculative.spec_tree:verify_tree_greedy_triton"),
        predicts=_cuda(_REQUESTS * width, dtype=_INT32),
        accept_index=_cuda(_REQUESTS, _STEPS + 1, dtype=_INT32),
        accept_token_num=_cuda(_REQUESTS, dtype=_INT32),
        candidates=_cuda(_REQUESTS, width),
        retrieve_index=_cuda(_REQUESTS, width),
        retrieve_next_token=_cuda(_REQUESTS, width),
        retrieve_next_sibling=_cuda(_REQUESTS, width),
        target_predict=_cuda(_REQUESTS, width),
    )


def _sampled_verify() -> None:
    width = _STEPS + 1
    call(
        find("kernels.ops.speculative.reject_sampling:chain_speculative_sampling_triton"),
        predicts=_cuda(_REQUESTS * width, dtype=_INT32),
        accept_index=_cuda(_REQUESTS, width, dtype=_INT32),
        accept_token_num=_cuda(_REQUESTS, dtype=_INT32),
        candidates=_cuda(_REQUESTS, width),
        retrive_index=_cuda(_REQUESTS, width),
        retrive_next_token=_cuda(_REQUESTS, width),
        retrive_next_sibling=_cuda(_REQUESTS, width),
        uniform_samples=_cuda(_REQUESTS, width, dtype=torch.float32),
        uniform_samples_for_final_sampling=_cuda(_REQUESTS, dtype=torch.float32),
        target_probs=_cuda(_REQUESTS, width, VOCABULARY, dtype=torch.float32),
        draft_probs=_cuda(_REQUESTS, width, VOCABULARY, dtype=torch.float32),
        threshold_single=1.0,
        threshold_acc=1.0,
        deterministic=True,
    )


def _commit() -> None:
    width = _STEPS + 1
    call(
        find("kernels.ops.speculative.eagle:prepare_verify_commit_outputs"),
        predict=_cuda(_REQUESTS * width, dtype=_INT32),
        accept_index=_cuda(_REQUESTS, width, dtype=_INT32),
        accept_lens=_cuda(_REQUESTS, dtype=_INT32),
        seq_lens=_cuda(_REQUESTS),
        num_draft_tokens=width,
    )


def _bonus_tokens() -> None:
    width = _STEPS + 1
    tokens, lengths, bonus = (
        _cuda(_REQUESTS * width, dtype=_INT32),
        _cuda(_REQUESTS, dtype=_INT32),
        _cuda(_REQUESTS, dtype=_INT32),
    )
    try:
        fill = find("kernels.ops.speculative.eagle:fill_bonus_tokens_func")
    except AbsentError:
        kernel = find("srt.speculative.eagle_info_v2:fill_new_verified_id")
        kernel[(_REQUESTS,)](tokens, lengths, bonus, width)
        return
    fill(tokens, lengths, bonus, width, _REQUESTS)


def _accepted_slots() -> None:
    size = _REQUESTS * (_STEPS + 1)
    tensors = _cuda(size, dtype=_INT32), _cuda(size), _cuda(size)
    try:
        fill = find("kernels.ops.speculative.eagle:fill_accept_out_cache_loc_func")
    except AbsentError:
        kernel = find("srt.speculative.eagle_info_v2:fill_accepted_out_cache_loc")
        kernel[(size,)](*tensors, _power_of_two(size))
        return
    fill(*tensors, size)


def _draft_extend() -> None:
    width = _STEPS + 1
    find("kernels.ops.speculative.eagle:prepare_draft_extend_inputs")(
        _cuda(_REQUESTS, dtype=_INT32), _cuda(_REQUESTS * width, dtype=_INT32), width
    )
    find("kernels.ops.speculative.eagle:prepare_draft_extend_layout")(_cuda(_REQUESTS), width, False)
    find("kernels.ops.speculative.eagle:prepare_draft_extend_lengths")(_cuda(_REQUESTS), width, 1)


def _gather_extras() -> None:
    call(
        find("kernels.ops.speculative.gather_spec_extras:gather_spec_extras"),
        indices=_cuda(_REQUESTS),
        topk_p_buf=_cuda(_REQUESTS, 1, dtype=torch.float32),
        topk_index_buf=_cuda(_REQUESTS, 1),
        output_tokens_buf=_cuda(_REQUESTS, dtype=_INT32),
        hidden_states_buf=_cuda(_REQUESTS, 7168, dtype=torch.bfloat16),
    )


def _draft_slots() -> None:
    requests = _requests()
    for top_k in (1, _TREE_TOP_K):
        slots = _cuda(_REQUESTS * top_k * _STEPS)
        try:
            assign = find("kernels.ops.speculative.cache_locs:assign_draft_cache_locs_contiguous_func")
        except AbsentError:
            kernel = find("srt.speculative.eagle_info_v2:assign_draft_cache_locs_page_size_1")
            launch(
                kernel,
                (_REQUESTS,),
                **requests,
                out_cache_loc=slots,
                pool_len=_CONTEXT,
                topk=top_k,
                speculative_num_steps=_STEPS,
            )
            continue
        call(
            assign,
            **requests,
            out_cache_loc=slots,
            topk=top_k,
            num_cols=_STEPS,
            positions=_cuda(_REQUESTS * top_k),
        )


def _verify_slots() -> None:
    requests = _requests()
    arguments = {
        "req_pool_indices": requests["req_pool_indices"],
        "req_to_token": requests["req_to_token"],
        "start_offset": requests["seq_lens"],
        "end_offset": requests["seq_lens"],
        "batch_size": _REQUESTS,
        "draft_token_num": _STEPS + 1,
        "device": "cuda",
    }
    places = "kernels.ops.speculative.cache_locs", "srt.speculative.eagle_info_v2"
    call(find(*(f"{place}:assign_extend_cache_locs_func" for place in places)), **arguments)
    try:
        call(find("kernels.ops.speculative.cache_locs:assign_extend_cache_locs_uniform_func"), **arguments)
    except AbsentError:
        return


def _draft_kv_indices(top_k: int, page: int) -> None:
    requests = _requests()
    kernel = find(
        "kernels.ops.speculative.cache_locs:generate_draft_decode_kv_indices",
        "srt.speculative.spec_utils:generate_draft_decode_kv_indices",
    )
    launch(
        kernel,
        (_STEPS, _REQUESTS, top_k),
        req_pool_indices=requests["req_pool_indices"],
        req_to_token=requests["req_to_token"],
        paged_kernel_lens=requests["seq_lens"],
        kv_indices=_cuda(_STEPS, _CACHE_SLOTS),
        kv_indptr=_cuda(_STEPS, _REQUESTS * top_k + 1, dtype=_INT32),
        positions=_cuda(_REQUESTS * top_k),
        pool_len=_CONTEXT,
        row_stride=_CONTEXT,
        kv_indices_stride=_CACHE_SLOTS,
        kv_indptr_stride=_REQUESTS * top_k + 1,
        bs_upper=_power_of_two(_REQUESTS),
        iter_upper=_power_of_two(_STEPS),
        num_tokens_upper=_power_of_two(_REQUESTS * top_k),
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
            (_REQUESTS, blocks),
            req_to_token_ptr=_cuda(_REQUESTS, _CONTEXT, dtype=_INT32),
            req_pool_indices_ptr=_cuda(_REQUESTS),
            page_kernel_lens_ptr=_cuda(_REQUESTS),
            kv_indptr=_cuda(_REQUESTS + 1, dtype=_INT32),
            kv_start_idx=None,
            kv_indices_ptr=_cuda(_CACHE_SLOTS),
            req_to_token_ptr_stride=_CONTEXT,
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
    backend.get_num_kv_splits(facts, _cuda(_REQUESTS, dtype=_INT32), _cuda(_REQUESTS))


def _pages_for_prefill(page: int) -> None:
    kernel = find("kernels.ops.memory.allocator:alloc_extend_kernel", "srt.mem_cache.allocator:alloc_extend_kernel")
    launch(
        kernel,
        (_REQUESTS,),
        pre_lens_ptr=_cuda(_REQUESTS),
        seq_lens_ptr=_cuda(_REQUESTS),
        last_loc_ptr=_cuda(_REQUESTS),
        free_page_ptr=_cuda(_CACHE_SLOTS // page),
        out_indices=_cuda(_CACHE_SLOTS),
        bs_upper=_power_of_two(_REQUESTS),
        page_size=page,
        max_num_extend_tokens=8192,
    )


def _pages_for_decode(page: int) -> None:
    kernel = find("kernels.ops.memory.allocator:alloc_decode_kernel", "srt.mem_cache.allocator:alloc_decode_kernel")
    launch(
        kernel,
        (_REQUESTS,),
        seq_lens_ptr=_cuda(_REQUESTS),
        last_loc_ptr=_cuda(_REQUESTS),
        free_page_ptr=_cuda(_CACHE_SLOTS // page),
        out_indices=_cuda(_REQUESTS),
        bs_upper=_power_of_two(_REQUESTS),
        page_size=page,
    )


def _last_slots() -> None:
    places = "kernels.ops.memory.common", "srt.mem_cache.common"
    find(*(f"{place}:get_last_loc_triton" for place in places))(
        _cuda(_REQUESTS, _CONTEXT, dtype=_INT32), _cuda(_REQUESTS), _cuda(_REQUESTS)
    )


def _write_table() -> None:
    places = "kernels.ops.memory.common", "srt.mem_cache.common"
    kernel = find(*(f"{place}:write_req_to_token_pool_triton" for place in places))
    kernel[(_REQUESTS,)](
        _cuda(_REQUESTS, _CONTEXT, dtype=_INT32),
        _cuda(_REQUESTS),
        _cuda(_REQUESTS),
        _cuda(_REQUESTS),
        _cuda(_REQUESTS),
        _cuda(_REQUESTS),
        _cuda(_CACHE_SLOTS),
        _CONTEXT,
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
        data_ptrs=_cuda(122, dtype=torch.uint64),
        data_strides=_Strides(row_bytes),
        device="cuda",
        _slot_move_pointer_buffers=list,
    )
    pool._init_kv_copy_and_warmup(buffers)


def _mla_buffer(dtype: torch.dtype) -> None:
    places = "kernels.ops.kvcache.mla_buffer", "srt.mem_cache.utils"
    tokens = 4096
    arguments = {
        "kv_buffer": _cuda(_CACHE_SLOTS, 1, 576, dtype=dtype),
        "loc": _cuda(tokens),
        "cache_k_nope": _cuda(tokens, 1, 512, dtype=dtype),
        "cache_k_rope": _cuda(tokens, 1, 64, dtype=dtype),
    }
    for name in ("set_mla_kv_buffer_triton", "get_mla_kv_buffer_triton"):
        call(find(*(f"{place}:{name}" for place in places)), **arguments)


def _positions() -> None:
    places = "kernels.ops.attention.position", "srt.model_executor.forward_batch_info"
    find(*(f"{place}:compute_position_triton" for place in places))(
        _cuda(_REQUESTS, dtype=_INT32), _cuda(_REQUESTS, dtype=_INT32), 8192
    )


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


_ROUND: dict[str, Callable[[], Any]] = {
    "argmax of the draft": _argmax_of_draft,
    "argmax of the target": _row_argmax,
    "chain build": _chain_tree,
    "sampled verify of a chain": _sampled_verify,
    "commit": _commit,
    "bonus tokens": _bonus_tokens,
    "inputs of the draft's extend": _draft_extend,
    "gather what the draft needs": _gather_extras,
    "positions": _positions,
}
_CACHE: dict[str, Callable[[], Any]] = {
    "slots of the draft": _draft_slots,
    "slots of verify": _verify_slots,
    "slots of accepted tokens": _accepted_slots,
    "indices for attention": _kv_indices,
    "splits of decode attention": _kv_splits,
    "last slot of a request": _last_slots,
    "write the table": _write_table,
}
