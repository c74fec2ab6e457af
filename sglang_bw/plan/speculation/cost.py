"""What a round of speculation costs, in plain decode steps: R."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Ratio:
    """The cost of a round over that of a plain decode step, or the reason why it is unknown.

    :ivar ratio: R, ``None`` when unknown.
    :ivar sigma: standard deviation of its logarithm.
    :ivar basis: where it comes from.
    :ivar reason: why there is no ratio, or why ``pays`` must not be said whatever it is.
    :ivar here: it rests on measurements of this host.
    """

    ratio: float | None
    sigma: float
    basis: str
    reason: str = ""
    here: bool = True


class RoundCost(Protocol):
    """Anything that knows R."""

    def ratio(self, context: int, concurrency: int, steps: int) -> Ratio:
        """Return R at ``context`` tokens a request, ``concurrency`` requests and ``steps`` draft steps."""
        ...
