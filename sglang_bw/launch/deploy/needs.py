"""What a launch takes of a node beside its GPUs: cores and memory, as a cluster's scheduler asks for them.

The reasons stand in docs/deploy.md. These are requests, what a node must have free, and no limits: a rank that is held
back stalls all others in the next all-reduce, and the page cache of a load counts as memory of the pod.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_bw.host.gpus import GIB
from sglang_bw.host.limits import HUGE_MODEL_HOST
from sglang_bw.launch.command import Command
from sglang_bw.recipes import flags

# A rank with CUDA's libraries and a rank on a CPU; tokenizer, detokenizer and whatever is beside them. The second and
# the third were measured with the bundled pair, the first is a rule of thumb.
_RANK_GIB = {"cuda": 4.0, "cpu": 2.0}
_HELPER_GIB = 1.0
# NCCL's buffers in shared memory: 4 MiB a channel and direction, up to 32 channels, to two neighbours.
_SHM_GIB = 1.0
# The engine reads with eight threads and holds two shards more ("Peak CPU RAM" of its loader); shards are 5 GB at most
# in most checkpoints.
_SHARDS = 10
_SHARD_BYTES = 5_000_000_000
# From here on checkpoints count as huge: loaders were killed on hosts below 128 GiB.
_HUGE_BYTES = 100 * GIB


@dataclass(frozen=True)
class Needs:
    """What one node must have free."""

    cores: int
    memory_gib: int


def of(command: Command, ranks: int, weights: int | None) -> Needs:
    """Return what a node takes.

    :param ranks: processes on it that compute, one a GPU.
    :param weights: bytes of target and draft together; ``None`` when nothing is known of them.
    """
    helpers = _count(command, "tokenizer-worker-num", 1) + _count(command, "detokenizer-worker-num", 1) + 1
    if _count(command, "dp-size", 1) > 1:
        helpers += 1  # shares requests out
    threads = 1
    if command.device == "cpu":
        text = command.env.get("OMP_NUM_THREADS", "1")
        threads = int(text) if text.isascii() and text.isdigit() else 1
    memory = ranks * _RANK_GIB[command.device] + helpers * _HELPER_GIB + _held(command, ranks)
    memory += _load(command, ranks, weights) / GIB
    if command.device == "cuda" and (weights or 0) > _HUGE_BYTES:
        memory = max(memory, HUGE_MODEL_HOST / GIB)
    return Needs(ranks * max(threads, 1) + helpers, math.ceil(memory))


def _held(command: Command, ranks: int) -> float:
    """Return GiB that stay taken: shared memory among ranks, and what flags put into the host's memory."""
    shared = _SHM_GIB * ranks if ranks > 1 and command.device == "cuda" else 0.0
    asked = _number(command, "hicache-size") + _number(command, "cpu-offload-gb")  # of each rank
    return shared + asked * ranks


def _load(command: Command, ranks: int, weights: int | None) -> float:
    """Return bytes of the checkpoint that are in memory at once."""
    if command.device == "cpu":
        return 2.0 * (weights or _SHARD_BYTES)  # as it is stored, and as it is computed with
    window = min(_SHARDS * _SHARD_BYTES, weights or math.inf)
    # Mapped files are shared by the ranks; without that each has a copy.
    return window * (ranks if flags.has(command.flags, "weight-loader-disable-mmap") else 1)


def _count(command: Command, name: str, default: int) -> int:
    return max(int(_number(command, name) or default), 1)


def _number(command: Command, name: str) -> float:
    try:
        number = float(flags.value(command.flags, name) or 0)
    except ValueError:
        return 0.0
    return number if 0 <= number < math.inf else 0.0
