"""The ranks of adaptive speculation follow one decision, whatever their own clocks say.

Real: three processes in one gloo group, the policies and the broadcast. Stood in for: the model, by random acceptance
and by times that differ between the ranks by up to a factor of three.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = 3
# A rank ends by os._exit: gloo's worker threads may still hold a finished tensor, and one that asks for the interpreter
# while it shuts down ends the process with SIGABRT.
RANK_PROGRAM = """
import os, random, sys, zlib
import torch.distributed as dist
from sglang.srt.speculative import adaptive_spec_params as params

rank, ranks, port, rounds, split = map(int, sys.argv[1:])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
stock = not hasattr(params, "make_adaptive_policy")
if stock:
    policy = params.AdaptiveSpeculativeParams(initial_steps=3)
else:
    from sglang.srt.speculative.base_spec_worker import SpecRound
    from sglang.srt.speculative.rank_agreement import RankAgreement
    agreement = RankAgreement(dist.group.WORLD)
    policy = params.make_adaptive_policy(3, None, "goodput", agreement.plan, agreement.lag)
same, own = random.Random(0), random.Random(rank + 1)
chosen, waiting = [], []
for number in range(rounds):
    batch = (1, 4, 16)[number // 500 % 3]
    steps = policy.get_steps_for_batch(batch)
    chosen.append(steps)
    rate = 0.9 if number // 900 % 2 else 0.1
    # The first rounds of one rank differ by a draft, as logits that are not bitwise equal make them.
    accepted = [sum(same.random() < rate for _ in range(7)) * steps // 7 for _ in range(batch)]
    if rank == split and accepted[0] < steps:
        accepted[0] += 1
    seconds = 0.01 * (1 + 0.4 * steps) * own.uniform(1, 3) * (1 + rank)
    if not stock:
        waiting.append(SpecRound(steps, batch, accepted, seconds))
        while len(waiting) > 1:
            policy.on_round(waiting.pop(0))
    else:
        policy.on_verify_complete(accepted, batch)
print(zlib.crc32(bytes(chosen)), len(set(chosen)), flush=True)
os._exit(0)
"""
CHECK_PROGRAM = """
import os, sys
import torch.distributed as dist
from sglang.srt.speculative.rank_agreement import RankAgreement, RanksDisagree

rank, ranks, port = map(int, sys.argv[1:4])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
agreement = RankAgreement(dist.group.WORLD)
agreement.check([1, 2, 3])
try:
    agreement.check([1, 2 + (rank == 2), 3])
except RanksDisagree as error:
    print(error, flush=True)
os._exit(0)
"""


def run_ranks(program: str, *arguments: int) -> list[str]:
    """Run a program as ``RANKS`` processes and return what each printed."""
    import sglang

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = dict(os.environ) | {"PYTHONPATH": str(Path(sglang.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *map(str, (rank, RANKS, port, *arguments))],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        finished = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), finished
    return [out.strip() for out, _ in finished]


@pytest.mark.stock_failure(AssertionError, "^the ranks chose different steps")
def test_ranks_with_other_clocks_and_counts_choose_the_same_steps() -> None:
    said = run_ranks(RANK_PROGRAM, 10_000, 2)
    assert len(set(said)) == 1, f"the ranks chose different steps: {said}"
    assert int(said[0].split()[1]) > 1


def test_ranks_that_accepted_different_drafts_are_named() -> None:
    said = run_ranks(CHECK_PROGRAM)
    assert len(set(said)) == 1
    assert "decode round 2" in said[0]
    assert "rank 2: [1, 3, 3]" in said[0]
