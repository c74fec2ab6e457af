"""A short copy over a GPU's PCI Express link, so that the link is seen at work: it slows down when nothing moves.

Uses the driver's own C interface. Run as a program, in a process of its own: a GPU that hangs must not hang the
caller, and the context is gone with the process. Prints one JSON object, ``{"generation": 5, "width": 16, "GBps":
55.1}``: the highest link state seen, and the rate of copies to the device in 10^9 bytes a second.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from sglang_bw.host import nvml

BYTES = 128 << 20
# A sleeping GPU takes a while to raise its clocks and its link; that does not count.
WARM_UP_S = 0.2
SECONDS = 0.3
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class UnderLoad:
    """A link at work; ``problem`` says why it was not seen."""

    generation: int = 0
    width: int = 0
    gigabytes_per_second: float = 0.0
    problem: str = ""


def measure(uuid: str) -> UnderLoad:
    """Copy to a GPU for a moment and look at its link meanwhile."""
    command = [sys.executable, "-P", "-m", __name__, uuid]
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environ)
        seen = json.loads(done.stdout.strip().splitlines()[-1])
        return UnderLoad(seen["generation"], seen["width"], seen["GBps"])
    except subprocess.TimeoutExpired:
        return UnderLoad(problem=f"a copy to it did not end within {_TIMEOUT_S:.0f} s")
    except (OSError, IndexError, KeyError, ValueError, TypeError):
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return UnderLoad(problem=said[0][:120])


class _Cuda:
    """The driver's C interface; every call that fails raises with its name and code."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: Any) -> None:
        if code := getattr(self.library, name)(*arguments):
            raise SystemExit(f"{name} failed with CUDA error {code}")


def main(uuid: str) -> None:
    """Copy to the GPU with this UUID and print what was seen."""
    cuda, library = _Cuda(), nvml.load()
    if library is None:
        raise SystemExit("nvidia-ml-py is not installed")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    there, here = ctypes.c_uint64(), ctypes.c_void_p()
    library.nvmlInit()
    handle = library.nvmlDeviceGetHandleByUUID(uuid)
    address = nvml.bus_address(library.nvmlDeviceGetPciInfo(handle))
    cuda("cuInit", 0)
    cuda("cuDeviceGetByPCIBusId", ctypes.byref(device), address.encode())
    # The primary context: its creation has kept one signature through all releases.
    cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    cuda("cuCtxSetCurrent", context)
    cuda("cuMemAlloc_v2", ctypes.byref(there), ctypes.c_size_t(BYTES))
    cuda("cuMemAllocHost_v2", ctypes.byref(here), ctypes.c_size_t(BYTES))
    generation = width = copies = 0
    began = time.perf_counter() + WARM_UP_S
    while (now := time.perf_counter()) - began < SECONDS:
        cuda("cuMemcpyHtoDAsync_v2", there, here, ctypes.c_size_t(BYTES), None)
        generation = max(generation, library.nvmlDeviceGetCurrPcieLinkGeneration(handle))
        width = max(width, library.nvmlDeviceGetCurrPcieLinkWidth(handle))
        cuda("cuStreamSynchronize", None)
        copies += now >= began
    rate = copies * BYTES / (time.perf_counter() - began) / 1e9
    print(json.dumps({"generation": generation, "width": width, "GBps": round(rate, 1)}))  # noqa: T201  (for `measure`)


if __name__ == "__main__":
    main(sys.argv[1])
