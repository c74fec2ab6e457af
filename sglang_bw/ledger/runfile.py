"""A run on the disk, written line by line while it goes on.

A run file is JSON Lines. The first line is a :class:`RunRecord` without blocks, written before anything starts and
again when an arm has said what it is (the last one counts); then one line for every finished :class:`Block`, then one
:class:`Outcome`. A file without an outcome is a run that was ended from outside; what it has is whole, at most its last
line is cut.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sglang_bw.errors import OutputError, UnreadableRunError
from sglang_bw.ledger.record import SCHEMA, Block, Outcome, RunRecord


class RunFile:
    """Writes a run as it goes on; every line is on the disk before the next block begins."""

    def __init__(self, path: Path) -> None:
        """Open a new file.

        :raises OutputError: it exists, or cannot be written.
        """
        self.path = path
        if path.exists():
            raise OutputError(f"{path} is there already", hint="Name another file with --record.")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("x", encoding="utf-8")
        except OSError as error:
            raise self._error(error) from error

    def write(self, line: RunRecord | Block | Outcome) -> None:
        """Append a line and see it onto the disk.

        :raises OutputError: the disk is full, or the like; lines before this one are kept.
        """
        try:
            self._file.write(line.model_dump_json(exclude_defaults=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._error(error) from error

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> OutputError:
        return OutputError(
            f"cannot write the record {self.path}: {error.strerror}",
            hint="What is in it stays. Free some space, or choose another place with --record FILE.",
        )


def read(path: Path) -> RunRecord:
    """Read a run file, a killed run's as well: a last line that was cut is left out.

    :raises UnreadableRunError: no such file, or not a record of this version.
    """
    try:
        # Not splitlines(): JSON leaves other separators, U+2028 for one, as they are, and answers have them.
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    except OSError as error:
        raise UnreadableRunError(f"cannot read the run {path}: {error}") from error
    parts: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            parts.append(json.loads(line.decode("utf-8")))
        except (ValueError, RecursionError) as error:
            if number < len(lines) or number == 1:
                raise UnreadableRunError(f"{path}:{number} is no JSON in UTF-8; this is not a run file") from error
    try:
        heads = [RunRecord.model_validate(part) for part in parts if part.get("kind") == "run"]
        blocks = tuple(Block.model_validate(part) for part in parts if part.get("kind") == "block")
        ends = [Outcome.model_validate(part) for part in parts if part.get("kind") == "outcome"]
    except (ValidationError, AttributeError) as error:
        raise UnreadableRunError(f"{path} is not a run of schema {SCHEMA}: {error}") from error
    if not heads:
        raise UnreadableRunError(f"{path} is not a run file: it has no line of kind 'run'")
    return heads[-1].model_copy(update={"blocks": blocks, "outcome": ends[-1] if ends else None})
