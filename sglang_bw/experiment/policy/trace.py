"""What a run of a server is made of, for a policy: cost of rounds, acceptance and batch, by tokens produced."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

Rates = tuple[float, ...]
"""Conditional acceptance of position 1, 2, ...; the last one holds for all further positions."""


@dataclass(frozen=True)
class Trace:
    """One run.

    :ivar candidates: draft steps that a policy may choose from; 0 is plain decoding.
    :ivar seconds: (draft steps, batch) -> expected seconds of a round.
    :ivar rates: tokens that each request has got so far -> acceptance there.
    :ivar batch: the same -> requests.
    :ivar tokens: length of the run, in tokens a request.
    :ivar noise: standard deviation of the logarithm of a round's time.
    :ivar stalls: share of rounds that take five times as long.
    :ivar lag: rounds that are launched before a round's result is known; 1 under the overlap scheduler.
    :ivar common: whether all requests of a round accept equally many, as under simulated acceptance.
    :ivar catch_up: seconds of bringing the draft up to date, paid on leaving plain decoding.
    :ivar catch_up_tokens: plain decode steps after which it is paid as well.
    :ivar known_after: rounds after which the oracle that the policy is held to knows of a change; 0 is at once.
    :ivar table_error: relative error of the start-up table; ``None`` for an engine that measures nothing at start-up.
    """

    name: str
    seconds: Callable[[int, int], float]
    rates: Callable[[float], Rates]
    batch: Callable[[float], int] = lambda _done: 1
    candidates: tuple[int, ...] = (0, 1, 3)
    initial: int = 3
    tokens: int = 4000
    noise: float = 0.02
    stalls: float = 0.001
    lag: int = 1
    common: bool = False
    catch_up: float = 0.0
    catch_up_tokens: int = 16
    table_error: float | None = 0.05
    known_after: int = 0

    def length(self, steps: int, done: float) -> float:
        """Return the expected accept length of a round, bonus token included."""
        return expected_length(self.rates(done), steps)

    def best(self, done: float) -> int:
        """Return the draft steps with the most tokens per second: what an oracle that knows all chooses."""
        batch = self.batch(done)
        return max(self.candidates, key=lambda steps: self.length(steps, done) / self.seconds(steps, batch))


@lru_cache(maxsize=4096)
def expected_length(rates: Rates, steps: int) -> float:
    """Return 1 + a1 + a1 a2 + ... for ``steps`` positions."""
    total = survival = 1.0
    for position in range(steps):
        survival *= rates[min(position, len(rates) - 1)]
        total += survival
    return total


def rates_of(length: float, steps: int) -> Rates:
    """Return one rate for all positions that gives an accept length at ``steps`` draft steps.

    :raises ValueError: no rate does.
    """
    if not (1 <= length <= steps + 1 and math.isfinite(length)):
        raise ValueError(f"an accept length of {length:g} is impossible with {steps} draft steps")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_length((middle,), steps) < length else (low, middle)
    return (high,)
