"""The PCIe-IPC all-reduce turns itself on where it is the only fast path, after a self-check in processes of its own.

Real: the decision, the processes of the self-check, what they exchange, and the group that four forked ranks build.
Stood in for: CUDA, NVML and FlashInfer's kernels, which need GPUs. The kernel of the self-check sums with gloo.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import inspect
import logging
import multiprocessing
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.launch.serving import alive
from tests.patches import pcie_ipc_stand_in

SWITCH = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"
SETUP_SECONDS = 120.0  # a child imports torch, on a busy machine
NVLINK = 2


def self_check_file() -> str:
    from sglang.srt.distributed.device_communicators import pcie_ipc_self_check

    return str(Path(pcie_ipc_self_check.__file__))


def stand_in(behaviour: str) -> list[str]:
    return [sys.executable, str(Path(pcie_ipc_stand_in.__file__)), self_check_file(), behaviour]


def check(behaviour: str, ranks: int = 2, **limits: float) -> str | None:
    from sglang.srt.distributed.device_communicators.pcie_ipc_self_check import run_self_check

    limits = {"setup_seconds": SETUP_SECONDS, "run_seconds": 60.0} | limits
    return run_self_check([f"GPU-{i}" for i in range(ranks)], command=stand_in(behaviour), **limits)


def children_of(process: psutil.Process) -> list[psutil.Process]:
    return [
        child
        for child in process.children(recursive=True)
        if Path(pcie_ipc_stand_in.__file__).name in str(child.cmdline())
    ]


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    yield
    assert children_of(psutil.Process()) == []


# --- the self-check ---


@pytest.mark.usefixtures("no_process_is_left")
@pytest.mark.parametrize("ranks", [2, 3])
def test_right_sums_pass(ranks: int) -> None:
    assert check("is right", ranks) is None


@pytest.mark.usefixtures("no_process_is_left")
def test_wrong_sums_fail_and_name_rank_and_kernel() -> None:
    assert check("is wrong") == "rank 1: wrong sums: 2 elements in 2 calls of 64, gathered"


@pytest.mark.usefixtures("no_process_is_left")
def test_a_kernel_that_hangs_is_killed() -> None:
    started = time.monotonic()
    assert check("hangs", run_seconds=1.0) == "ranks [0, 1] did not finish within 1 s"
    assert time.monotonic() - started < SETUP_SECONDS


@pytest.mark.usefixtures("no_process_is_left")
def test_a_rank_that_never_starts_is_killed() -> None:
    assert re.fullmatch(r"ranks \[(0, )?1\] did not set up within 1 s", str(check("never starts", setup_seconds=1.0)))


@pytest.mark.usefixtures("no_process_is_left")
def test_a_crash_is_told_with_its_last_words() -> None:
    reason = str(check("crashes"))
    assert reason.startswith("rank 1 ended with exit code 7: CUDA error: an illegal memory access was encountered")


def test_the_children_end_with_a_killed_parent() -> None:
    program = (
        "import runpy, sys; check = runpy.run_path(sys.argv[1])['run_self_check'];"
        "check(['GPU-0', 'GPU-1'], command=sys.argv[2:])"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, self_check_file(), *stand_in("hangs")])
    try:
        children = poll(lambda: found if len(found := children_of(psutil.Process(parent.pid))) == 2 else None)
        poll(lambda: all(child.num_threads() > 1 for child in children))  # torch is there: they follow their parent
    finally:
        parent.kill()
        parent.wait()
    poll(lambda: not any(alive(child.pid) for child in children))


def poll(ask: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SETUP_SECONDS
    while not (answer := ask()):
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)
    return answer


# --- the decision ---


def facts(**changes: Any) -> Any:
    from sglang.srt.distributed.device_communicators.pcie_ipc_auto import RankFacts

    return RankFacts(**({"capability": (12, 0), "uuid": "GPU-0", "has_kernels": True} | changes))


def refusal(odd: Any, world_size: int = 8, one_host: bool = True, symm_mem_requested: bool = False) -> str | None:
    from sglang.srt.distributed.device_communicators import pcie_ipc_auto

    ranks = [facts()] * (world_size - 1) + [odd]
    return pcie_ipc_auto.refusal(ranks, one_host=one_host, symm_mem_requested=symm_mem_requested)


@pytest.mark.parametrize("world_size", [4, 8])
@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_nothing_speaks_against_pcie_gpus_that_reach_each_other(capability: tuple[int, int], world_size: int) -> None:
    assert refusal(facts(capability=capability), world_size) is None


@pytest.mark.parametrize(
    ("odd", "group", "reason"),
    [
        ({"nvlink_peers": (2,)}, {}, "ranks 7 and 2 are linked by NVLink"),
        ({"unreachable_peers": (0, 1)}, {}, "there is no P2P access between ranks 7 and 0"),
        ({"has_kernels": False}, {}, "this FlashInfer has no PCIe-IPC kernels"),
        ({"error": "NVMLError: Not Found"}, {}, "the topology is unknown, rank 7: NVMLError: Not Found"),
        ({}, {"one_host": False}, "the group spans hosts"),
        ({}, {"symm_mem_requested": True}, "torch symmetric memory was asked for"),
    ],
)
def test_what_speaks_against_it_is_told(odd: dict[str, Any], group: dict[str, bool], reason: str) -> None:
    assert refusal(facts(**odd), **group) == reason


# --- a group of ranks ---


class Machine:
    """Stands in for CUDA, NVML and FlashInfer in one forked rank, and runs the self-check with the stand-in kernel."""

    def __init__(self) -> None:
        self.capability = (12, 0)
        self.unreachable: set[tuple[int, int]] = set()
        self.behaviour = "is right"
        self.kernels = True

    def install(self, rank: int, patches: pytest.MonkeyPatch) -> None:
        import torch
        from sglang.srt.distributed import parallel_state

        ones = torch.ones
        patches.setattr(torch, "ones", lambda *shape, device=None, **rest: ones(*shape, **rest))
        patches.setattr(torch.version, "hip", None)
        patches.setattr(torch.cuda, "get_device_capability", lambda _device=None: self.capability)
        patches.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=str(device.index)))
        patches.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        if hasattr(parallel_state, "_group_coordinator_device"):
            patches.setattr(parallel_state, "_group_coordinator_device", lambda local: torch.device("cuda", local))
        else:  # 0.5.22 decides in place
            patches.setattr(parallel_state, "is_cuda_alike", lambda: True)
        patches.setitem(sys.modules, "pynvml", self._nvml())
        comm = types.ModuleType("flashinfer.comm")
        if self.kernels:
            comm.PcieIpcAllReduceWorkspace = Workspace  # type: ignore[attr-defined]
        package = types.ModuleType("flashinfer")
        package.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
        patches.setitem(sys.modules, "flashinfer", package)
        patches.setitem(sys.modules, "flashinfer.comm", comm)
        self._use_stand_in_kernel(rank, patches)

    def _nvml(self) -> Any:
        import pynvml  # its constants are not all numbers

        def status(gpu: int, peer: int, what: int) -> int:
            ctypes.c_int(what)  # as the library's own call
            return int(what == NVLINK or (gpu, peer) in self.unreachable)

        return SimpleNamespace(
            **{name: value for name, value in vars(pynvml).items() if name.startswith("NVML_P2P_")},
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid.removeprefix(b"GPU-")),
            nvmlDeviceGetP2PStatus=status,
        )

    def _use_stand_in_kernel(self, rank: int, patches: pytest.MonkeyPatch) -> None:
        try:
            from sglang.srt.distributed.device_communicators import pcie_ipc_auto
        except ImportError:
            return  # stock: there is nothing to check

        def run(uuids: list[str]) -> str | None:
            assert rank == 0, "only the first rank of a group runs the self-check"
            assert uuids == [f"GPU-{i}" for i in range(len(uuids))]
            return check(self.behaviour, len(uuids), run_seconds=1.0 if self.behaviour == "hangs" else 60.0)

        patches.setattr(pcie_ipc_auto, "run_self_check", run)


class Workspace:
    """Stands in for FlashInfer's, which takes what fits."""

    def __init__(self, **_: Any) -> None:
        pass

    def supports(self, _values: Any) -> bool:
        return True

    def tune(self, *_: Any, **__: Any) -> None:
        return None


