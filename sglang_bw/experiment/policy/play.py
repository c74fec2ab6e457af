"""Play a trace: launches, rounds that take their time on the device, results that come back late."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from sglang_bw.experiment.policy.arm import Arm, Goodput
from sglang_bw.experiment.policy.trace import Trace, expected_length


class _Flying(NamedTuple):
    steps: int
    batch: int
    accepted: list[int]
    gap: float | None
    ready: float


@dataclass(frozen=True)
class Played:
    """What an arm made of a trace.

    :ivar seconds: expected seconds of its rounds, draft catch-up included.
    :ivar oracle: seconds that the best choice of every moment needs for the same tokens.
    :ivar tokens: expected tokens a request.
    :ivar steps: of every round.
    :ivar switches: (round, new draft steps) of the arm's decisions where it tells them, else of every change.
    """

    seconds: float
    oracle: float
    tokens: float
    steps: tuple[int, ...]
    switches: tuple[tuple[int, int], ...]

    @property
    def regret(self) -> float:
        """Time lost against the oracle, as a share of the oracle's time."""
        return self.seconds / self.oracle - 1

    @property
    def rate(self) -> float:
        """Tokens per second of one request."""
        return self.tokens / self.seconds

    @property
    def settled(self) -> int:
        """The round of the last decision; 0 when it stayed with what it began with."""
        return self.switches[-1][0] if self.switches else 0

    @property
    def decided(self) -> int:
        """The draft steps that it ended with."""
        return self.switches[-1][1] if self.switches else self.steps[0]


def play(trace: Trace, arm: Arm, seed: int = 0) -> Played:
    """Run an arm through a trace.

    The gap that a policy is told is the time between two launches. The scheduler launches round n + 1 once the
    result of round n - ``lag`` is there, so under overlap a gap shows the device time of an earlier round.
    """
    dice = random.Random(f"{trace.name}/{seed}")
    flying: deque[_Flying] = deque()
    launched, free, gap, plain = 0.0, 0.0, None, 0
    done = seconds = oracle = 0.0
    chosen: list[int] = []
    while done < trace.tokens:
        batch, rates = trace.batch(done), trace.rates(done)
        steps = arm.launch(batch, done)
        due = plain > 0 and (steps > 0 or plain == trace.catch_up_tokens)
        catch_up = trace.catch_up if due else 0.0
        length, cost = expected_length(rates, steps), trace.seconds(steps, batch) + catch_up
        free = max(free, launched) + cost * _disturbance(trace, dice)
        flying.append(_Flying(steps, batch, _accepted(trace, dice, rates, steps, batch), gap, free))
        best = trace.best(done)
        oracle += length * trace.seconds(best, batch) / expected_length(rates, best)
        seconds += cost
        done += length
        chosen.append(steps)
        plain = 0 if steps else plain % trace.catch_up_tokens + 1
        now = launched
        while len(flying) > trace.lag:
            result = flying.popleft()
            now = max(now, result.ready)
            arm.observe(result.steps, result.batch, result.accepted, result.gap)
        gap, launched = now - launched or None, now
    return Played(seconds, oracle, done, tuple(chosen), _switches(arm, chosen))


def _switches(arm: Arm, chosen: list[int]) -> tuple[tuple[int, int], ...]:
    if isinstance(arm, Goodput):
        return tuple(arm.switches)
    return tuple((number, two) for number, (one, two) in enumerate(pairwise(chosen), 1) if one != two)


def _disturbance(trace: Trace, dice: random.Random) -> float:
    factor = math.exp(dice.gauss(0, trace.noise))
    return factor * 5 if dice.random() < trace.stalls else factor


def _accepted(trace: Trace, dice: random.Random, rates: tuple[float, ...], steps: int, batch: int) -> list[int]:
    def one() -> int:
        count = 0
        while count < steps and dice.random() < rates[min(count, len(rates) - 1)]:
            count += 1
        return count

    return [one()] * batch if trace.common else [one() for _ in range(batch)]
