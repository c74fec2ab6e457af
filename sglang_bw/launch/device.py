"""Which device the engine will use on this machine, found without importing torch."""

from __future__ import annotations

import ctypes

from sglang_bw.recipes.schema import Device

# The engine reads these at import, before its flags.
ENV: dict[Device, dict[str, str]] = {"cpu": {"SGLANG_USE_CPU_ENGINE": "1"}, "cuda": {}}
_ONLY_CPU = "SGLANG_USE_CPU_ENGINE"


def gpu_count() -> int:
    """Return the number of GPUs that CUDA lets this process see; 0 without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def detect(*, engine_has_gpu_kernels: bool) -> Device:
    """Return ``cuda`` when there is a GPU and the engine can use it, else ``cpu``."""
    return "cuda" if engine_has_gpu_kernels and gpu_count() > 0 else "cpu"


def environment(device: Device, base: dict[str, str]) -> dict[str, str]:
    """Return ``base`` with what the engine must have in its environment for this device, without what it must not."""
    kept = {name: value for name, value in base.items() if name != _ONLY_CPU}
    return {**kept, **ENV[device]}
