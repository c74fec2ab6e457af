"""Where a starting engine is, read from its log."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

_STAMP = re.compile(r"^(\[\d{4}-\d\d-\d\d [^\]]*\]|\[rank\d+\]:|INFO:)\s*")


class Phase(Enum):
    """The phases that a user waits through, in order."""

    STARTING = "starting"  # imports, configuration, child processes
    LOADING = "loading"  # weights of target and draft, KV pools
    GRAPHS = "graphs"  # capture of CUDA or CPU graphs; none when they are off
    WARMUP = "warm-up"  # the engine's own first request
    READY = "ready"


# What SGLang 0.5.23 logs at the beginning of a phase (model_runner.py, cuda_graph_setup.py, eagle_worker_v2.py,
# cpu_graph_runner.py, http_server.py).
_BEGINS: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    (Phase.LOADING, re.compile(r"Load weight begin")),
    (Phase.GRAPHS, re.compile(r"Capture .*graph.* (begin|bs )", re.IGNORECASE)),
    (Phase.WARMUP, re.compile(r"Application startup complete|Uvicorn running on")),
    (Phase.READY, re.compile(r"The server is fired up and ready to roll")),
)


class LogTail:
    """The lines that a growing file has got since the last look."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        """Follow ``path`` from byte ``offset``."""
        self.path = path
        self._offset = offset
        self._rest = ""

    def lines(self) -> list[str]:
        """Return complete new lines; a progress bar's carriage return ends a line too."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        *lines, self._rest = re.split(r"[\r\n]+", self._rest + new.decode(errors="replace"))
        return [line for line in lines if line.strip()]


@dataclass
class Startup:
    """The phase a start has reached, and how long each took.

    :ivar phase: the current phase.
    :ivar seconds: phase -> seconds spent in phases that are over.
    :ivar last_line: the newest line of the log, without its time stamp.
    :ivar compiling: the kernel that is being compiled, empty when none is.
    """

    clock: Callable[[], float] = time.monotonic
    phase: Phase = Phase.STARTING
    seconds: dict[Phase, float] = field(default_factory=dict)
    last_line: str = ""
    compiling: str = ""
    began: float = field(init=False)
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self._since = self.clock()

    def feed(self, lines: Iterable[str]) -> list[Phase]:
        """Take in new lines of the log; return the phases that have begun with them."""
        begun = []
        for line in lines:
            self.last_line = _STAMP.sub("", line).strip()
            for phase, pattern in _BEGINS:
                if phase is not self.phase and pattern.search(line):
                    self.enter(phase)
                    begun.append(phase)
        return begun

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin another; a phase that comes again goes on counting."""
        now = self.clock()
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._since
        self.phase, self._since = phase, now

    def elapsed(self, phase: Phase | None = None) -> float:
        """Return seconds spent in a phase so far, or since the start."""
        if phase is None:
            return self.clock() - self.began
        return self.seconds.get(phase, 0.0) + (self.clock() - self._since if phase is self.phase else 0.0)
