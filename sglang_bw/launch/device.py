"""Which device the engine will use on this machine, found without importing torch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from sglang_bw.recipes.schema import Device

# The engine reads these at import, before its flags.
ENV: dict[Device, dict[str, str]] = {"cpu": {"SGLANG_USE_CPU_ENGINE": "1"}, "cuda": {}}
# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
_CAPABILITY = (75, 76)
_ONLY_CPU = "SGLANG_USE_CPU_ENGINE"


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA shows to this process.

    :ivar memory_mib: total that CUDA reports, less than what nvidia-smi prints.
    """

    name: str
    arch: str
    memory_mib: int


def gpu_count() -> int:
    """Return the number of GPUs that CUDA lets this process see; 0 without a driver."""
    return _driver()[1]


def gpus() -> list[Gpu]:
    """Return the GPUs that CUDA lets this process see; none without a driver."""
    cuda, count = _driver()
    return [_gpu(cuda, index) for index in range(count)]


def _driver() -> tuple[Any, int]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, 0
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None, 0
    return cuda, count.value


def _gpu(cuda: Any, index: int) -> Gpu:
    name, handle, total = ctypes.create_string_buffer(256), ctypes.c_int(0), ctypes.c_size_t(0)
    cuda.cuDeviceGet(ctypes.byref(handle), index)
    cuda.cuDeviceGetName(name, len(name), handle)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), handle)
    capability = []
    for attribute in _CAPABILITY:
        value = ctypes.c_int(0)
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
        capability.append(str(value.value))
    return Gpu(name.value.decode(errors="replace"), f"sm{''.join(capability)}", total.value >> 20)


def detect(*, engine_has_gpu_kernels: bool) -> Device:
    """Return ``cuda`` when there is a GPU and the engine can use it, else ``cpu``."""
    return "cuda" if engine_has_gpu_kernels and gpu_count() > 0 else "cpu"


def environment(device: Device, base: dict[str, str]) -> dict[str, str]:
    """Return ``base`` with what the engine must have in its environment for this device, without what it must not."""
    kept = {name: value for name, value in base.items() if name != _ONLY_CPU}
    return {**kept, **ENV[device]}
