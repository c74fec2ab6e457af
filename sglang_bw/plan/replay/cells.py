"""Rows in the form of speculation_cells.csv: one (context, concurrency) cell of a host, with and without speculation.

Inputs are what is known before speculation is tried: source, model, engine, parallel, ctx, conc, tps_nospec, k. The
plain decode points of all rows of one host make its decode curve. Speeds with speculation, and accept rate and length,
which come from the same runs, are answers.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_bw.plan.replay.result import Prediction
from sglang_bw.plan.speculation import nearest
from sglang_bw.plan.speculation.accept import AcceptCurve, draft_kind, expected
from sglang_bw.plan.speculation.cost import Parts, attention_share, parts
from sglang_bw.plan.speculation.nearest import Curves, Host
from sglang_bw.plan.speculation.tables import Parameters, parameters
from sglang_bw.plan.speculation.verdict import Interval

Row = Mapping[str, str]
_STEPS = 3
_MOST_STEPS = 64
# The first number, or that of a range, with its unit: 16k, 8k/1k, 118-230k.
_CONTEXT = re.compile(r"(\d+(?:\.\d+)?)(?:\s*-\s*\d+(?:\.\d+)?)?\s*([km]?)", re.IGNORECASE)


@dataclass(frozen=True)
class Cell:
    """The inputs of one row.

    :ivar context: tokens.
    :ivar seconds: of a plain decode step.
    """

    host: Host
    context: int
    concurrency: int
    seconds: float
    steps: int
    kind: str

    @classmethod
    def of(cls, row: Row) -> Cell:
        """Read a row.

        :raises ValueError: when an input is missing or is not a positive number.
        """
        host = Host(row["model"], row["engine"], row.get("parallel", ""), row.get("source", ""))
        concurrency, speed = positive(row["conc"]), positive(row["tps_nospec"])
        if concurrency is None or concurrency < 1 or speed is None:
            raise ValueError("conc must be at least 1 and tps_nospec a positive number")
        kind = draft_kind(host.model, host.engine, row.get("note", ""))
        return cls(host, tokens(row["ctx"]), round(concurrency), concurrency / speed, _steps(row.get("k", "")), kind)

    def accept(self, fitted: Parameters) -> AcceptCurve:
        """Return the accept lengths to expect of its draft."""
        return expected(self.kind, self.host.model, fitted.traffic[self.kind])


def predict(rows: Sequence[Row], *, accept_length_given: bool = False) -> list[Prediction]:
    """Predict the speedup of every row."""
    cells: dict[int, Cell] = {}
    reasons = {}
    for number, row in enumerate(rows):
        try:
            cells[number] = Cell.of(row)
        except ValueError as error:
            reasons[number] = str(error)
    rounds = dict(zip(cells, costs(list(cells.values())), strict=True))
    return [
        _predict(row, cells[number], rounds[number], accept_length_given)
        if number in cells
        else Prediction(None, observed(row), reason=reasons[number])
        for number, row in enumerate(rows)
    ]


def costs(cells: Sequence[Cell], known: Curves | None = None) -> list[Parts]:
    """Return what a round is made of in every cell, from the plain decode points of all cells.

    :param known: decode curves of other hosts; those that ship with the tool when left out.
    """
    measured: defaultdict[Host, defaultdict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        measured[cell.host][cell.context, cell.concurrency].append(cell.seconds)
    points = {host: {at: sum(seconds) / len(seconds) for at, seconds in own.items()} for host, own in measured.items()}
    pool = {**(nearest.known_curves() if known is None else known), **points}
    curves = {host: nearest.curve(host, own, pool) for host, own in points.items()}
    return [parts(curves[cell.host], cell.context, cell.concurrency, cell.steps) for cell in cells]


def observed(row: Row) -> float | None:
    """Return the speedup that was measured: an answer, for the comparison only."""
    if (speedup := positive(row.get("speedup"))) is not None:
        return speedup
    after, before = positive(row.get("tps_spec")), positive(row.get("tps_nospec"))
    return after / before if after is not None and before is not None else None


def accept_length(row: Row) -> float | None:
    """Return the accept length in a row, under whatever header."""
    for name, value in row.items():
        if name.startswith("accept_len"):
            return positive(value)
    return None


def positive(text: str | None) -> float | None:
    """Return a positive finite number, or ``None``; ``1,497.3`` is one."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def tokens(text: str) -> int:
    """Return a context in tokens: ``16k``, ``0``, the first number of a longer label; 0 for a label without one.

    :raises ValueError: when it is negative.
    """
    if text.lstrip().startswith("-"):
        raise ValueError("ctx must be a number of tokens, e.g. 16k")
    if (found := _CONTEXT.search(text)) is None:
        return 0
    return round(float(found[1]) * {"": 1, "k": 1_000, "m": 1_000_000}[found[2].lower()])


def _steps(text: str) -> int:
    """Return the draft steps of ``3`` or ``3/1/4``; three, the usual number, when nothing is said.

    :raises ValueError: when there is no sensible number.
    """
    if not text.strip():
        return _STEPS
    found = re.match(r"\D*(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= _MOST_STEPS or text.lstrip().startswith("-"):
        raise ValueError("k must be a number of draft steps")
    return int(found[1])


def _predict(row: Row, cell: Cell, cost: Parts, accept_length_given: bool) -> Prediction:
    fitted = parameters()
    ratio = cost.ratio(fitted.draft_step, attention_share(cell.host.engine, fitted))
    given = accept_length(row) if accept_length_given else None
    tau = given if given is not None else cell.accept(fitted).length(cell.steps)
    return Prediction(
        predicted=tau / ratio,
        observed=observed(row),
        interval=Interval.around(tau / ratio, fitted.sigma[cost.basis]),
        accept_length=tau,
        break_even=ratio,
        basis=cost.basis,
    )
