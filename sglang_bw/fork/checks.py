"""What is checked before anything is downloaded: each reason to refuse is found, all are told at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import platformdirs
from packaging.utils import parse_wheel_filename
from packaging.version import InvalidVersion, Version

from sglang_bw.errors import RefusedError
from sglang_bw.fork.driver import needed_branch
from sglang_bw.fork.environment import Environment, owners
from sglang_bw.fork.locks import DEVICES, FOLDER, TORCH, Locked

GIB = 1 << 30

# GiB unpacked with bytecode, and downloaded. Whole environments of the 0.5.23 locks on Python 3.12, x86_64, measured:
# cpu 6.5, cuda 10.2; the rest is estimated. "light" is what is left when torch and CUDA's libraries are there already.
_SIZES = {"cpu": (7.0, 3.0), "cpu-torch": (2.5, 0.8), "cuda": (11.0, 5.0), "light": (1.5, 0.5)}
_HEAVY = ("nvidia-", "flashinfer", "sglang-kernel", "sgl-kernel")


def interpreter(environment: Environment, root: Path, base: str) -> Iterator[str]:
    """Yield why the engine cannot run in this interpreter."""
    if environment.system != "linux":
        yield f"the engine's wheels are for Linux, this is {environment.system}"
    if environment.implementation != "cpython" or environment.free_threaded:
        kind = "free-threaded CPython" if environment.free_threaded else environment.implementation
        yield f"the engine's wheels are for plain CPython, this is {kind}"
    locks = [path.stem.split("-") for path in (root / base / FOLDER).glob("*-*-*.txt") if path.stem.startswith(DEVICES)]
    pythons = sorted({lock[1] for lock in locks}, key=lambda text: [int(part) for part in text.split(".")])
    machines = sorted({lock[2] for lock in locks})
    if not locks:
        yield f"SGLang {base} has no dependency locks: `sglang-bw build --base {base}` makes the wheel alone"
        return
    if environment.python not in pythons:
        full = ".".join(map(str, environment.version))
        yield f"Python {full} at {environment.executable}: SGLang {base} needs {', '.join(pythons)}"
    if environment.machine not in machines:
        yield f"SGLang {base} and its kernels have no wheels for {environment.machine}, only for {', '.join(machines)}"


def libc(environment: Environment, wheel_name: str) -> Iterator[str]:
    """Yield why a wheel's compiled files cannot be loaded: its tag names the oldest glibc."""
    needed = [
        tag.platform.split("_")[1:3] for tag in parse_wheel_filename(wheel_name)[3] if "manylinux_" in tag.platform
    ]
    if not needed:
        return
    oldest = min((int(major), int(minor)) for major, minor in needed)
    name, version = environment.libc
    try:
        fits = name == "glibc" and Version(version).release >= oldest
    except InvalidVersion:
        fits = False
    if not fits:
        here = f"{name} {version}".strip() or "another C library"
        yield f"the wheel needs glibc {oldest[0]}.{oldest[1]}, this system has {here}"


def place(environment: Environment) -> Iterator[str]:
    """Yield why this environment must not be changed, whatever is installed there."""
    if environment.externally_managed:
        yield (
            f"{environment.prefix} is managed by the system (PEP 668): make an environment of your own, for example"
            f" `{environment.executable} -m venv .venv`, and name it with --python .venv/bin/python"
        )
    elif not os.access(environment.purelib, os.W_OK):
        yield f"{environment.purelib} cannot be written to"
    for name, record in owners("sglang", environment.sys_path).items():
        if name != "sglang":
            yield (
                f"{name} has files of its own in sglang/ ({record}): two distributions in one folder break each other;"
                f" uninstall {name} first"
            )


def driver(version: str | None, packages: Iterable[Locked]) -> Iterator[str]:
    """Yield why the GPU set cannot run on this driver."""
    branch = needed_branch(packages)
    if version is None:
        yield (
            f"no NVIDIA driver with a GPU was found, --device cuda needs driver {branch} or newer: install one, take"
            " --device cpu, or pass --no-driver-check when an image is built for another host"
        )
    elif int(version.split(".")[0]) < branch:
        yield f"NVIDIA driver {version} is too old: the engine's CUDA needs {branch} or newer (or take --device cpu)"


def disk(environment: Environment, missing: Iterable[Locked], device: str, *, cpu_torch: bool) -> Iterator[str]:
    """Yield which file system is too small for the packages that are missing; estimates, on the safe side."""
    names = [package.name for package in missing]
    unpacked, downloaded = 0.5, 0.1  # the engine itself: 0.2 GiB unpacked with bytecode, a 40 MB wheel
    if names:
        heavy = any(name in TORCH or name.startswith(_HEAVY) for name in names)
        kind = ("cpu-torch" if cpu_torch else device) if heavy or cpu_torch else "light"
        unpacked, downloaded = _SIZES[kind]
    needs = ((environment.purelib, unpacked + downloaded), (_cache(), downloaded))
    by_device: dict[int, tuple[Path, float]] = {}
    for folder, gib in needs:
        there = _existing(folder)
        first, total = by_device.get(there.stat().st_dev, (there, 0.0))
        by_device[there.stat().st_dev] = (first, total + gib)
    for folder, gib in by_device.values():
        free = shutil.disk_usage(folder).free / GIB
        if free < gib:
            yield f"{free:.1f} GiB are free at {folder}, about {gib:.1f} GiB are needed"


def _cache() -> Path:
    return Path(os.environ.get("PIP_CACHE_DIR") or platformdirs.user_cache_dir("pip"))


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def refuse(findings: Iterable[str]) -> None:
    """Raise for every finding at once.

    :raises RefusedError: there is at least one.
    """
    found = list(findings)
    if len(found) == 1:
        raise RefusedError(f"refused: {found[0]}", hint="nothing was downloaded and nothing was changed")
    if found:
        listed = "".join(f"\n  {finding}" for finding in found)
        raise RefusedError(f"refused, for {len(found)} reasons:{listed}", hint="nothing was downloaded or changed")
