"""Findings about what the first start compiles with: nvcc, a C++ compiler, ninja, Python's headers.

The engine, FlashInfer and Triton compile kernels for the GPU at the first start and keep them. They look for nvcc as
here: CUDA_HOME or CUDA_PATH, else PATH, else /usr/local/cuda.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_bw.fork.environment import Environment
from sglang_bw.host.drivers import cuda_major
from sglang_bw.host.finding import Finding, Group
from sglang_bw.host.gpus import Gpu
from sglang_bw.host.system import System

_GROUP = Group("First start (compilers)")
# First CUDA release whose nvcc knows the architecture (CUDA release notes, "New Features").
_FIRST_NVCC = {90: (11, 8), 100: (12, 8), 103: (12, 9), 120: (12, 8), 121: (12, 9)}


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler; ``version`` is (0, 0) when it does not answer."""

    path: Path
    version: tuple[int, int]


def nvcc(system: System) -> Nvcc | None:
    """Return the nvcc that the engine would use, or ``None``."""
    home = system.environ.get("CUDA_HOME") or system.environ.get("CUDA_PATH")
    on_path = None if home else system.program("nvcc")
    path = on_path or Path(home or system.root / "usr/local/cuda") / "bin" / "nvcc"
    if not path.is_file():
        return None
    found = re.search(r"release (\d+)\.(\d+)", system.output(str(path), "--version"))
    return Nvcc(path, (int(found[1]), int(found[2])) if found else (0, 0))


def findings(system: System, environment: Environment, boards: tuple[Gpu, ...]) -> Iterator[Finding]:
    """Yield what there is to say about compilers; without a GPU nothing of it is a failure.

    :param environment: of the engine: its ``bin`` counts as on PATH, since `serve` puts it there.
    """
    yield _nvcc(system, environment, boards)
    yield _compiler(system, boards)
    ninja = environment.executable.parent / "ninja"
    found = ninja if ninja.is_file() else system.program("ninja")
    if found:
        yield _GROUP.ok("ninja", str(found))
    else:
        yield _missing(boards, "ninja", "not found", f"`{environment.executable} -m pip install ninja`")
    header = environment.base_prefix / "include" / f"python{environment.python}" / "Python.h"
    if header.is_file():
        yield _GROUP.ok("Python headers", str(header))
    else:
        fix = f"`sudo apt-get install python{environment.python}-dev`, or a Python from uv"
        yield _missing(boards, "Python headers", f"{header} is not there (Triton includes it)", fix)


def _missing(boards: tuple[Gpu, ...], name: str, says: str, fix: str) -> Finding:
    if not boards:
        return _GROUP.unseen(name, f"{says}; needed on a GPU only", fix=fix)
    return _GROUP.fail(name, says, costs="the first start dies while it compiles a kernel", fix=fix)


def _nvcc(system: System, environment: Environment, boards: tuple[Gpu, ...]) -> Finding:
    found = nvcc(system)
    if found is None:
        return _missing(boards, "nvcc", "not found (CUDA_HOME, PATH, /usr/local/cuda)", _nvcc_fix(environment))
    says = f"{found.path}, CUDA {found.version[0]}.{found.version[1]}"
    if found.version == (0, 0):
        return _missing(boards, "nvcc", f"{found.path} does not answer `--version`", "install the CUDA toolkit again")
    for gpu in boards:
        first = _FIRST_NVCC.get(10 * gpu.capability[0] + gpu.capability[1], (0, 0))
        if found.version < first:
            return _missing(
                boards,
                "nvcc",
                f"{says} does not know {gpu.arch}",
                f"CUDA toolkit {first[0]}.{first[1]} or newer, in CUDA_HOME",
            )
    major = cuda_major(environment.installed)
    if major and found.version[0] != major:
        return _GROUP.warn(
            "nvcc",
            f"{says}; torch is on CUDA {major}",
            costs="kernels compiled here may not load beside torch's CUDA runtime",
            fix=f"a CUDA {major} toolkit, in CUDA_HOME",
        )
    return _GROUP.ok("nvcc", says)


def _nvcc_fix(environment: Environment) -> str:
    for folder in sorted(environment.purelib.glob("nvidia/*/bin/nvcc")):
        return f"`export CUDA_HOME={folder.parent.parent}` (nvcc of the engine's environment)"
    return "install the CUDA toolkit (13.0 for CUDA 13 wheels), `export CUDA_HOME=/usr/local/cuda`"


def _compiler(system: System, boards: tuple[Gpu, ...]) -> Finding:
    wanted = system.environ.get("CXX", "c++").split()[0] if system.environ.get("CXX", "c++").strip() else "c++"
    found = system.program(wanted)
    if found is None:
        return _missing(boards, "C++ compiler", f"{wanted} is not on PATH", "`sudo apt-get install g++`")
    lines = system.output(str(found), "--version").splitlines() or ["does not answer"]
    return _GROUP.ok("C++ compiler", f"{found}: {lines[0]}")
