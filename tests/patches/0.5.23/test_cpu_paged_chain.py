"""Chain speculation with a page size above 1 on a CPU; a tree with pages is refused at start."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.patches.cpu_package import eagle_arguments, put_stand_in, resolve


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    put_stand_in(monkeypatch)
    from sglang.srt.mem_cache import allocation

    monkeypatch.setattr(allocation, "attention_backends", lambda: ("intel_amx", "intel_amx"))
    return allocation


@pytest.mark.stock_failure(RuntimeError, r"0 active drivers")
def test_the_last_slot_of_each_request_is_found(allocation: ModuleType) -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    last = allocation.get_last_loc(table, torch.tensor([2, 0, 3]), torch.tensor([4, 0, 10]))
    assert last.tolist() == [23, -1, 39]


def test_pages_grow_in_place(allocation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts continue the last page of a request before a new page opens."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    page = 4
    allocator = PagedTokenToKVPoolAllocator(64, page, torch.float32, "cpu", None, need_sort=False)
    monkeypatch.setattr(allocation, "evict_from_tree_cache", lambda *_: None)
    table = torch.zeros((4, 32), dtype=torch.int32)
    requests = [SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=0)) for _ in range(2)]

    def grow(before: list[int], after: list[int]) -> None:
        lens = [torch.tensor(x, dtype=torch.int32) for x in (before, after)]
        allocation.alloc_for_spec_decode(
            SimpleNamespace(token_to_kv_pool_allocator=allocator),
            SimpleNamespace(req_to_token=table),
            reqs=requests,
            req_pool_indices=torch.tensor([1, 3]),
            cur_kv_lens=lens[0],
            cur_kv_lens_cpu=lens[0],
            nxt_kv_lens=lens[1],
            nxt_kv_lens_cpu=lens[1],
            num_needed_tokens=sum(after) - sum(before),
            batch=SimpleNamespace(device="cpu", hisparse_coordinator=None, req_to_token_pool=None),
        )

    grow([0, 0], [5, 3])
    grow([5, 3], [9, 12])
    assert [request.kv.kv_allocated_len for request in requests] == [9, 12]
    for row, length in ((1, 9), (3, 12)):
        slots = table[row, :length].tolist()
        assert [slot % page for slot in slots] == [position % page for position in range(length)]
        assert all(b == a + 1 for a, b in itertools.pairwise(slots) if b % page)
    used = table[1, :9].tolist() + table[3, :12].tolist()
    assert len(set(used)) == 21


def test_the_resolver_takes_a_chain_with_pages(tmp_path: Path) -> None:
    assert resolve(**eagle_arguments(tmp_path, page_size=16)).page_size == 16


def test_the_resolver_refuses_a_tree_with_pages(tmp_path: Path) -> None:
    tree = {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
    with pytest.raises(ValueError, match="speculative_eagle_topk > 1 with page_size > 1 is only supported on"):
        resolve(**eagle_arguments(tmp_path, page_size=16, **tree))
