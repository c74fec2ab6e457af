"""Findings about the NVIDIA driver and the CUDA that the engine's environment brings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from sglang_bw.fork.driver import MINIMUM_BRANCH
from sglang_bw.host import pci
from sglang_bw.host.finding import Finding, Group
from sglang_bw.host.gpus import Gpus
from sglang_bw.host.system import System

_GROUP = Group("Driver and CUDA")
# First driver branch with Blackwell (NVIDIA driver release notes, R570: "Added support for Blackwell").
_BLACKWELL_BRANCH = 570
_CONTAINER_FIX = "start the container with `--gpus all` (NVIDIA Container Toolkit)"


def findings(system: System, gpus: Gpus, packages: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what there is to say about driver and CUDA.

    :param packages: what is installed in the engine's environment, canonical name to version.
    """
    if not gpus.boards:
        yield _none(system, gpus)
    else:
        yield from _driver(gpus, packages)
        if gpus.problem:
            yield _GROUP.fail(
                "GPUs that answer",
                gpus.problem,
                costs="the engine fails at its first CUDA call, or hangs",
                fix="look for Xid errors: `sudo dmesg -T | grep -iE 'xid|nvrm'`; then `sudo nvidia-smi -r` or a reboot",
            )
        yield _xid(system)
    yield _runtime(packages)


def _xid(system: System) -> Finding:
    """Look for the driver's error reports: what makes a GPU vanish under a server is told nowhere else."""
    log = system.output("dmesg")
    if not log:
        return _GROUP.unseen(
            "Xid errors", "the kernel's log is closed to this user", fix="`sudo dmesg -T | grep -i xid`"
        )
    lines = [line for line in log.splitlines() if "NVRM: Xid" in line]
    if not lines:
        return _GROUP.ok("Xid errors", "none in the kernel's log")
    return _GROUP.warn(
        "Xid errors",
        f"{len(lines)} in the kernel's log, the last: {lines[-1].partition('NVRM: ')[2][:100]}",
        costs="a GPU that fails under load takes the server with it",
        fix="`sudo dmesg -T | grep -iE 'xid|aer'`; NVIDIA's \"Xid Errors\" page says what each number means",
    )


def _none(system: System, gpus: Gpus) -> Finding:
    on_bus = pci.gpus(system)
    # A container sees the host's /sys; without device nodes the GPUs were not handed to it.
    if on_bus and system.in_container and not any(re.fullmatch(r"nvidia\d+", name) for name in system.names("dev")):
        return _GROUP.unseen(
            "driver", f"{len(on_bus)} NVIDIA GPUs on the bus, none handed to this container", fix=_CONTAINER_FIX
        )
    if on_bus:
        return _GROUP.fail(
            "driver",
            f"{len(on_bus)} NVIDIA GPUs on the bus, but {gpus.problem or 'the driver shows none'}",
            costs="the engine finds no GPU",
            fix=_fix(gpus.problem),
        )
    return _GROUP.unseen("driver", f"no NVIDIA GPU on the bus; {gpus.problem or 'the driver shows none'}")


def _fix(problem: str) -> str:
    if "mismatch" in problem.lower():
        return "reboot, or unload and load the kernel modules: they are older than the installed driver libraries"
    if "not loaded" in problem:
        return "`sudo modprobe nvidia`; when that fails, install the driver (580 or newer, open kernel modules)"
    if "nvidia-ml-py" in problem:
        return "`pip install nvidia-ml-py` in the environment of this tool"
    return "install the NVIDIA driver (580 or newer, open kernel modules), then `nvidia-smi`"


def _driver(gpus: Gpus, packages: Mapping[str, str]) -> Iterator[Finding]:
    branch = int(re.match(r"\d*", gpus.driver)[0] or 0)  # type: ignore[index]
    needed = MINIMUM_BRANCH.get(cuda_major(packages), 0)
    if any(board.capability[0] >= 10 for board in gpus.boards):
        needed = max(needed, _BLACKWELL_BRANCH)
    says = f"driver {gpus.driver}, CUDA up to {gpus.cuda[0]}.{gpus.cuda[1]}"
    if branch and branch < needed:
        yield _GROUP.fail(
            "driver",
            f"{says}; the engine's CUDA {cuda_major(packages)} needs {needed} or newer",
            costs="the engine dies at its first CUDA call",
            fix=f"install driver {needed} or newer; or `sglang-bw install` with an older CUDA",
        )
    else:
        yield _GROUP.ok("driver", says)


def _runtime(packages: Mapping[str, str]) -> Finding:
    torch = packages.get("torch")
    major = cuda_major(packages)
    if torch is None:
        return _GROUP.unseen("torch", "not installed in the engine's environment", fix="`sglang-bw install`")
    says = f"torch {torch}" + (f" on CUDA {major}" if major else ", built without CUDA")
    return _GROUP.ok("torch", says)


def cuda_major(packages: Mapping[str, str]) -> int:
    """Return the major release of the CUDA runtime that an environment's torch brings, 0 when there is none."""
    if tagged := re.search(r"\+cu(\d\d)\d*$", packages.get("torch", "")):
        return int(tagged[1])
    if packages.get("torch", "").endswith("+cpu"):
        return 0
    for name, version in packages.items():
        if name.startswith("nvidia-cuda-runtime"):
            return int(version.partition(".")[0] or 0)
    return 0
