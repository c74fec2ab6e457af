"""The dependency locks: every package of the engine's environment, pinned with hashes.

``patches/<base>/locks/<device>-<python>-<machine>.txt`` is what ``uv pip compile`` makes of ``<device>.in``:
``cuda.in`` is the engine's own list, ``cpu.in`` the part of it that a CPU needs. Both obey the engine's pins.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from sglang_bw.errors import BadWheelError, InstallError, LintError, UnknownBaseError

DEVICES = ("cpu", "cuda")
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
FOLDER = "locks"

# A CPU-only torch comes from an index of its own, under local versions; what only a CUDA torch needs goes with it.
# Triton stays: the engine imports it at start on every device.
TORCH = frozenset({"torch", "torchvision", "torchaudio"})
_CUDA_ONLY = re.compile(r"^(nvidia-|cuda-)")

# `outlines` 0.1.11 needs outlines-core 0.1.26, which has no wheel for 3.13;
# the engine starts without it and uses xgrammar.
LEFT_OUT = {"3.13": ("outlines",)}


@dataclass(frozen=True)
class Locked:
    """One pinned package. ``name`` is canonical, ``hashes`` are sha256 in hex, one a file of the release."""

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def lines(self) -> str:
        """The entry as a requirements file has it."""
        return " \\\n".join([f"{self.name}=={self.version}", *(f"    --hash=sha256:{h}" for h in self.hashes)]) + "\n"

    def is_met(self, installed: str | None) -> bool:
        """Whether that installed version is exactly the pinned one."""
        return _version(installed) == Version(self.version)

    def is_met_locally(self, installed: str | None) -> bool:
        """Whether that installed version is the pinned one, of whatever build (``2.14.1+cpu``)."""
        found = _version(installed)
        return found is not None and found.public == Version(self.version).public


def _version(text: str | None) -> Version | None:
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None


@dataclass(frozen=True)
class Lock:
    """The lock of one device, Python (``3.12``) and machine (``x86_64``)."""

    path: Path
    device: str
    python: str
    machine: str
    packages: tuple[Locked, ...]

    @classmethod
    def load(cls, root: Path, base: str, device: str, python: str, machine: str) -> Lock:
        """Read the lock.

        :raises UnknownBaseError: there is none; the message lists what there is.
        :raises LintError: it cannot be read, or a package has no hash.
        """
        path = lock_path(root, base, device, python, machine)
        if not path.is_file():
            have = ", ".join(sorted(p.stem for p in path.parent.glob("*-*-*.txt"))) or "none"
            raise UnknownBaseError(
                f"no dependency lock of SGLang {base} for {device}, Python {python} on {machine}",
                hint=f"there are: {have}",
            )
        return cls(path, device, python, machine, parse(path))

    def without_cuda(self) -> tuple[Locked, ...]:
        """Return the packages that go beside a CPU-only torch: neither torch itself nor what only CUDA needs."""
        return tuple(p for p in self.packages if p.name not in TORCH and not _CUDA_ONLY.match(p.name))

    def torch(self) -> tuple[Locked, ...]:
        """Return torch and its companions."""
        return tuple(p for p in self.packages if p.name in TORCH)


def lock_path(root: Path, base: str, device: str, python: str, machine: str) -> Path:
    """Return where that lock lies."""
    return root / base / FOLDER / f"{device}-{python}-{machine}.txt"


def parse(path: Path) -> tuple[Locked, ...]:
    """Read a lock file.

    :raises LintError: lists every line that is no ``name==version`` with hashes.
    """
    try:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    except (OSError, UnicodeDecodeError) as error:
        raise LintError([f"{path}: {error}"]) from None
    packages, findings = [], []
    for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
        pinned = re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})+)", line)
        if pinned:
            hashes = tuple(re.findall(r"sha256:([0-9a-f]{64})", pinned[3]))
            packages.append(Locked(canonicalize_name(pinned[1]), pinned[2], hashes))
        else:
            findings.append(f"{path.name}: not a pinned package with hashes: {line[:80]}")
    if findings or not packages:
        raise LintError(findings or [f"{path.name}: no package in it"], hint="`scripts/lock` writes the locks")
    return tuple(packages)


def render(packages: Iterable[Locked]) -> str:
    """Return a requirements file of these packages."""
    return "".join(package.lines for package in packages)


def engine_requirements(wheel: Path) -> list[str]:
    """Return what the engine itself asks for: ``Requires-Dist`` of its METADATA, extras and itself left out.

    What cannot be installed on one Python (:data:`LEFT_OUT`) gets a marker.

    :raises BadWheelError: no wheel, or without METADATA.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            metadata = archive.read(name)
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        raise BadWheelError(f"{wheel} is no wheel: {error}") from None
    return list(own_requirements(metadata))


