"""The machine as its kernel shows it: ``/proc``, ``/sys`` and ``/dev`` below a root, programs, and the environment.

Everything that a check reads of the system goes through here, so that a directory tree can stand for a machine.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_PROGRAM_TIMEOUT_S = 10.0
_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Limit:
    """A resource limit of this process in bytes; ``None`` is unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True)
class System:
    """One machine.

    :ivar root: where ``proc``, ``sys``, ``dev`` and ``etc`` are.
    :ivar environ: the environment that a server would inherit.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def bytes(self, path: str, limit: int = _MOST_BYTES) -> bytes | None:
        """Return the start of a file; ``None`` when it is not there or closed to this user."""
        try:
            with (self.root / path).open("rb") as file:
                return file.read(limit)
        except OSError:
            return None

    def text(self, path: str) -> str | None:
        """Return a file's text without surrounding blanks; ``None`` when it cannot be read."""
        data = self.bytes(path)
        return None if data is None else data.decode(errors="replace").strip()

    def number(self, path: str) -> int | None:
        """Return the integer that a file holds; ``None`` when there is none."""
        try:
            return int(self.text(path) or "", 0)
        except ValueError:
            return None

    def fields(self, path: str) -> dict[str, str]:
        """Return a file of ``name: value`` lines, such as ``/proc/meminfo``; empty when it cannot be read."""
        rows = [line.partition(":") for line in (self.text(path) or "").splitlines()]
        return {name.strip(): value.strip() for name, colon, value in rows if colon}

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory; none when it is not there or closed."""
        try:
            return sorted(os.listdir(self.root / path))  # noqa: PTH208  (names, and closed directories are no error)
        except OSError:
            return []

    def real(self, path: str) -> str:
        """Return a path below the root with its links followed, relative to the root."""
        whole = (self.root / path).resolve()
        root = self.root.resolve()
        return str(whole.relative_to(root)) if whole.is_relative_to(root) else str(whole).lstrip("/")

    def size(self, path: str) -> tuple[int, int] | None:
        """Return total and free bytes of the file system of a directory; ``None`` when it is not there."""
        try:
            usage = shutil.disk_usage(self.root / path)
        except OSError:
            return None
        return usage.total, usage.free

    def memlock(self) -> Limit:
        """Return how much memory this process may lock, in bytes."""
        soft, hard = (None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_MEMLOCK))
        return Limit(soft, hard)

    def program(self, name: str) -> Path | None:
        """Return where a program is, by the environment's PATH; a name with a slash is a path."""
        found = shutil.which(name, path=self.environ.get("PATH", os.defpath))
        return Path(found) if found else None

    def output(self, *command: str) -> str:
        """Run a program and return what it says; empty when it fails, hangs or is not there."""
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_PROGRAM_TIMEOUT_S, check=False,
                stdin=subprocess.DEVNULL, env={**self.environ, "LC_ALL": "C"},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout if done.returncode == 0 else ""

    @property
    def in_container(self) -> bool:
        """Whether this looks like a container: its runtime's mark, or a process group of one."""
        marks = (".dockerenv", "run/.containerenv")
        if any((self.root / mark).exists() for mark in marks) or self.environ.get("container"):
            return True
        return any(word in (self.text("proc/1/cgroup") or "") for word in ("docker", "kubepods", "containerd", "lxc"))

    @property
    def is_virtual(self) -> bool:
        """Whether the processor says that a hypervisor runs it."""
        flags = self.fields("proc/cpuinfo").get("flags", "")
        return "hypervisor" in flags.split()
