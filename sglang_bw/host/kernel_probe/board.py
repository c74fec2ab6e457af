"""One board that is not there: what torch and Triton are told about it."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock


@dataclass(frozen=True)
class Board:
    """The facts of a GPU that an engine asks for.

    :ivar capability: compute capability, as torch gives it.
    :ivar shared_memory: the most bytes of shared memory one block may use (opt-in).
    :ivar multiprocessors: their number; grids and split counts depend on it, tile sizes do not.
    :ivar memory: bytes of device memory.
    :ivar name: as torch gives it; the engine looks up tuned configurations by it.
    """

    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int
    memory: int
    name: str


def put(board: Board) -> None:
    """Let this process believe in ``board``, for good. To be called before the engine is imported."""
    # Functions under torch.compile run as they are written: they would ask the CUDA driver, and are not Triton's.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import torch

    _allow_shapes_of_missing_ops()

    for name, answer in _torch_answers(board).items():
        setattr(torch.cuda, name, lambda *_args, _answer=answer, **_options: _answer)
    torch.version.cuda = torch.version.cuda or "13.0"
    torch.version.hip = None
    _put_triton_driver(board)
    put_stand_ins()


def put_stand_ins() -> None:
    """Let packages be imported that cannot be loaded without a GPU, or are missing; in them every name exists."""
    sys.meta_path.insert(0, _StandInFinder(("sgl_kernel",)))
    sys.meta_path.append(_StandInFinder(_OPTIONAL))


@contextlib.contextmanager
def tensors_without_memory() -> Iterator[None]:
    """Within, torch makes CUDA tensors that have a shape, a type and strides, but no memory."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    # What Triton asks a tensor for: memory from torch's allocator is aligned to far more than its 16 bytes. A view
    # into a tensor starts where its offset says.
    FakeTensor.data_ptr = lambda self: self.storage_offset() * self.element_size()
    # torch's own would ask the CUDA driver for the current device first.
    FakeTensor.contiguous = _contiguous
    FakeTensor.__getitem__ = _view
    FakeTensor.__setitem__ = lambda *_: None
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _contiguous(tensor: Any, **_: Any) -> Any:
    import torch

    return tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _view(tensor: Any, index: Any) -> Any:
    """Index with integers, slices, ``None`` and ``...``; with a tensor, rows of its length."""
    items = index if isinstance(index, tuple) else (index,)
    if any(item is ... for item in items):
        at = next(position for position, item in enumerate(items) if item is ...)
        missing = tensor.dim() - sum(item is not None for item in items) + 1
        items = (*items[:at], *[slice(None)] * missing, *items[at + 1 :])
    dimension = 0
    for item in items:
        if isinstance(item, int):
            tensor = tensor.select(dimension, item)
            continue
        if item is None:
            tensor = tensor.unsqueeze(dimension)
        elif isinstance(item, slice):
            start, stop, step = item.indices(tensor.shape[dimension])
            tensor = tensor.as_strided(*_sliced(tensor, dimension, start, stop, step))
        else:
            tensor = tensor.narrow(dimension, 0, 1).expand(*_with(tensor.shape, dimension, item.numel())).contiguous()
        dimension += 1
    return tensor


def _sliced(tensor: Any, dimension: int, start: int, stop: int, step: int) -> tuple[list[int], list[int], int]:
    shape = _with(tensor.shape, dimension, len(range(start, stop, step)))
    strides = _with(tensor.stride(), dimension, tensor.stride(dimension) * step)
    return shape, strides, tensor.storage_offset() + start * tensor.stride(dimension)


def _with(values: Sequence[int], position: int, value: int) -> list[int]:
    return [*values[:position], value, *values[position + 1 :]]


def _allow_shapes_of_missing_ops() -> None:
    """Let the engine tell torch about ops of the kernel package, which is stood in for."""
    import torch

    register = torch.library.register_fake

    def tolerant(op: Any, *args: Any, **options: Any) -> Any:
        if isinstance(op, str) and op.startswith("sgl_kernel::"):
            return lambda function: function
        return register(op, *args, **options)

    torch.library.register_fake = tolerant


def _torch_answers(board: Board) -> dict[str, Any]:
    properties = SimpleNamespace(
        name=board.name,
        major=board.capability[0],
        minor=board.capability[1],
        total_memory=board.memory,
        multi_processor_count=board.multiprocessors,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=board.shared_memory,
        shared_memory_per_multiprocessor=board.shared_memory + 1024,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=1536,
        L2_cache_size=96 << 20,
        is_integrated=0,
        uuid="GPU-0",
    )
    return {
        "is_available": True,
        "is_initialized": True,
        "_lazy_init": None,
        "current_device": 0,
        "device_count": 1,
        "set_device": None,
        "get_device_capability": board.capability,
        "get_device_name": board.name,
        "get_device_properties": properties,
        "mem_get_info": (board.memory, board.memory),
        "is_current_stream_capturing": False,
        "current_stream": SimpleNamespace(cuda_stream=0, device=0),
        "synchronize": None,
    }


class _TritonUtilities:
    """What Triton asks the CUDA driver for. Limits are left out: they are compared afterwards, all of them."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {
            "max_shared_mem": sys.maxsize,
            "max_num_regs": 65536,
            "multiprocessor_count": self._board.multiprocessors,
            "warpSize": 32,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }

    def load_binary(self, *_: Any) -> tuple[Any, int, int, int, int]:
        return object(), 1, 0, 0, 1024

    def unload_module(self, _module: Any) -> None: ...


class _NoLauncher:
    def __init__(self, *_: Any) -> None: ...

    def __call__(self, *_: Any) -> None: ...


def _put_triton_driver(board: Board) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    major, minor = board.capability
    target = GPUTarget("cuda", 10 * major + minor, 32)

    def benchmark(run: Any, *_: Any, **__: Any) -> list[float]:
        run()
        return [1.0, 1.0, 1.0]

    driver = SimpleNamespace(
        utils=_TritonUtilities(board),
        launcher_cls=_NoLauncher,
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        set_current_device=lambda _device: None,
        get_current_stream=lambda _device=0: 0,
        get_device_capability=lambda _device=0: board.capability,
        get_active_torch_device=lambda: "cuda:0",
        get_benchmarker=lambda: benchmark,
        get_empty_cache_for_benchmark=lambda: None,
        clear_cache=lambda _cache: None,
    )
    triton.runtime.driver.set_active(driver)


# Packages that the engine imports at module level and no Triton kernel needs: stood in for where they are missing.
_OPTIONAL = ("flashinfer", "deep_gemm", "torchao", "xgrammar", "outlines", "llguidance", "torchvision")


class _StandInType(type):
    """A class that has every attribute, so that it serves as an enumeration too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{cls.__name__}.{name}")


class _StandIn(ModuleType):
    """A module in which every name exists: classes where it is written like one, else a function that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = _StandInType(name, (), {}) if name[:1].isupper() else MagicMock(name=name)
        setattr(self, name, made)
        return made


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__version__"] = "999.0"
