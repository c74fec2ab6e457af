"""Ending an installer when this process is asked to end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Any


@contextmanager
def ended_with_us(child: Popen[Any]) -> Iterator[None]:
    """Interrupt the child when SIGTERM comes, before what the caller has set for SIGTERM happens.

    The terminal sends Ctrl-C to the child as well; SIGTERM comes to this process alone, and the child would go on.
    Nothing is changed where SIGTERM has no handler, or this is no main thread, which alone can have one.
    """
    before = signal.getsignal(signal.SIGTERM)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = before

    def interrupt(number: int, frame: FrameType | None) -> None:
        _interrupt(child.pid)
        handler(number, frame)

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _interrupt(pid: int) -> None:
    """Interrupt the process that does the work, so that it puts back what it was replacing.

    pip with ``--python`` runs another pip and waits for it: interrupted itself, it would kill that one a moment later.
    """
    # In the background of a shell SIGINT is ignored, by the children too.
    number = signal.SIGTERM if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else signal.SIGINT
    for process in _children(pid) or [pid]:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def _children(parent: int) -> list[int]:
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) == parent]


def _parent(stat: Path) -> int:
    """Return the parent of a process, 0 when it has ended by now."""
    try:
        # The name of a program may hold blanks and brackets: what follows the last bracket counts.
        return int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
