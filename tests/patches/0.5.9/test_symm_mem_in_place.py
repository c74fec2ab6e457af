"""An in-place all-reduce with torch symmetric memory leaves the sum in its input: two real processes over gloo."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORLD = 2
# The engine's own group and communicator; the two-shot kernel and the allocation are stood in for, the sum is gloo's.
RANK = """
import json, os, sys
import torch
from types import SimpleNamespace
rank, port = int(sys.argv[1]), sys.argv[2]
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.device_communicators.torch_symm_mem import TorchSymmMemCommunicator

parallel_state.init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
flags = ("use_pynccl", "use_pymscclpp", "use_custom_allreduce", "use_torch_symm_mem_all_reduce",
         "use_hpu_communicator", "use_xpu_communicator", "use_npu_communicator")
group = parallel_state.GroupCoordinator([[0, 1]], rank, "gloo", **dict.fromkeys(flags, False))

def two_shot(buffer, operation, name):
    torch.distributed.all_reduce(buffer, group=group.device_group)

torch.ops.symm_mem = SimpleNamespace(two_shot_all_reduce_=two_shot)
symm_mem = TorchSymmMemCommunicator.__new__(TorchSymmMemCommunicator)
vars(symm_mem).update(
    disabled=False, dtype=torch.bfloat16, world_size=2, device_capability=10, max_size=1024,
    group=SimpleNamespace(group_name="tp"), buffer=torch.empty(512, dtype=torch.bfloat16),
)
group.torch_symm_mem_comm = symm_mem

def reduced(count, dtype):
    tensor = torch.full((count,), rank + 1.001, dtype=dtype)
    try:
        group._all_reduce_in_place(tensor)
    except RuntimeError as error:
        return str(error)
    return [tensor[0].item(), tensor[-1].item()]

cases = {"bfloat16": (8, torch.bfloat16), "float32": (8, torch.float32), "oversize": (4096, torch.bfloat16)}
print(json.dumps({name: reduced(*case) for name, case in cases.items()}), flush=True)
torch.distributed.barrier(group=group.cpu_group)
os._exit(0)  # an orderly end of one rank can abort the other, which still holds a connection
"""


@pytest.fixture(scope="module")
def results(pytestconfig: pytest.Config) -> list[dict[str, Any]]:
    """What each rank has after each all-reduce: first and last value, or the error."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tree = Path(pytestconfig.getoption("--engine")).resolve()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tree,
        )
        for rank in range(WORLD)
    ]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * WORLD, said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def assert_summed(results: list[dict[str, Any]], case: str, expected: float) -> None:
    for rank, result in enumerate(results):
        found = result[case]
        assert found == pytest.approx([expected] * 2, abs=1e-6), f"rank {rank} has {found}"


@pytest.mark.stock_failure(AssertionError, r"^rank 0 has \[1\.0, 1\.0\]")
def test_the_result_is_kept(results: list[dict[str, Any]]) -> None:
    assert_summed(results, "bfloat16", 3.0)  # what bfloat16 makes of 1.001 + 2.001


@pytest.mark.stock_failure(AssertionError, r"^rank 0 has \[1\.00\d+, 1\.00\d+\]")
def test_float32_is_summed_and_not_rounded(results: list[dict[str, Any]]) -> None:
    assert_summed(results, "float32", 3.002)


@pytest.mark.stock_failure(AssertionError, r"^rank 0 has The size of tensor a \(512\) must match")
def test_more_than_the_buffer_holds_is_summed(results: list[dict[str, Any]]) -> None:
    assert_summed(results, "oversize", 3.0)
