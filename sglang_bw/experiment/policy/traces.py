"""Synthetic traces with a known optimum: each is one way in which a policy can go wrong."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence

from sglang_bw.experiment.policy.trace import Rates, Trace, rates_of

# The first system: 89.5 tok/s of plain decoding; a verify pass adds 122 all-reduces of 200 us to such a step. The
# accept length is the one at which that gives the 54.8 tok/s seen there.
FIRST_BASELINE, FIRST_SPECULATING = 89.5, 54.8
_FIRST_PLAIN = 1 / FIRST_BASELINE
_FIRST_ROUND = _FIRST_PLAIN + 122 * 200e-6
FIRST_LENGTH = FIRST_SPECULATING * _FIRST_ROUND

# Milliseconds of a round by draft steps: an H200 at batch 1 and 32 (8B), and the first system with a cheaper k = 1.
H200_1 = {0: 4.7, 1: 5.9, 3: 6.9}
H200_32 = {0: 5.5, 1: 9.0, 3: 11.6}
PCIE = {0: 1e3 * _FIRST_PLAIN, 1: 27.0, 3: 1e3 * _FIRST_ROUND}

_USELESS: Rates = (0.0,)
_GOOD: Rates = (0.8,)
_ALL: Rates = (1.0,)
# Rounds, four plans: where acceptance flips often nobody can know it at once, and the bar is an oracle that is so late.
KNOWN_AFTER = 32


def first_system() -> Trace:
    """Return the case that this project started from: speculation loses 39 %."""
    costs = {0: _FIRST_PLAIN, 3: _FIRST_ROUND}
    return Trace("first system", lambda k, _b: costs[k], _always(rates_of(FIRST_LENGTH, 3)), candidates=(0, 3))


def synthetic(cliff: Mapping[tuple[int, int], float]) -> list[Trace]:
    """Return all traces.

    :param cliff: (draft steps, batch) -> seconds, from a table where the step to 32 verified rows costs a multiple;
        empty for no such trace.
    """
    steep = [_cliff(cliff)] if cliff else []
    return [*_fixed(), *_drifting(), *_flipping(), *steep, *_disturbed(), first_system()]


def _fixed() -> list[Trace]:
    found = []
    for host, costs in (("H200 batch 1", H200_1), ("H200 batch 32", H200_32), ("PCIe", PCIE)):
        for text, rates in (("useless", _USELESS), ("0.3", (0.3,)), ("0.6", (0.6,)), ("good", _GOOD)):
            batch = 32 if costs is H200_32 else 1
            found.append(Trace(f"{host}, draft {text}", _table(costs), _always(rates), batch=_always_batch(batch)))
    falling = (0.85, 0.5, 0.2)
    found.append(Trace("H200 batch 1, acceptance falls by position", _table(H200_1), _always(falling)))
    return found


def _drifting() -> list[Trace]:
    length = 12_000

    def sine(done: float) -> Rates:
        return (round(0.45 + 0.4 * math.sin(2 * math.pi * done / 6000), 2),)

    return [
        Trace("slow drift", _table(H200_1), sine, tokens=length),
        Trace("useless, then good", _table(H200_1), _pieces((6000,), (_USELESS, _GOOD)), tokens=length),
        Trace("good, then useless", _table(H200_1), _pieces((6000,), (_GOOD, _USELESS)), tokens=length),
        Trace("PCIe, useless, then all accepted", _table(PCIE), _pieces((6000,), (_USELESS, (1.0,))), tokens=length),
    ]


def _flipping() -> list[Trace]:
    found = []
    for host, costs, good, period in (
        ("H200", H200_1, _GOOD, 700),
        ("H200", H200_1, _ALL, 700),
        ("H200", H200_1, _ALL, 2000),
        ("PCIe", PCIE, _ALL, 700),
    ):
        ends = [period * number for number in range(1, 12)]
        found.append(
            Trace(
                f"{host}, useless and {good[0]} by turns of {period}",
                _table(costs),
                _pieces(ends, [_USELESS, good] * 6),
                tokens=12 * period,
                known_after=KNOWN_AFTER,
            )
        )
    return found


def _cliff(costs: Mapping[tuple[int, int], float]) -> Trace:
    batches = sorted({batch for _, batch in costs})
    steps = tuple(sorted({steps for steps, _ in costs}))

    def seconds(k: int, batch: int) -> float:
        return costs[k, batches[min(bisect.bisect_left(batches, batch), len(batches) - 1)]]

    walk = (1, 4, 8, 16, 8, 2)
    return Trace(
        "cost cliff at 32 rows",
        seconds,
        _always(rates_of(min(2.6, 1 + 0.8 * max(steps)), max(steps))),
        batch=lambda done: walk[int(done / 700) % len(walk)],
        candidates=steps,
        tokens=700 * len(walk),
    )


def _disturbed() -> list[Trace]:
    costs, rates = _table(H200_1), _always((0.3,))
    return [
        Trace("noise of 15 %, stalls", costs, rates, noise=0.15, stalls=0.01),
        Trace("PCIe, noise of 15 %", _table(PCIE), _always((0.5,)), noise=0.15, stalls=0.01),
        Trace("results two rounds late", costs, _always(_USELESS), lag=2),
        Trace("no overlap", costs, _always(_USELESS), lag=0),
        Trace("equal for all requests", _table(H200_32), _always((0.6,)), batch=_always_batch(32), common=True),
        Trace("table 30 % off", costs, _always((0.6,)), table_error=0.3),
        Trace("no start-up table", costs, _always((0.6,)), table_error=None),
        Trace("the draft is kept up to date", costs, _always(_USELESS), catch_up=0.0005),
    ]


def _table(milliseconds: Mapping[int, float]) -> Callable[[int, int], float]:
    return lambda steps, _batch: milliseconds[steps] * 1e-3


def _always(rates: Rates) -> Callable[[float], Rates]:
    return lambda _done: rates


def _always_batch(batch: int) -> Callable[[float], int]:
    return lambda _done: batch


def _pieces(ends: Sequence[float], values: Sequence[Rates]) -> Callable[[float], Rates]:
    return lambda done: values[bisect.bisect_right(ends, done)]
