"""Upstream's wheels: which file is wanted, where it is kept, and fetching it with the user's own pip."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs
from packaging.utils import parse_wheel_filename

from sglang_bw.errors import BadWheelError, DownloadError, HashMismatchError, OutputError, UnknownBaseError
from sglang_bw.fork.environment import clean_environ
from sglang_bw.fork.series import Pins

# What other systems call the machines that wheels exist for.
_MACHINES = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}


def this_python() -> str:
    """Return major.minor of the running Python."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def this_machine() -> str:
    """Return the running machine as wheel tags name it."""
    return _MACHINES.get(platform.machine().lower(), platform.machine())


def cache_folder() -> Path:
    """Return where verified upstream wheels are kept."""
    return Path(platformdirs.user_cache_dir("sglang-bw")) / "wheels"


def pick_wheel(pins: Pins, python: str, machine: str) -> str:
    """Return the pinned wheel's file name for a Python (``3.12``) and machine (``x86_64``).

    :raises UnknownBaseError: upstream has none; the message lists what there is.
    """
    machine = _MACHINES.get(machine.lower(), machine)
    interpreter = "cp" + python.replace(".", "")
    for name in sorted(pins.wheels):
        for tag in parse_wheel_filename(name)[3]:
            python_fits = tag.interpreter in (interpreter, "py3")
            if python_fits and (tag.platform == "any" or tag.platform.endswith("_" + machine)):
                return name
    have = ", ".join(name.split("-", 2)[2].removesuffix(".whl") for name in sorted(pins.wheels))
    raise UnknownBaseError(
        f"SGLang {pins.version} has no wheel for Python {python} on {machine}", hint=f"upstream publishes: {have}"
    )


def fetch(pins: Pins, name: str) -> Path:
    """Return the pinned wheel as a file, from the cache or downloaded into it.

    pip does the download, so that the user's index, proxy and certificates hold. A file enters the cache only
    after its sha256 was checked, and in one step.

    :raises DownloadError: not cached and not to be had.
    :raises HashMismatchError: the index gave another file.
    :raises OutputError: the cache cannot be written to, or the disk is full.
    """
    digest = pins.wheels[name]
    kept = cache_folder() / digest / name
    if kept.is_file() and hashlib.sha256(kept.read_bytes()).hexdigest() == digest:
        return kept
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=kept.parent) as scratch:
            found = _pip_download(pins, name, digest, Path(scratch))
            os.replace(found, kept)  # noqa: PTH105
    except OSError as error:
        raise OutputError(
            f"cannot keep {name} in the cache at {kept.parent}: {error.strerror}",
            hint="free some disk, set XDG_CACHE_HOME, or pass the file with --wheel FILE",
        ) from None
    return kept


def keep(wheel: Path) -> tuple[str, str]:
    """Put a wheel that the user named into the cache, so that it is found again, and return its name and sha256.

    :raises BadWheelError: it cannot be read.
    :raises OutputError: the cache cannot be written to, or the disk is full.
    """
    try:
        data = wheel.read_bytes()
    except OSError as error:
        raise BadWheelError(f"{wheel}: {error.strerror}", hint="name an sglang wheel with --wheel FILE") from None
    digest = hashlib.sha256(data).hexdigest()
    kept = cache_folder() / digest / wheel.name
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".keep-", dir=kept.parent) as scratch:
            copy = Path(scratch) / wheel.name
            copy.write_bytes(data)
            os.replace(copy, kept)  # noqa: PTH105
    except OSError as error:
        raise OutputError(
            f"cannot keep {wheel.name} in the cache at {kept.parent}: {error.strerror}",
            hint="free some disk, or set XDG_CACHE_HOME",
        ) from None
    return wheel.name, digest


def _target(name: str) -> list[str]:
    """Return pip options for the Python, ABI and platform that a wheel's name asks for; a pure wheel needs none."""
    options: set[tuple[str, str]] = set()
    for tag in parse_wheel_filename(name)[3]:
        if tag.platform == "any":
            return []
        version = tag.interpreter.removeprefix("cp")
        options |= {("--platform", tag.platform), ("--abi", tag.abi), ("--implementation", "cp")}
        options |= {("--python-version", f"{version[0]}.{version[1:]}")}
    return [part for option in sorted(options) for part in option]


def _pip_download(pins: Pins, name: str, digest: str, folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"sglang=={pins.version} --hash=sha256:{digest}\n", encoding="utf-8")
    # -P: a folder named pip in the working directory is not the pip that is meant.
    command = [sys.executable, "-P", "-m", "pip"]
    command += ["download", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:", *_target(name)]
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, check=False)
    files = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(files) == 1:
        return files[0]
    said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING: Location")]
    last = said[-1].strip() if said else "pip gave no file and no reason"
    with contextlib.suppress(StopIteration):
        got = next(line for line in said if "Got" in line).split()[-1]
        raise HashMismatchError(
            f"{name}: the index has a file with sha256 {got}, pinned is {digest}",
            hint="a mirror may be broken or tampered with: check the index in your pip settings",
        )
    if "No space left on device" in done.stderr:
        raise OutputError(
            f"the disk is full: {last}", hint=f"free some space, for {folder.parent} or for pip's own cache"
        )
    raise DownloadError(
        f"cannot download {name}: {last}",
        # Not every command has --wheel, and a rebase needs two releases.
        hint=f"check the network and your pip index; offline, copy that file into {folder.parent}",
    )


def pinned_digest(pins: Pins, wheel: Path) -> str:
    """Return the sha256 that a wheel file must have, by its name.

    :raises BadWheelError: the series pins no wheel of that name.
    """
    if wheel.name in pins.wheels:
        return pins.wheels[wheel.name]
    raise BadWheelError(
        f"{wheel.name} is not one of the wheels of SGLang {pins.version}",
        hint="the series fits these: " + ", ".join(sorted(pins.wheels)),
    )
