"""The one line of an engine's log that says why it died."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TAIL_BYTES = 4 << 20
MAX_CHARS = 500
KILLED = "it was killed (SIGKILL), most often because the machine ran out of memory"

_TRACEBACK = "Traceback (most recent call last):"
# Time stamp, rank marks and multiprocessing's thread name before a line.
_PREFIX = re.compile(r"^(?:\[\d{4}-\d\d-\d\d [^\]]*\]\s*|\[rank\d+\]:(?:[EWIF]\d{4}[^\]]*\])?\s?)+")
# The line that ends a traceback: `ValueError: ...`, or any `package.module.Name: ...`.
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?\w*(?:Error|Exception|Interrupt|Exit|Warning|Failure|OutOfMemory\w*)(?::|$)"
    r"|^[a-z_][\w.]*\.[A-Z]\w*(?:: |$)"
)
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# Deaths without a Python traceback, each the best line there is. Those of the second kind end an engine by SIGKILL
# too: it kills itself and all that it has started when one of them has died.
_FATAL = re.compile(
    r"error: (?:unrecognized arguments|argument |the following arguments|ambiguous option|invalid choice)"
    r"|^\S*python[\d.]*: (?:No module named |Error while finding module)|^Killed$",
    re.IGNORECASE,
)
_CRASH = re.compile(
    r"^Fatal Python error: |terminate called after throwing|what\(\):|address already in use|Segmentation fault",
    re.IGNORECASE,
)
# What the engine says of a process that it has started: its parent's words, and those of its watchdog.
_CHILD = re.compile(r"(?:Rank \d+ scheduler died|Subprocess \S+ \(pid=\d+\) crashed)[^.]*?exit code:? (-?\d+)\)?")
# Models and kernels that are not installed are told at every start, in words like those of a death.
_HARMLESS = "Ignore import error"
# What other processes print *because* one has failed: never the cause while anything else is there.
_ECHO = re.compile(r"EOFError|BrokenPipe|ConnectionReset|Rank \d+ scheduler died|exit code")


@dataclass
class _Traceback:
    """One traceback with its chain: ``errors`` has the first raised first."""

    announced: bool
    errors: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the error that came out, and what it was raised from when that says more."""
        outer, root = self.errors[-1], self.errors[0]
        return outer if root in outer else f"{outer} (from {root})"


def cause(log: Path, *, offset: int = 0, killed: bool = False) -> str:
    """Return the cause of death in one line, or an empty string when the log shows none.

    A failing scheduler prints the root traceback; then its parent and siblings print theirs because of it. So an
    announced one ("Scheduler hit an exception") counts first, then the first that is no echo, then a fatal line of
    another kind (a wrong flag, a crash in C), then the last traceback. SIGKILL leaves no words of who got it: what
    stands in the log then is older, and only an announced traceback or a crash is believed.

    :param offset: where this engine's part of the file begins, in bytes.
    :param killed: the engine was ended by SIGKILL, by itself or by another.
    """
    lines = _lines(log, offset)
    tracebacks = [found for found in _tracebacks(lines) if found.errors]
    own = [found for found in tracebacks if not _ECHO.search(found.errors[-1])]
    if best := next((found for found in own if found.announced), None):
        return _short(best.text())
    crash = _last(lines, _CRASH)
    child = next((found for line in reversed(lines) if (found := _CHILD.search(line))), None)
    if int(child[1]) == -signal.SIGKILL if child else killed:
        return _short(crash or (f"{child[0]}: {KILLED}" if child else KILLED))
    if own:
        return _short(own[-1].text())
    if fatal := _last(lines, _FATAL) or crash or (child and child[0]):
        return _short(fatal)
    return _short(tracebacks[-1].text()) if tracebacks else ""


def _lines(log: Path, offset: int) -> list[str]:
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(offset, file.tell() - TAIL_BYTES))
        lines = map(_clean, re.split(r"[\r\n]+", file.read().decode(errors="replace")))
    return [line for line in lines if not line.startswith(_HARMLESS)]


def _last(lines: list[str], pattern: re.Pattern[str]) -> str:
    return next((line for line in reversed(lines) if pattern.search(line)), "")


def _clean(line: str) -> str:
    return _PREFIX.sub("", line).rstrip()


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 3] + "..."


def _tracebacks(lines: list[str]) -> Iterator[_Traceback]:
    current: _Traceback | None = None
    inside = False
    for index, line in enumerate(lines):
        if line.endswith(_TRACEBACK):
            chained = current is not None and _is_chained(lines, index)
            if not chained:
                if current:
                    yield current
                current = _Traceback(announced="hit an exception" in line)
            inside = True
        elif inside and current and not line.startswith((" ", "\t")) and _EXCEPTION.match(line):
            current.errors.append(line if not line.endswith(":") else f"{line} {_next(lines, index)}")
            inside = False
    if current:
        yield current


def _is_chained(lines: list[str], index: int) -> bool:
    before = next((line for line in reversed(lines[max(0, index - 3) : index]) if line.strip()), "")
    return before.endswith(_CHAINED)


def _next(lines: list[str], index: int) -> str:
    return next((line.strip() for line in lines[index + 1 : index + 4] if line.strip()), "")
