"""Arms measured in turn, round by round, until one of them is decided against the best of the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from .servers import Record
from .speed import Block

Round = dict[str, Block]
"""What each arm that ran did in one round."""

BAR = 0.97
"""Least ratio to the best other arm, DESIGN's rule for the policy."""

CONTENDER = 0.9
"""An arm that reaches less of the best other's median is taken to be beaten, and measured no more."""


def measure(
    run: Callable[[str], Block], arms: Sequence[str], own: str, *, least: int, most: int, within: float
) -> list[Round]:
    """Run every arm once a round, the order reversed in every other round.

    After ``least`` rounds only ``own`` and its contenders run, until the interval of the ratio was narrow enough twice
    in a row or ``most`` rounds were run. Once would be too few: an interval that is narrow by chance would end it.

    :param run: measures one block of an arm.
    :param within: half-width of the interval, relative, at which it ends.
    """
    found: list[Round] = []
    racing = list(arms)
    narrow = 0
    while len(found) < most:
        found.append({name: run(name) for name in racing[:: 1 if len(found) % 2 == 0 else -1]})
        if len(found) < least:
            continue
        width = judge(found, own)["half_width"]
        narrow = narrow + 1 if width is not None and width <= within else 0
        if narrow == 2:
            break
        medians = _medians(found)
        bar = CONTENDER * max(medians[name] for name in arms if name != own)
        racing = [name for name in racing if name == own or medians[name] >= bar]
    return found


def judge(found: Sequence[Round], own: str, within: float = 0.02) -> Record:
    """Compare ``own`` with the best other arm, the one with the highest median.

    The verdict: ``undecided`` where the interval's half-width is above ``within``, else ``passes`` where it reaches
    :data:`BAR`, else ``fails``.

    ``ratio`` is the median over the rounds in which both ran: a block may meet something that has nothing to do with
    either arm. ``interval`` is the median's, 95 %, by order statistics (nothing is assumed of the distribution; it
    takes six rounds to exist). ``pooled`` is the ratio of all tokens over all seconds in the same rounds, where such a
    block, and what an arm itself does now and then, counts in full.
    """
    medians = _medians(found)
    best = max((name for name in medians if name != own), key=lambda name: medians[name])
    both = [(row[own][0], row[best][0]) for row in found if own in row and best in row]
    ratios = [one / other for one, other in both]
    ends = interval(ratios)
    width = (ends[1] - ends[0]) / 2 if ends else math.inf
    return {
        "verdict": "undecided" if not ends or width > within else "passes" if ends[1] >= BAR else "fails",
        "arms": {
            name: {
                "tokens_per_second": round(median, 1),
                "blocks": [round(row[name][0], 1) if name in row else None for row in found],
                "accept_length": round(statistics.fmean(row[name][1] for row in found if name in row), 2),
            }
            for name, median in medians.items()
        },
        "best": best,
        "ratio": round(statistics.median(ratios), 4),
        "interval": [round(end, 4) for end in ends] if ends else None,
        "half_width": round(width, 4) if ends else None,
        "pooled": round(sum(1 / other for _, other in both) / sum(1 / one for one, _ in both), 4),
    }


def ratio(found: Sequence[Round], name: str, others: Sequence[str]) -> float:
    """Return the median ratio of an arm to that of some others which has the highest median."""
    medians = _medians(found)
    best = max(others, key=lambda other: medians[other])
    return round(statistics.median(row[name][0] / row[best][0] for row in found if name in row and best in row), 4)


def interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the median; below six values there is none."""
    from scipy import stats

    found = stats.quantile_test(list(ratios), q=1.0, p=0.5).confidence_interval(0.95)
    low, high = float(found.low), float(found.high)
    return None if math.isnan(low) or math.isnan(high) else (low, high)


def _medians(found: Sequence[Round]) -> dict[str, float]:
    names = dict.fromkeys(name for row in found for name in row)
    return {name: statistics.median(row[name][0] for row in found if name in row) for name in names}