def own_requirements(metadata: bytes) -> Iterator[str]:
    """Yield the requirements that METADATA states; see :func:`engine_requirements`."""
    for text in email.message_from_bytes(metadata).get_all("Requires-Dist") or []:
        requirement = Requirement(text)
        if re.search(r"\bextra\b", str(requirement.marker or "")) or canonicalize_name(requirement.name) == "sglang":
            continue
        bounds = [f'python_version < "{python}"' for python, names in LEFT_OUT.items() if requirement.name in names]
        yield text + (f" ; {bounds[0]}" if bounds else "")


def write_engine_input(root: Path, base: str, wheel: Path) -> Path:
    """Write ``cuda.in`` from an upstream wheel."""
    path = root / base / FOLDER / "cuda.in"
    head = [
        f"# What SGLang {base} itself requires: Requires-Dist of its METADATA, without extras (scripts/lock --wheel).",
        "# outlines is left out on Python 3.13: outlines-core 0.1.26 has no wheel there, the engine runs without it.",
    ]
    path.write_text("\n".join([*head, *engine_requirements(wheel)]) + "\n", encoding="utf-8")
    return path


def read_input(path: Path) -> list[Requirement]:
    """Read a ``.in`` file.

    :raises LintError: lists every line that is no requirement.
    """
    found, findings = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.partition(" #")[0].strip()
        if text and not text.startswith("#"):
            try:
                found.append(Requirement(text))
            except InvalidRequirement as error:
                findings.append(f"{path.name}: {line}: {error}")
    if findings:
        raise LintError(findings)
    return found


def lock_names(root: Path, base: str) -> list[str]:
    """Return which locks a base has (``cuda-3.12-x86_64``), in order; every one that its inputs allow if none is there.

    A base need not have all: a release may have no kernels for a machine, or for a CPU.
    """
    folder = root / base / FOLDER
    wanted = [
        f"{device}-{python}-{machine}"
        for device in DEVICES
        for python in PYTHONS
        for machine in MACHINES
        if (folder / f"{device}.in").is_file()
    ]
    return [name for name in wanted if (folder / f"{name}.txt").is_file()] or wanted


def compile_locks(
    root: Path,
    base: str,
    *,
    names: Sequence[str] = (),
    upgrade: bool = False,
    until: str | None = None,
    progress: Callable[[str], None],
) -> list[Path]:
    """Write the locks of a base with ``uv pip compile``; versions stay as they are unless ``upgrade``.

    All locks start from the versions of the first one, so that they differ only where they must. Wheels only, and
    no index is named: the user's own settings say where packages come from.

    :param names: these locks (``cuda-3.12-x86_64``), by default those that are there.
    :param until: take no file that was published after this date (``2026-03-01``): for a release of the past, whose
        open requirements newer packages do not meet.
    :raises InstallError: uv is missing or finds no solution.
    """
    uv = find_uv()
    if uv is None:
        raise InstallError("the locks are compiled with uv, which is not here", hint="pip install uv")
    folder = root / base / FOLDER
    known = list(dict.fromkeys([*lock_names(root, base), *names]))
    written = []
    for name in names or known:
        device, python, machine = name.split("-")
        path = folder / f"{name}.txt"
        first = next(folder / f"{other}.txt" for other in known if other.startswith(f"{device}-"))
        progress(path.name)
        if not path.exists() or (upgrade and path != first):
            _start_from(path, first, folder / f"{known[0]}.txt")
        command = [uv, "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"]
        command += ["--only-binary", ":all:", "--python-version", python]
        command += ["--python-platform", f"{machine}-manylinux_2_34", "--output-file", path.name]
        command += ["--constraints", "cuda.in"] if device != "cuda" else []
        command += ["--upgrade"] if upgrade and path == first else []
        command += ["--exclude-newer", until] if until else []
        done = subprocess.run([*command, f"{device}.in"], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InstallError(f"uv finds no lock for {path.name}:\n{done.stderr.strip()}")
        written.append(path)
    return written


def _start_from(path: Path, *others: Path) -> None:
    """Copy the first of ``others`` that is there: uv keeps the versions it finds in its output file."""
    if found := next((other for other in others if other != path and other.is_file()), None):
        shutil.copyfile(found, path)


def find_uv() -> str | None:
    """Return uv's path: the one on PATH, else the one beside the tool's Python."""
    beside = Path(sys.executable).with_name("uv")
    return shutil.which("uv") or (str(beside) if os.access(beside, os.X_OK) else None)