def build_group(rank: int, ranks: int, machine: Machine, switch: str | None, name: str) -> Any:
    """Build one rank's coordinator as the engine does; return how it reduces bf16 and what was logged of PCIe-IPC."""
    import torch
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    lines = Lines()
    logging.getLogger("sglang.srt.distributed.device_communicators").addHandler(lines)
    with pytest.MonkeyPatch.context() as patches:
        patches.delenv(SWITCH, raising=False)
        if switch is not None:
            patches.setenv(SWITCH, switch)
        patches.setenv("SGLANG_PCIE_IPC_MAX_NUMEL", "4096")
        machine.install(rank, patches)
        group = GroupCoordinator(
            group_ranks=[list(range(ranks))],
            local_rank=rank,
            torch_distributed_backend="gloo",
            group_name=name,
            **dict.fromkeys(communicators(GroupCoordinator), False),
        )
        if group.pcie_ipc_comm is not None:
            patches.setattr(group.pcie_ipc_comm, "_tune", lambda _hidden: None)
        bf16 = group._resolve_outplace_all_reduce_method(torch.zeros(2, 64, dtype=torch.bfloat16))
        fp16 = group._resolve_outplace_all_reduce_method(torch.zeros(2, 64, dtype=torch.float16))
        assert fp16 is None
        assert children_of(psutil.Process()) == []
        return bf16, [line for line in lines.messages if line.startswith("PCIe-IPC all-reduce")]


