"""Torch symmetric memory without multicast: opt-in, two-shot, and nothing else changed.

CUDA is the border nothing here reaches: the buffer, the rendezvous and the two collectives are stood in for, the
communicator is the engine's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

SWITCH = "SGLANG_TORCH_SYMM_MEM_TWO_SHOT_WITHOUT_MULTICAST"
MULTICAST = 0x7F0000000000


class Fabric:
    """Stands in for the GPUs of a group: what was allocated, and which collectives ran."""

    def __init__(self) -> None:
        self.capability = 12
        self.world_size = 8
        self.multicast_ptr = 0
        self.allocated: list[int] = []
        self.collectives: list[str] = []

    def collective(self, name: str) -> Callable[..., None]:
        def run(buffer: Any, _op: str, _group: str) -> None:
            self.collectives.append(name)
            buffer.mul_(self.world_size)  # every rank contributes the same values

        return run


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    import torch
    from sglang.srt.distributed.device_communicators import torch_symm_mem as module

    found = Fabric()

    def empty(numel: int, *, device: Any, dtype: Any) -> Any:
        found.allocated.append(numel)
        return torch.empty(numel, dtype=dtype)

    symmetric = SimpleNamespace(
        empty=empty, rendezvous=lambda _buffer, _group: SimpleNamespace(multicast_ptr=found.multicast_ptr)
    )
    ops = SimpleNamespace(
        multimem_all_reduce_=found.collective("multimem"), two_shot_all_reduce_=found.collective("two_shot")
    )
    # Otherwise the buffer grows to what one model family wants, and the server's configuration is asked for it.
    monkeypatch.setenv("SGLANG_OPT_USE_INKLING_CUSTOM_AR", "0")
    monkeypatch.setattr(module, "torch_symm_mem", symmetric)
    monkeypatch.setattr(module, "torch_symm_mem_available", True)
    monkeypatch.setattr(module.dist, "get_world_size", lambda _group: found.world_size)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (found.capability, 0))
    monkeypatch.setattr(torch.ops, "symm_mem", ops)
    return found


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING):
        yield caplog


def communicator() -> Any:
    from sglang.srt.distributed.device_communicators.torch_symm_mem import TorchSymmMemCommunicator

    return TorchSymmMemCommunicator(SimpleNamespace(group_name="tp"), "cpu")


@pytest.mark.stock_failure(AssertionError, "Device capability 12 not supported")
def test_sm120_can_opt_in(fabric: Fabric, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    assert not communicator().disabled, warnings.text


@pytest.mark.stock_failure(AssertionError, "multicast operations are not supported")
def test_other_boards_without_multicast_can_opt_in(
    fabric: Fabric, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric.capability = 9
    monkeypatch.setenv(SWITCH, "1")
    assert not communicator().disabled, warnings.text


@pytest.mark.parametrize("world_size", [2, 4, 6, 8])
def test_two_shot_sums_and_warns_of_pcie(
    world_size: int, fabric: Fabric, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    fabric.world_size = world_size
    monkeypatch.setenv(SWITCH, "1")
    comm = communicator()
    values = torch.arange(8, dtype=torch.bfloat16).view(2, 4)
    assert torch.equal(comm.all_reduce(values), values * world_size)
    assert torch.equal(comm.all_reduce(values, out=values), torch.arange(8).view(2, 4) * world_size)
    assert fabric.collectives == ["two_shot", "two_shot"]
    assert "PCIe" in warnings.text
    assert "may hang" in warnings.text


@pytest.mark.parametrize("value", [None, "0"])
def test_sm120_allocates_nothing_unless_asked(
    value: str | None, fabric: Fabric, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(SWITCH, value)
    assert communicator().disabled
    assert fabric.allocated == []
    assert SWITCH in warnings.text


@pytest.mark.parametrize("opted_in", [False, True])
@pytest.mark.parametrize("capability", [9, 10])
@pytest.mark.parametrize(("world_size", "collective"), [(2, "two_shot"), (4, "multimem"), (8, "multimem")])
def test_nothing_changes_where_there_is_multicast(
    opted_in: bool, capability: int, world_size: int, collective: str, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    fabric.capability, fabric.world_size, fabric.multicast_ptr = capability, world_size, MULTICAST
    monkeypatch.setenv(SWITCH, str(int(opted_in)))
    comm = communicator()
    assert not comm.disabled
    assert torch.equal(comm.all_reduce(torch.ones(4, dtype=torch.bfloat16)), torch.full((4,), world_size))
    assert fabric.collectives == [collective]


@pytest.mark.parametrize("capability", [9, 10])
def test_sm90_and_sm100_without_multicast_stay_off_by_default(
    capability: int, fabric: Fabric, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    fabric.capability = capability
    comm = communicator()
    assert comm.disabled
    assert comm.buffer is None
    assert "multicast operations are not supported" in warnings.text


def test_model_code_that_needs_multicast_does_not_take_the_buffer(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from sglang.srt.models.inkling_common.kernels import comm as inkling

    monkeypatch.setenv(SWITCH, "1")
    values = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, element_size=lambda: 2)
    group = SimpleNamespace(torch_symm_mem_comm=communicator(), world_size=fabric.world_size)
    assert inkling._symm_mem_comm(group, values, 1024) is None
    fabric.capability, fabric.multicast_ptr = 10, MULTICAST
    group = SimpleNamespace(torch_symm_mem_comm=communicator(), world_size=fabric.world_size)
    assert inkling._symm_mem_comm(group, values, 1024) is group.torch_symm_mem_comm
