"""All-reduce in each of the ways that the engine has, by the engine's own classes."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

_CLASSES = "sglang.srt.distributed.device_communicators"


class AbsentError(Exception):
    """The libraries, the GPUs or their number do not have this way."""


@dataclass(frozen=True)
class Ranks:
    """A rank's place and its groups.

    :ivar device: ``torch.device``.
    :ivar host_group: gloo over all ranks.
    :ivar device_group: NCCL over all ranks; gloo as well on a CPU.
    :ivar largest: bytes of the largest message.
    """

    rank: int
    world: int
    device: Any
    host_group: Any
    device_group: Any
    largest: int


@dataclass(frozen=True)
class Way:
    """One way to add up a tensor over all ranks.

    :ivar reduce: returns the sum, in place or not.
    :ivar capturing: must be entered around the capture of a CUDA graph.
    """

    reduce: Callable[[Any], Any]
    capturing: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def make(name: str, ranks: Ranks) -> Way:
    """Set a way up; every rank must do so together.

    :raises AbsentError: it is not to be had here.
    """
    try:
        return _MAKERS[name](ranks)
    except AbsentError:
        raise
    except Exception as error:  # what a missing driver feature, library or compiler raises is not ours to list
        raise AbsentError(f"it cannot be set up: {type(error).__name__}: {error}") from error


def _torch(ranks: Ranks) -> Way:
    import torch.distributed as dist

    def reduce(tensor: Any) -> Any:
        dist.all_reduce(tensor, group=ranks.device_group)
        return tensor

    return Way(reduce)


def _nccl(ranks: Ranks) -> Way:
    made = _class("pynccl", "PyNcclCommunicator")(group=ranks.host_group, device=ranks.device)
    return _pynccl(made, lambda tensor: tensor)


def _nccl_symmetric(ranks: Ranks) -> Way:
    allocate = _class("pynccl_allocator", "allocate_symmetric_buffer")
    made = _class("pynccl", "PyNcclCommunicator")(
        group=ranks.host_group, device=ranks.device, is_symmetric_memory_enabled=True
    )
    if not made.available:
        raise AbsentError("the NCCL library cannot be loaded")
    buffer, registered = allocate(made, ranks.largest)
    if not registered:
        raise AbsentError("NCCL registers no symmetric window here")

    def staged(tensor: Any) -> Any:
        place = buffer[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor)
        return place

    return _pynccl(made, staged)


def _pynccl(made: Any, place: Callable[[Any], Any]) -> Way:
    if not made.available:
        raise AbsentError("the NCCL library cannot be loaded")
    made.disabled = False  # the engine enables it while it captures graphs

    def reduce(tensor: Any) -> Any:
        at = place(tensor)
        made.all_reduce(at)
        return at

    return Way(reduce)


def _custom(ranks: Ranks) -> Way:
    choose = _class("custom_all_reduce", "dispatch_custom_allreduce")
    kind = _call(choose, group=ranks.host_group, device=ranks.device)
    made = kind(group=ranks.host_group, device=ranks.device)
    if made.disabled:
        raise AbsentError("the engine's custom all-reduce refuses these GPUs (more than two without NVLink)")

    def reduce(tensor: Any) -> Any:
        if not made.should_custom_ar(tensor):
            raise AbsentError("the engine leaves messages of this size to NCCL")
        return _served(made.custom_all_reduce(tensor))

    return Way(reduce, made.capture)


def _pcie_ipc(ranks: Ranks) -> Way:
    made = _class("pcie_ipc_ar", "PcieIpcCommunicator")(
        group=ranks.device_group, device=ranks.device, cpu_group=ranks.host_group
    )
    if made.disabled:
        raise AbsentError("FlashInfer has no PCIe-IPC all-reduce, or not for this number of GPUs (2, 4 or 8)")

    def reduce(tensor: Any) -> Any:
        if not made.should_pcie_ipc_ar(tensor):
            raise AbsentError("the PCIe-IPC kernels do not take this shape")
        return _served(made.pcie_ipc_all_reduce(tensor))

    return Way(reduce)


def _torch_symmetric(ranks: Ranks) -> Way:
    made = _class("torch_symm_mem", "TorchSymmMemCommunicator")(group=ranks.host_group, device=ranks.device)
    if made.disabled:
        raise AbsentError("torch symmetric memory: not for these GPUs or this number of them, or no multicast")

    def reduce(tensor: Any) -> Any:
        return _served(made.all_reduce(tensor))

    return Way(reduce)


def _served(result: Any) -> Any:
    if result is None:
        raise AbsentError("it does not take a message of this size")
    return result


def _class(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"{_CLASSES}.{module}"), name)
    except (ImportError, AttributeError, OSError) as error:
        raise AbsentError(f"the engine has no {name} that can be imported: {error}") from error


def _call(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call an engine function with those arguments that it has in this release."""
    import inspect

    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in known})


_MAKERS: dict[str, Callable[[Ranks], Way]] = {
    "torch": _torch,
    "nccl": _nccl,
    "nccl-symm-mem": _nccl_symmetric,
    "custom": _custom,
    "pcie-ipc": _pcie_ipc,
    "torch-symm-mem": _torch_symmetric,
}
