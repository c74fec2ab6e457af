"""Entries as files for other people and other machines: JSON that can be imported again, and markdown to read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from sglang_bw.errors import LedgerError
from sglang_bw.ledger.entry import Entry
from sglang_bw.ledger.record import RunRecord
from sglang_bw.ledger.runfile import read
from sglang_bw.ledger.store import Ledger


class Export(BaseModel):
    """A file with entries, and with the comparisons behind them."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["sglang-bw ledger"] = "sglang-bw ledger"
    schema_version: Literal[1] = 1
    entries: list[Entry]
    runs: list[RunRecord] = []


def to_json(entries: Iterable[Entry], runs: Iterable[RunRecord] = ()) -> str:
    """Return entries and runs as text that :func:`take_in` reads."""
    export = Export(entries=list(entries), runs=list(runs))
    # In ASCII: a control character of a log is an escape in the file, and comes back as it was.
    return json.dumps(export.model_dump(mode="json"), indent=2)


def to_markdown(entries: Sequence[Entry]) -> str:
    """Return a table of entries with their evidence below."""
    lines = ["| when | what | recipe | result | because of | in short |", "|---|---|---|---|---|---|"]
    for entry in entries:
        cells = (
            f"{entry.at:%Y-%m-%d %H:%M}",
            entry.kind if entry.origin == "here" else f"{entry.kind}, reported",
            entry.recipe or "",
            entry.result,
            entry.failure or "",
            entry.summary or entry.hypothesis,
        )
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    for entry in entries:
        lines += ["", f"## {_cell(entry.id)}", ""]
        lines += [f"- {_cell(name)}: {_cell(str(number))}" for name, number in entry.numbers.items()]
        about = {"fix": entry.fix, "source": entry.source, "hypothesis": entry.hypothesis}
        lines += [f"- {name}: {_cell(text)}" for name, text in about.items() if text]
        lines += [f"- {note.at:%Y-%m-%d}: {_cell(note.text)}" for note in entry.notes]
        lines += ["", *_fenced([line for text in entry.evidence for line in text.splitlines()])]
    return "\n".join(lines).rstrip() + "\n"


def take_in(ledger: Ledger, path: Path) -> tuple[int, int]:
    """Add what a file holds: an export, or one run file (also of a run that was killed).

    :return: entries in the file, and how many of them were new.
    :raises LedgerError: it is neither; nothing was added then.
    :raises UnreadableRunError: it begins like a run file, and is damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LedgerError(f"cannot read {path}: {error}") from error
    before = ledger.count()
    if _is_run(text):
        ledger.add_run(read(path), artefacts=(str(path.absolute()),))
        return 1, ledger.count() - before
    try:
        export = Export.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise LedgerError(
            f"{path} is neither an export of a ledger nor a run file: {first['msg']} at {first['loc']}",
            hint="`sglang-bw ledger export -o FILE` writes one.",
        ) from error
    ledger.add_all(export.entries, export.runs)
    return len(export.entries), ledger.count() - before


def _is_run(text: str) -> bool:
    try:
        first = json.loads(text.partition("\n")[0])
    except ValueError:
        return False
    return isinstance(first, dict) and first.get("kind") == "run"


def _fenced(lines: Sequence[str]) -> list[str]:
    """Return lines as code: between fences that are longer than every run of backticks in them."""
    ticks = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, ticks + 1)
    return [fence, *lines, fence] if lines else []


def _cell(text: str) -> str:
    """Return text that stays inside of a cell and is no markup."""
    for sign in "\\|<>*_`[]":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
