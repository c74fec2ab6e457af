"""What a starting engine compiles, found among its processes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from sglang_bw.launch import compiling
from sglang_bw.launch.compiling import Compiling, kernel

CACHE = Path("/home/u/.cache/sglang/jit/sm120a/sgl_kernel_jit_moe_wna16_marlin_bf16_t/build-7a8d/.staging-f497")


@pytest.mark.parametrize(
    ("command", "folder", "name"),
    [
        (["nvcc", "-O3", "cuda.cu", "-o", "cuda_0.o"], CACHE, "sgl_kernel_jit_moe_wna16_marlin_bf16_t"),
        (["nvcc", "-c", "/s/csrc/pcie_ipc_all_reduce.cu", "-o", "x.o"], Path("/c/cached_ops"), "pcie_ipc_all_reduce"),
        (["nvcc"], Path("/"), "a kernel"),
        (["nvcc"], Path("/build/deps-1"), "a kernel"),
    ],
)
def test_the_name_says_what_is_built_and_not_how(command: list[str], folder: Path, name: str) -> None:
    assert kernel(command, folder) == name


def test_finds_the_compiler_below_the_engine_and_looks_now_and_then(tmp_path: Path) -> None:
    compiler = shutil.copy("/bin/sleep", tmp_path / compiling.COMPILER)
    now = 0.0
    with subprocess.Popen(["/bin/sh", "-c", f"'{compiler}' 600 & wait"], cwd=tmp_path) as engine:
        looking = Compiling(engine.pid, clock=lambda: now)
        while not (found := looking.look()):
            now += compiling.LOOK_S
        assert found == tmp_path.name
        for process in psutil.Process(engine.pid).children():
            process.kill()
        engine.wait(10)
        assert looking.look() == found, "asked again too soon"
        now += compiling.LOOK_S
        assert looking.look() == "", "the engine is gone"
