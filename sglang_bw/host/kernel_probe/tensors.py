"""Tensors and sizes that the cases of a speculative round and of its cache share."""

from __future__ import annotations

import torch

# The largest batch that is captured as a graph: several kernels hold one element a request in registers.
REQUESTS = 512
STEPS = 3
TREE_TOP_K = 4
CONTEXT = 1 << 17
INT32, INT64 = torch.int32, torch.int64
# Top-k and verified tokens of the rounds that are checked: a chain and a tree.
ROUNDS = ((1, STEPS + 1), (TREE_TOP_K, 16))


def shape_of(top_k: int, width: int) -> str:
    """Return how a kind of round is called."""
    return f"top-k {top_k}, {width} tokens"


def cuda(*size: int, dtype: torch.dtype = INT64) -> torch.Tensor:
    """Return a tensor on the pretended GPU."""
    return torch.empty(size, dtype=dtype, device="cuda")


def requests() -> dict[str, torch.Tensor]:
    """Return what the kernels ask of a batch of requests."""
    return {
        "req_pool_indices": cuda(REQUESTS),
        "req_to_token": cuda(REQUESTS, CONTEXT, dtype=INT32),
        "seq_lens": cuda(REQUESTS),
    }


def power_of_two(value: int) -> int:
    """Return the least power of two that is not smaller."""
    return 1 << (value - 1).bit_length()
