"""What a speculative round launches around the model: draft, tree, verify and commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from sglang_bw.host.kernel_probe.engine import AbsentError, Case, call, find
from sglang_bw.host.kernel_probe.shapes import DRAFT_VOCABULARY, VOCABULARY
from sglang_bw.host.kernel_probe.tensors import INT32, REQUESTS, ROUNDS, STEPS, cuda, requests, shape_of


def cases() -> Iterator[Case]:
    """Return the cases of this module."""
    for name, run in _ROUND.items():
        yield Case("speculation", name, "any", run)
    for top_k, width in ROUNDS:
        yield Case("speculation", "tree build", shape_of(top_k, width), partial(_tree_build, top_k, width))
        yield Case("speculation", "greedy verify", shape_of(top_k, width), partial(_greedy_verify, width))


def _argmax_of_draft() -> None:
    for vocabulary in (DRAFT_VOCABULARY, VOCABULARY):
        call(
            find("kernels.ops.speculative.topk1:draft_topk1_postprocess"),
            next_token_logits=cuda(REQUESTS, vocabulary, dtype=torch.bfloat16),
            positions=cuda(REQUESTS),
            draft_tokens=cuda(REQUESTS, STEPS),
        )


def _row_argmax() -> None:
    row_argmax = find("kernels.ops.speculative.row_argmax:row_argmax")
    for rows in (1, 64):
        row_argmax(cuda(rows, VOCABULARY, dtype=torch.float32))


def _chain_tree() -> None:
    batch = requests()
    call(
        find("kernels.ops.speculative.eagle:build_chain_tree"),
        bonus_tokens=cuda(REQUESTS, dtype=INT32),
        draft_tokens=cuda(REQUESTS, STEPS),
        seq_lens=batch["seq_lens"],
        req_pool_indices=batch["req_pool_indices"],
        req_to_token=batch["req_to_token"],
    )


def _tree_build(top_k: int, width: int) -> None:
    call(
        find("kernels.ops.speculative.spec_tree:sgl_build_tree_kernel_triton"),
        parent_list=cuda(REQUESTS, top_k * (STEPS - 1) + 1),
        selected_index=cuda(REQUESTS, width - 1),
        verified_seq_len=cuda(REQUESTS),
        tree_mask=cuda(REQUESTS * width * (width + 1024), dtype=torch.bool),
        positions=cuda(REQUESTS * width),
        retrieve_index=cuda(REQUESTS, width),
        retrieve_next_token=cuda(REQUESTS, width),
        retrieve_next_sibling=cuda(REQUESTS, width),
        topk=top_k,
        depth=STEPS,
        draft_token_num=width,
    )


def _greedy_verify(width: int) -> None:
    call(
        find("kernels.ops.speculative.spec_tree:verify_tree_greedy_triton"),
        predicts=cuda(REQUESTS * width, dtype=INT32),
        accept_index=cuda(REQUESTS, STEPS + 1, dtype=INT32),
        accept_token_num=cuda(REQUESTS, dtype=INT32),
        candidates=cuda(REQUESTS, width),
        retrieve_index=cuda(REQUESTS, width),
        retrieve_next_token=cuda(REQUESTS, width),
        retrieve_next_sibling=cuda(REQUESTS, width),
        target_predict=cuda(REQUESTS, width),
    )


def _sampled_verify() -> None:
    width = STEPS + 1
    call(
        find("kernels.ops.speculative.reject_sampling:chain_speculative_sampling_triton"),
        predicts=cuda(REQUESTS * width, dtype=INT32),
        accept_index=cuda(REQUESTS, width, dtype=INT32),
        accept_token_num=cuda(REQUESTS, dtype=INT32),
        candidates=cuda(REQUESTS, width),
        retrive_index=cuda(REQUESTS, width),
        retrive_next_token=cuda(REQUESTS, width),
        retrive_next_sibling=cuda(REQUESTS, width),
        uniform_samples=cuda(REQUESTS, width, dtype=torch.float32),
        uniform_samples_for_final_sampling=cuda(REQUESTS, dtype=torch.float32),
        target_probs=cuda(REQUESTS, width, VOCABULARY, dtype=torch.float32),
        draft_probs=cuda(REQUESTS, width, VOCABULARY, dtype=torch.float32),
        threshold_single=1.0,
        threshold_acc=1.0,
        deterministic=True,
    )


def _commit() -> None:
    width = STEPS + 1
    call(
        find("kernels.ops.speculative.eagle:prepare_verify_commit_outputs"),
        predict=cuda(REQUESTS * width, dtype=INT32),
        accept_index=cuda(REQUESTS, width, dtype=INT32),
        accept_lens=cuda(REQUESTS, dtype=INT32),
        seq_lens=cuda(REQUESTS),
        num_draft_tokens=width,
    )


def _bonus_tokens() -> None:
    width = STEPS + 1
    tokens, lengths, bonus = (
        cuda(REQUESTS * width, dtype=INT32),
        cuda(REQUESTS, dtype=INT32),
        cuda(REQUESTS, dtype=INT32),
    )
    try:
        fill = find("kernels.ops.speculative.eagle:fill_bonus_tokens_func")
    except AbsentError:
        kernel = find("srt.speculative.eagle_info_v2:fill_new_verified_id")
        kernel[(REQUESTS,)](tokens, lengths, bonus, width)
        return
    fill(tokens, lengths, bonus, width, REQUESTS)


def _draft_extend() -> None:
    width = STEPS + 1
    find("kernels.ops.speculative.eagle:prepare_draft_extend_inputs")(
        cuda(REQUESTS, dtype=INT32), cuda(REQUESTS * width, dtype=INT32), width
    )
    find("kernels.ops.speculative.eagle:prepare_draft_extend_layout")(cuda(REQUESTS), width, False)
    find("kernels.ops.speculative.eagle:prepare_draft_extend_lengths")(cuda(REQUESTS), width, 1)


def _gather_extras() -> None:
    call(
        find("kernels.ops.speculative.gather_spec_extras:gather_spec_extras"),
        indices=cuda(REQUESTS),
        topk_p_buf=cuda(REQUESTS, 1, dtype=torch.float32),
        topk_index_buf=cuda(REQUESTS, 1),
        output_tokens_buf=cuda(REQUESTS, dtype=INT32),
        hidden_states_buf=cuda(REQUESTS, 7168, dtype=torch.bfloat16),
    )


def _positions() -> None:
    places = "kernels.ops.attention.position", "srt.model_executor.forward_batch_info"
    find(*(f"{place}:compute_position_triton" for place in places))(
        cuda(REQUESTS, dtype=INT32), cuda(REQUESTS, dtype=INT32), 8192
    )


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
