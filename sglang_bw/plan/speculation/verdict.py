"""Does speculation pay: one verdict a (context, concurrency) cell.

The speedup of speculative decoding is S = tau / R. tau is the accept length, tokens emitted a round with the bonus
token; R is the time of a round (draft, verify, extend) over the time of a plain decode step at the same batch. So R is
also the break-even accept length. (Leviathan et al., arXiv 2211.17192, in the form that measured batches need.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_bw.plan.speculation.accept import AcceptCurve
    from sglang_bw.plan.speculation.cost import Ratio, RoundCost

# Predictions this close to 1 are not worth a decision: of the cells that were measured, most wrong signs lie here.
UNDECIDED = 0.06
MAX_STEPS = 8
# 80 % of a normal distribution lie within this many standard deviations.
_Z80 = 1.2816


class Verdict(StrEnum):
    """What to expect of speculation in one cell."""

    PAYS = "pays"
    LOSES = "loses"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Interval:
    """An estimate with its 80 % interval."""

    low: float
    mid: float
    high: float

    @classmethod
    def around(cls, mid: float, sigma: float) -> Interval:
        """Return the interval of a quantity whose logarithm has standard deviation ``sigma``."""
        spread = math.exp(_Z80 * sigma)
        return cls(mid / spread, mid, mid * spread)


@dataclass(frozen=True)
class Cell:
    """The verdict at one context and concurrency.

    :ivar context: tokens a request holds.
    :ivar concurrency: requests that decode at once.
    :ivar steps: draft steps a round; the verify pass has ``steps + 1`` tokens a request.
    :ivar accept_length: tau at ``steps``.
    :ivar break_even: R, the accept length above which speculation is faster; ``None`` when its cost is unknown.
    :ivar speedup: tau / R.
    :ivar best_steps: the steps with the largest speedup; 0: do not speculate.
    :ivar best_speedup: the speedup with those.
    :ivar basis: where the cost comes from, e.g. ``measured`` or ``nearest curve``.
    :ivar reason: why a cell is undecided although its speedup is not near 1, why there is none, or what to mend first.
    """

    context: int
    concurrency: int
    steps: int
    accept_length: Interval
    break_even: Interval | None
    speedup: Interval | None
    best_steps: int | None
    best_speedup: float | None
    verdict: Verdict
    basis: str
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**asdict(self), "verdict": str(self.verdict)}


def verdicts(
    accept: AcceptCurve, cost: RoundCost, contexts: Iterable[int], concurrencies: Iterable[int], steps: int = 3
) -> tuple[Cell, ...]:
    """Return a cell for every context and concurrency, contexts first.

    :param steps: draft steps, at least 1.
    """
    widths = tuple(concurrencies)
    return tuple(_cell(accept, cost, context, width, steps) for context in contexts for width in widths)


def judge(speedup: float) -> Verdict:
    """Return the verdict of a speedup: within 6 % of 1 it is undecided."""
    if speedup > 1 + UNDECIDED:
        return Verdict.PAYS
    return Verdict.LOSES if speedup < 1 - UNDECIDED else Verdict.UNDECIDED


def _cell(accept: AcceptCurve, cost: RoundCost, context: int, concurrency: int, steps: int) -> Cell:
    tau = Interval.around(accept.length(steps), accept.sigma)
    found = cost.ratio(context, concurrency, steps)
    if found.ratio is None:
        return Cell(
            context, concurrency, steps, tau, None, None, None, None, Verdict.UNDECIDED, found.basis, found.reason
        )
    ratio = Interval.around(found.ratio, found.sigma)
    speedup = Interval.around(tau.mid / ratio.mid, math.hypot(accept.sigma, found.sigma))
    verdict, reason = _decide(speedup, found)
    best, best_speedup = best_steps(accept, cost, context, concurrency)
    return Cell(context, concurrency, steps, tau, ratio, speedup, best, best_speedup, verdict, found.basis, reason)


def _decide(speedup: Interval, found: Ratio) -> tuple[Verdict, str]:
    verdict = judge(speedup.mid)
    if found.reason:
        return (Verdict.UNDECIDED if verdict is Verdict.PAYS else verdict), found.reason
    if verdict is not Verdict.UNDECIDED and not found.trusted and speedup.low < 1 < speedup.high:
        return Verdict.UNDECIDED, "the cost is that of something similar; its interval reaches 1"
    return verdict, ""


def best_steps(accept: AcceptCurve, cost: RoundCost, context: int, concurrency: int) -> tuple[int, float]:
    """Return the draft steps with the largest speedup, the fewest of equals, and it; 0 and 1 when none pays.

    Of the steps that follow the first, k pays while its marginal survival A_k exceeds the time it adds in units of
    R / tau, which is the same as S(k) > S(k - 1). The first one carries what every round costs, however many drafts it
    has, and may lose where three pay. Steps whose cost nobody knows, such as those that a probe left out, are passed
    over.
    """
    best, best_speedup = 0, 1.0
    for steps in range(1, MAX_STEPS + 1):
        found = cost.ratio(context, concurrency, steps)
        if found.ratio is not None and (speedup := accept.length(steps) / found.ratio) > best_speedup:
            best, best_speedup = steps, speedup
    return best, best_speedup
