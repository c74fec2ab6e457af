"""The kernel that a starting engine compiles just now: some take minutes, and the log says nothing meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil

COMPILER = "nvcc"
LOOK_S = 2.0
"""Seconds between two looks: the engine's whole process tree is read."""
_SOURCES = (".cu", ".cpp", ".cc")
# Folders of a build cache, and files, that say how something is built and not what.
_BUILD_FOLDERS = ("build", "deps", "cached_ops", "generated")
_GENERIC_FILES = ("cuda", "main", "kernel")


class Compiling:
    """Looks for compilers below a process."""

    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.pid = pid
        self._clock = clock
        self._looked: float | None = None
        self._found = ""

    def look(self) -> str:
        """Return the kernel's name, empty when none is compiled; what the last look found, when that was just now."""
        now = self._clock()
        if self._looked is None or now - self._looked >= LOOK_S:
            self._looked, self._found = now, self._look()
        return self._found

    def _look(self) -> str:
        try:
            below = psutil.Process(self.pid).children(recursive=True)
        except psutil.Error:
            return ""
        for process in below:
            try:
                if process.name() == COMPILER:
                    return kernel(process.cmdline(), Path(process.cwd()))
            except psutil.Error:  # it has ended meanwhile
                continue
        return ""


def kernel(command: list[str], folder: Path) -> str:
    """Return the name of what a compiler's command line builds: its source's, or its cache folder's."""
    sources = [Path(word).name.partition(".")[0] for word in command if word.endswith(_SOURCES)]
    if sources and not sources[-1].startswith(_GENERIC_FILES):
        return sources[-1]
    for part in reversed(folder.parts[1:]):
        if not part.startswith((".", *_BUILD_FOLDERS)):
            return part
    return "a kernel"