def communicators(coordinator: type) -> list[str]:
    """Return the switches that a group must be given; 0.5.22 has one more than 0.5.23."""
    parameters = inspect.signature(coordinator).parameters.values()
    return [one.name for one in parameters if one.name.startswith("use_") and one.default is one.empty]


class Lines(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def in_ranks(
    folder: Path, machine: Machine, *, ranks: int = 4, switch: str | None = None, name: str = "tp"
) -> tuple[str | None, list[str]]:
    """Run :func:`build_group` in forked ranks; return the answer all of them gave, and what they logged together."""
    import sglang.srt.distributed.parallel_state  # noqa: F401  (once, before the fork)
    import torch.distributed as dist

    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def work(rank: int) -> None:
        logging.getLogger("sglang").setLevel(logging.INFO)
        try:
            store = dist.FileStore(str(folder / "store"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            answers.put((rank, build_group(rank, ranks, machine, switch, name)))
        except BaseException as error:  # told to the parent, which fails the test
            answers.put((rank, error))
        answers.close()
        answers.join_thread()
        os._exit(0)

    processes = [context.Process(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        found = dict(answers.get(timeout=2 * SETUP_SECONDS) for _ in processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    for answer in found.values():
        if isinstance(answer, BaseException):
            raise answer
    methods = {method for method, _ in found.values()}
    assert len(methods) == 1, f"the ranks disagree: {found}"
    return methods.pop(), [line for _, lines in found.values() for line in lines]


@pytest.mark.stock_failure(AssertionError, "the group reduces with NCCL")
def test_a_pcie_group_uses_it_unasked(tmp_path: Path) -> None:
    method, lines = in_ranks(tmp_path, Machine())
    assert method == "pcie_ipc", "the group reduces with NCCL"
    assert len(lines) == 1
    assert "is on: 4 GPUs without NVLink, self-check passed" in lines[0]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("is wrong", "the self-check failed, rank 1: wrong sums: 2 elements in 2 calls of 64, gathered"),
        ("hangs", "the self-check failed, ranks [0, 1, 2, 3] did not finish within 1 s"),
    ],
)
def test_all_ranks_stay_on_nccl_after_a_failed_self_check(behaviour: str, reason: str, tmp_path: Path) -> None:
    machine = Machine()
    machine.behaviour = behaviour
    method, lines = in_ranks(tmp_path, machine)
    assert method is None
    assert len(lines) == 1
    assert f"stays off and NCCL is used: {reason}. {SWITCH}=1 forces it on" in lines[0]


def test_all_ranks_learn_of_a_self_check_that_cannot_run(tmp_path: Path) -> None:
    machine = Machine()
    machine.behaviour = "has\0no name"
    method, lines = in_ranks(tmp_path, machine)
    assert method is None
    assert "the self-check could not run, ValueError: embedded null byte" in lines[0]


def test_one_missing_link_keeps_the_whole_group_on_nccl(tmp_path: Path) -> None:
    machine = Machine()
    machine.unreachable = {(2, 3)}
    method, lines = in_ranks(tmp_path, machine)
    assert method is None
    assert len(lines) == 1
    assert "there is no P2P access between ranks 2 and 3" in lines[0]


@pytest.mark.parametrize(
    ("switch", "machine", "method"),
    [
        ("1", {"capability": (9, 0)}, "pcie_ipc"),
        ("1", {"capability": (12, 0), "behaviour": "hangs"}, "pcie_ipc"),
        ("0", {}, None),
    ],
)
def test_the_variable_forces_it_without_a_check(
    switch: str, machine: dict[str, Any], method: str | None, tmp_path: Path
) -> None:
    made = Machine()
    vars(made).update(machine)
    assert in_ranks(tmp_path, made, switch=switch) == (method, [])


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (8, 9)])
def test_nothing_changes_for_other_gpus(capability: tuple[int, int], tmp_path: Path) -> None:
    machine = Machine()
    machine.capability = capability
    assert in_ranks(tmp_path, machine) == (None, [])


@pytest.mark.parametrize("group", [{"ranks": 2}, {"ranks": 3}, {"name": "attention_tp"}])
def test_other_groups_are_left_alone(group: dict[str, Any], tmp_path: Path) -> None:
    assert in_ranks(tmp_path, Machine(), **group) == (None, [])


@pytest.mark.parametrize("group", [{"deterministic": True}, {"cpu_group": None}])
def test_deterministic_runs_and_elastic_groups_do_not_even_look(
    group: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.distributed.device_communicators import pcie_ipc_ar, pcie_ipc_auto

    arguments = {"group_name": "tp", "world_size": 8, "deterministic": False, "device": "cuda:0", "cpu_group": "gloo"}
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(pcie_ipc_auto, "enabled_automatically", lambda **_: True)
    assert pcie_ipc_ar.eligible_group(**arguments)
    assert not pcie_ipc_ar.eligible_group(**(arguments | group))
