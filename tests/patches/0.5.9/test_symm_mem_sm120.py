"""--enable-torch-symm-mem on compute capability 12: the communicator asks the fabric instead of ending in KeyError."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

MIB = 1024 * 1024
WORLD = 8


def communicator(monkeypatch: pytest.MonkeyPatch, capability: int, *, multicast: bool, world: int = WORLD) -> Any:
    """Return the engine's communicator on a faked fabric of ``world`` boards; ``launched`` lists the kernels."""
    from sglang.srt.distributed.device_communicators import torch_symm_mem as module

    launched: list[str] = []

    def kernel(name: str) -> Any:
        def launch(buffer: torch.Tensor, _operation: str, _group: str) -> None:
            launched.append(name)
            buffer.mul_(world)  # every rank has the same values

        return launch

    fabric = SimpleNamespace(
        empty=lambda count, device, dtype: torch.empty(count, dtype=dtype),
        rendezvous=lambda _buffer, _group: SimpleNamespace(multicast_ptr=int(multicast)),
    )
    operations = {name: kernel(name) for name in ("multimem_all_reduce_", "two_shot_all_reduce_")}
    monkeypatch.setattr(module, "torch_symm_mem_available", True)
    monkeypatch.setattr(module, "torch_symm_mem", fabric)
    monkeypatch.setattr(module.dist, "get_world_size", lambda _group: world)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (capability, 0))
    monkeypatch.setattr(torch.ops, "symm_mem", SimpleNamespace(**operations))
    made = module.TorchSymmMemCommunicator(SimpleNamespace(group_name="tp"), device=0)
    made.launched = launched
    return made


@pytest.mark.stock_failure(KeyError, r"^12$")
def test_on_pcie_it_says_why_it_is_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = communicator(monkeypatch, 12, multicast=False)
    assert made.disabled
    assert not made.should_torch_symm_mem_allreduce(torch.ones(8, dtype=torch.bfloat16))
    assert "multicast operations are not supported" in caplog.text


@pytest.mark.stock_failure(KeyError, r"^12$")
@pytest.mark.parametrize(("world", "size"), [(2, 64), (4, 64), (6, 128), (8, 128)])
def test_where_the_fabric_has_multicast_it_sums_in_two_shots(
    world: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = communicator(monkeypatch, 12, multicast=True, world=world)
    values = torch.arange(8, dtype=torch.bfloat16)
    assert made.max_size == size * MIB
    assert made.should_torch_symm_mem_allreduce(values)
    assert torch.equal(made.all_reduce(values), values * world)
    assert made.launched == ["two_shot_all_reduce_"]


@pytest.mark.stock_failure(KeyError, r"^11$")
def test_an_unknown_capability_goes_without(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = communicator(monkeypatch, 11, multicast=True)
    assert made.disabled
    assert "Device capability 11 not supported" in caplog.text


@pytest.mark.parametrize(
    ("capability", "world", "kernel"),
    [(9, 4, "multimem_all_reduce_"), (9, 2, "two_shot_all_reduce_"), (10, 8, "multimem_all_reduce_")],
)
def test_others_are_as_before(capability: int, world: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = communicator(monkeypatch, capability, multicast=True, world=world)
    made.all_reduce(torch.ones(8, dtype=torch.bfloat16))
    assert made.launched == [kernel]
    assert communicator(monkeypatch, capability, multicast=False, world=world).disabled
