"""Time of a plain decode step by context and rows, from a few measured points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from sglang_bw.errors import SpeculationInputError

# Log-slope of a step's time per row where nothing better is known.
_SLOPE = 0.33
# Two measured batches further apart than this are bridged with the shape of a known curve, not a straight line.
_WIDE = 4.0
# Attention counts when it takes at least this share of a step.
_VISIBLE = 0.05
_OFFSETS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0, 50.0)

# The basis of a time that was lent by another host's curve.
NEAREST = "nearest curve"
# A step of twice the rows never costs more than twice, unless another kernel or tile takes over.
_CLIFF = 0.95

Points = Mapping[tuple[int, int], float]


@dataclass(frozen=True)
class Step:
    """Time of a plain decode step.

    :ivar seconds: of the whole step.
    :ivar attention: the part of it that grows with the context.
    :ivar basis: ``measured``, ``interpolated``, ``extrapolated`` or ``NEAREST``.
    """

    seconds: float
    attention: float
    basis: str


@dataclass(frozen=True)
class StepCurve:
    """Seconds of a plain decode step as base(rows) + attention(rows, context).

    The base is the shortest context that was measured. Attention is taken as proportional to ``rows + offset``: a few
    requests leave the GPU partly idle, so the first rows cost little. The offset is found from the points themselves.

    :ivar points: (context, rows) -> seconds.
    :ivar like: the curve whose shape fills gaps: usually another host with the same model.
    """

    points: Points
    like: StepCurve | None = None
    base: tuple[tuple[int, float], ...] = field(init=False)
    offset: float = field(init=False)

    def __post_init__(self) -> None:
        if not self.points:
            raise SpeculationInputError("no plain decode point to start from")
        if not all(rows > 0 and math.isfinite(seconds) and seconds > 0 for (_, rows), seconds in self.points.items()):
            raise SpeculationInputError("a plain decode point is not a positive number")
        object.__setattr__(self, "base", self._column(self.shortest))
        object.__setattr__(self, "offset", self._fit_offset())

    @property
    def shortest(self) -> int:
        """The shortest context measured."""
        return min(context for context, _ in self.points)

    def at(self, context: int, rows: int) -> Step:
        """Return the step of ``rows`` rows whose requests hold ``context`` tokens each."""
        base = self._base(rows)
        if context <= self.shortest:
            return Step(base.seconds, 0.0, base.basis)
        if (measured := self._within(context, rows)) is not None:
            return Step(measured.seconds, max(measured.seconds - base.seconds, 0.0), measured.basis)
        attention = self._attention(context, rows)
        return Step(base.seconds + attention, attention, _worse(base.basis, "extrapolated"))

    def cliff(self, few: int, many: int) -> int | None:
        """Return the rows at which a step suddenly costs about as much more as it has more rows, within a range."""
        for (below, cheap), (above, dear) in pairwise(self.base):
            if few < above <= many and dear / cheap >= _CLIFF * above / below:
                return above
        return None

    def _column(self, context: int) -> tuple[tuple[int, float], ...]:
        return tuple(sorted((rows, seconds) for (at, rows), seconds in self.points.items() if at == context))

    def _base(self, rows: float) -> Step:
        return _along(self.base, rows, self.like)

    def _within(self, context: int, rows: int) -> Step | None:
        column = self._column(context)
        if not column or not column[0][0] <= rows <= column[-1][0]:
            return None
        return _along(column, rows, None)

    def _attention(self, context: int, rows: int) -> float:
        """Scale the attention that was measured at the nearest context, from the batch nearest to ``rows``."""
        longer = [at for at, _ in self.points if at > self.shortest]
        if not longer:
            return self.like.at(context, rows).attention if self.like else 0.0
        nearest = min(longer, key=lambda at: abs(math.log(at / context)))
        column = self._column(nearest)
        measured, seconds = column[-1] if rows > column[-1][0] else column[0]
        if column[0][0] <= rows <= column[-1][0]:
            measured, seconds = rows, _along(column, rows, None).seconds
        attention = max(seconds - self._base(measured).seconds, 0.0) * context / nearest
        return attention * (rows + self.offset) / (measured + self.offset)

    def _fit_offset(self) -> float:
        pairs = list(self._attention_pairs())
        if len(pairs) < 2:
            return self.like.offset if self.like else 1.0
        return min(_OFFSETS, key=lambda offset: sum(_misfit(pair, offset) for pair in pairs))

    def _attention_pairs(self) -> Iterable[tuple[tuple[int, float], tuple[int, float]]]:
        """Yield the attention at c and 4c rows of one context, wherever both were measured."""
        attention = {
            (context, rows): seconds - self._base(rows).seconds
            for (context, rows), seconds in self.points.items()
            if context > self.shortest and seconds - self._base(rows).seconds > _VISIBLE * seconds
        }
        for (context, rows), few in attention.items():
            if (many := attention.get((context, 4 * rows))) is not None:
                yield (rows, few), (4 * rows, many)


@dataclass(frozen=True)
class Roofline(StepCurve):
    """A dense model of which only one point is known: flat until the weights' reading is hidden by arithmetic.

    ``knee`` is the number of rows at which arithmetic costs as much as reading the weights: FLOP/s over bytes/s times
    bytes per weight over two, 100 to 300 on current GPUs.
    """

    knee: float = 200.0

    def _base(self, rows: float) -> Step:
        measured, seconds = self.base[-1]
        grown = seconds * (1 + rows / self.knee) / (1 + measured / self.knee)
        return Step(grown, 0.0, "measured" if rows == measured else NEAREST)


def _misfit(pair: tuple[tuple[int, float], tuple[int, float]], offset: float) -> float:
    (few, cheap), (many, dear) = pair
    return abs(math.log(dear / cheap) - math.log((many + offset) / (few + offset)))


def _along(column: tuple[tuple[int, float], ...], rows: float, like: StepCurve | None) -> Step:
    """Return the time at ``rows`` from sorted points: straight in log-log, outside with the shape of ``like``."""
    (first, first_seconds), (last, last_seconds) = column[0], column[-1]
    if rows < first:
        shrunk = like._base(rows).seconds / like._base(first).seconds if like else (rows / first) ** _SLOPE
        return Step(first_seconds * shrunk, 0.0, NEAREST if like else "extrapolated")
    for known, seconds in column:
        if known == rows:
            return Step(seconds, 0.0, "measured")
    for (few, cheap), (many, dear) in pairwise(column):
        if few < rows < many:
            return _between((few, cheap), (many, dear), rows, like)
    if like and like.base[-1][0] >= 2 * last:
        return Step(last_seconds * like._base(rows).seconds / like._base(last).seconds, 0.0, NEAREST)
    return Step(_beyond(column, rows), 0.0, "extrapolated")


def _between(few: tuple[int, float], many: tuple[int, float], rows: float, like: StepCurve | None) -> Step:
    weight = math.log(rows / few[0]) / math.log(many[0] / few[0])
    if like and many[0] / few[0] > _WIDE and like.base[-1][0] >= many[0]:
        start, end = like._base(few[0]).seconds, like._base(many[0]).seconds
        if end != start:
            weight = math.log(like._base(rows).seconds / start) / math.log(end / start)
            return Step(few[1] * (many[1] / few[1]) ** weight, 0.0, NEAREST)
    return Step(few[1] * (many[1] / few[1]) ** weight, 0.0, "interpolated")


def _beyond(column: tuple[tuple[int, float], ...], rows: float) -> float:
    """Go on past the last point, halfway (in log) between a power law and the tangent, with the last smooth slope.

    A segment that grows nearly as fast as its rows is a cliff (another kernel, another tile), not a slope.
    """
    last, seconds = column[-1]
    slope = _SLOPE
    for (few, cheap), (many, dear) in reversed(list(pairwise(column))):
        if dear / cheap < _CLIFF * many / few:
            slope = max(math.log(dear / cheap) / math.log(many / few), 0.0)
            break
    times = rows / last
    return seconds * math.sqrt(times**slope * (1 + slope * (times - 1)))


_BASES = ("measured", "interpolated", "extrapolated", NEAREST)


def _worse(one: str, other: str) -> str:
    return max(one, other, key=_BASES.index)
