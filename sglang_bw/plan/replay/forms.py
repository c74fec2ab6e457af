"""Which table a CSV file is, told by its columns."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from sglang_bw.errors import ReplayError


class Form(StrEnum):
    """The known tables."""

    CELLS = "speculation_cells"
    BUNDLE = "specbundle"
    MEMORY_POINTS = "memory_points"
    MEMORY_LOGS = "memory_logs"


# The inputs without which no row of a form can be predicted. Answers are not asked for: they may be absent.
NEEDED = {
    Form.CELLS: ("model", "engine", "ctx", "conc", "tps_nospec"),
    Form.BUNDLE: ("target", "draft", "dataset", "batch", "steps", "topk", "draft_tokens"),
    Form.MEMORY_POINTS: ("mem_fraction", "avail_after_weights_GiB", "bytes_per_token_per_gpu"),
    Form.MEMORY_LOGS: ("mem_fraction_static", "avail_before_GB", "avail_after_GB"),
}
_WANTED = "Give a CSV file in UTF-8 whose first line names the columns, as in the tables that docs/plan.md names."


@dataclass(frozen=True)
class Table:
    """The rows of a file.

    :ivar damage: index of a row whose number of cells is not the header's -> what is wrong with it.
    """

    form: Form
    rows: tuple[dict[str, str], ...]
    damage: dict[int, str] = field(default_factory=dict)


def read(path: Path) -> Table:
    """Read a CSV file.

    :raises ReplayError: when it cannot be read, has no rows, or its columns are none of the known forms.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ReplayError(f"{path} cannot be read: {error.strerror or error}", hint=_WANTED) from error
    except UnicodeDecodeError as error:
        raise ReplayError(f"{path} is not a text file in UTF-8", hint=_WANTED) from error
    try:
        lines = [line for line in csv.reader(text.splitlines(), strict=True) if line]
    except csv.Error as error:
        raise ReplayError(f"{path} is not valid CSV: {error}", hint=_WANTED) from error
    if len(lines) < 2:
        raise ReplayError(f"{path} has no rows", hint="the first line names the columns, each further line is a row")
    header = [name.strip() for name in lines[0]]
    form = _form(path, header)
    rows, damage = [], {}
    for number, line in enumerate(lines[1:]):
        rows.append(dict(zip(header, (*line, *[""] * len(header)), strict=False)))
        if len(line) != len(header):
            damage[number] = f"has {len(line)} cells, the header {len(header)}"
    return Table(form, tuple(rows), damage)


def _form(path: Path, header: list[str]) -> Form:
    if twice := sorted({name for name in header if header.count(name) > 1}):
        raise ReplayError(f"{path} names a column twice: {', '.join(twice)}", hint="Rename or remove one of them.")
    missing = {form: [name for name in needed if name not in header] for form, needed in NEEDED.items()}
    for form, absent in missing.items():
        if not absent:
            return form
    form = min(missing, key=lambda form: len(missing[form]) / len(NEEDED[form]))
    raise ReplayError(
        f"{path} has none of the known column forms ({', '.join(NEEDED)})",
        hint=f"nearest is {form}, which also needs: {', '.join(missing[form])}",
    )
