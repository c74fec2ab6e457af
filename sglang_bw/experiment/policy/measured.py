"""Traces from measured tables: every row of a file in the form of speculation_cells.csv."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sglang_bw.errors import ReplayError
from sglang_bw.experiment.policy.trace import Trace, rates_of
from sglang_bw.plan.replay import cells, forms

# For rows that give speeds only: of the lengths that their costs could go with, a common one.
ASSUMED_LENGTH = 2.5


@dataclass(frozen=True)
class Row:
    """One measured cell: two costs and an acceptance.

    :ivar number: in the file, the first row below the header is 1.
    :ivar plain: seconds of a decode step.
    :ivar round: seconds of a round with ``steps`` drafts.
    :ivar assumed: the table has no accept length.
    """

    number: int
    host: tuple[str, str, str, str]
    batch: int
    steps: int
    plain: float
    round: float
    length: float
    assumed: bool

    def trace(self, tokens: int) -> Trace:
        """Return a run of this cell."""
        costs = {0: self.plain, self.steps: self.round}
        rates = rates_of(self.length, self.steps)
        return Trace(
            f"row {self.number}",
            lambda k, _batch: costs[k],
            lambda _done: rates,
            batch=lambda _done: self.batch,
            candidates=(0, self.steps),
            initial=self.steps,
            tokens=tokens,
        )


def rows(path: Path) -> tuple[list[Row], dict[int, str]]:
    """Read a table; return its rows, and why others cannot be replayed.

    :raises ReplayError: the file cannot be read, is of another form, or has no row that can be replayed.
    """
    table = forms.read(path)
    if table.form is not forms.Form.CELLS:
        raise ReplayError(f"{path} is a table of the form {table.form}, not {forms.Form.CELLS}")
    found, left = [], {}
    for index, row in enumerate(table.rows):
        if index in table.damage:
            left[index + 1] = table.damage[index]
            continue
        try:
            found.append(_row(index + 1, row))
        except ValueError as error:
            left[index + 1] = str(error)
    if not found:
        raise ReplayError(f"{path} has no row that can be replayed", hint=f"row 1: {left.get(1, '')}")
    return found, left


def _row(number: int, row: Mapping[str, str]) -> Row:
    cell = cells.Cell.of(row)
    speedup = cells.observed(row)
    if speedup is None:
        raise ValueError("neither tps_spec nor speedup is a positive number")
    length = cells.accept_length(row)
    used = length or min(ASSUMED_LENGTH, cell.steps + 1)
    rates_of(used, cell.steps)
    host = (cell.host.source, cell.host.model, cell.host.engine, f"{cell.host.parallel} {row['ctx']}")
    seconds = cell.seconds * used / speedup
    return Row(number, host, cell.concurrency, cell.steps, cell.seconds, seconds, used, length is None)


def cliff(found: list[Row]) -> dict[tuple[int, int], float]:
    """Return the costs of the host whose round gets dearest from one batch to the next: (steps, batch) -> seconds.

    Empty where no host has plain and speculative costs, with as many steps, at four batches.
    """
    hosts: dict[tuple[object, ...], dict[int, Row]] = {}
    for row in found:
        hosts.setdefault((*row.host, row.steps), {})[row.batch] = row
    steep = max((own for own in hosts.values() if len(own) >= 4), key=lambda own: max(_jumps(own)), default={})
    return {
        key: cost
        for batch, row in steep.items()
        for key, cost in (((0, batch), row.plain), ((row.steps, batch), row.round))
    }


def _jumps(own: Mapping[int, Row]) -> Iterator[float]:
    for one, two in pairwise(sorted(own)):
        yield own[two].round / own[one].round
