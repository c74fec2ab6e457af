"""Runs parts in processes of their own, each against its time limit; what fails or hangs costs no other part."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from record.servers import Record, spawn

from .bench import last_words, part_file, read_part

POLL_S = 0.2
GRACE_S = 20.0
DONE = ("done", "failed")


@dataclass
class Group:
    """Parts of one process, in their order: later ones use the servers of earlier ones.

    :ivar alone: nothing else may run beside it, since it measures time.
    """

    parts: list[str]
    alone: bool = True
    process: subprocess.Popen[bytes] | None = None
    log: Path = Path()
    pending: list[str] = field(default_factory=list)


@dataclass
class Control:
    """The groups and how they are run.

    :ivar command: makes the command line of a process that runs these parts.
    :ivar limits: seconds of a part, by name.
    :ivar deadline: ``time.time()`` after which nothing runs.
    :ivar tell: gets a line whenever a part is over.
    """

    scratch: Path
    command: Callable[[Sequence[str]], list[str]]
    limits: dict[str, float]
    deadline: float
    tell: Callable[[str, Record], None]

    def run(self, groups: list[Group]) -> None:
        """Run groups that measure time one after another, the others of a row beside each other."""
        for row in rows(groups):
            for group in row:
                group.pending = list(group.parts)
            try:
                going = row
                while going:
                    going = [group for group in going if self._step(group)]
                    time.sleep(POLL_S)
            finally:
                for group in row:
                    self._end(group)

    def _step(self, group: Group) -> bool:
        """Look at a group once; return whether it goes on."""
        while group.pending and read_part(self.scratch, group.pending[0]).get("state") in DONE:
            part = group.pending.pop(0)
            self.tell(part, read_part(self.scratch, part))
        if not group.pending:
            self._leave(group)
            return False
        part = group.pending[0]
        record = read_part(self.scratch, part)
        if reason := self._over(part, record):
            self._end(group)
            self._fail(part, record, reason)
        elif group.process is None:
            self._spawn(group)
        elif group.process.poll() is not None:
            group.process = None
            self._fail(part, record, f"its process ended: {last_words(group.log)}")
        return True

    def _over(self, part: str, record: Record) -> str:
        """Return why a part must end, or nothing."""
        if time.time() > self.deadline:
            return "the time for all parts was up" + ("" if record else " before it began")
        if record and time.time() > record["began"] + self.limits[part]:
            return f"it took longer than {self.limits[part]:.0f} s"
        return ""

    def _spawn(self, group: Group) -> None:
        group.log = self.scratch / f"{'-'.join(group.pending)}.log"
        group.process = spawn(self.command(group.pending), dict(os.environ), group.log, group.log)

    def _leave(self, group: Group) -> None:
        """Let a process that has nothing left to do stop its servers."""
        if group.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                group.process.wait(GRACE_S)
            self._end(group)

    def _end(self, group: Group) -> None:
        if group.process is None:
            return
        for number, seconds in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 5.0)):
            if group.process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(group.process.pid, number)
                group.process.wait(seconds)
        group.process = None

    def _fail(self, part: str, record: Record, reason: str) -> None:
        began = record.get("began", time.time())
        record = record | {"state": "failed", "reason": reason, "seconds": round(time.time() - began, 1)}
        part_file(self.scratch, part).write_text(json.dumps(record | {"began": began}, indent=1) + "\n")


def rows(groups: list[Group]) -> list[list[Group]]:
    """Return what runs beside each other: each group that measures time alone, neighbours that do not together."""
    found: list[list[Group]] = []
    for group in groups:
        if found and not group.alone and not found[-1][0].alone:
            found[-1].append(group)
        else:
            found.append([group])
    return found
