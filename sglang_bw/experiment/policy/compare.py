"""Our policy beside upstream's, fixed step counts and the oracle, on one trace."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from sglang_bw.experiment.policy.arm import Fixed, Goodput, Late, Stock
from sglang_bw.experiment.policy.engine import Policies
from sglang_bw.experiment.policy.play import Played, play
from sglang_bw.experiment.policy.trace import Trace

MOST_REGRET = 0.03
LEAST_SHARE = 0.97


@dataclass(frozen=True)
class Comparison:
    """One trace.

    :ivar ours: by seed.
    :ivar late: of the oracle that knows of a change ``trace.known_after`` rounds late.
    :ivar fixed: by draft steps; no seed, as they see nothing.
    """

    trace: Trace
    ours: tuple[Played, ...]
    stock: tuple[Played, ...]
    fixed: dict[int, Played]
    late: Played

    @property
    def best_fixed(self) -> int:
        """The draft steps that win when nothing may change."""
        return max(self.fixed, key=lambda steps: self.fixed[steps].rate)

    @property
    def regret(self) -> float:
        """Time lost by ours against the oracle: the mean of the seeds."""
        return statistics.fmean(played.regret for played in self.ours)

    @property
    def stock_regret(self) -> float:
        """The same of upstream's policy."""
        return statistics.fmean(played.regret for played in self.stock)

    @property
    def held(self) -> float:
        """Time lost by ours against the oracle that it is held to, which may be one that learns of changes late."""
        if not self.trace.known_after:
            return self.regret
        return self.late.rate / statistics.fmean(played.rate for played in self.ours) - 1

    @property
    def share(self) -> float:
        """Speed of ours over that of the best fixed choice."""
        return statistics.fmean(played.rate for played in self.ours) / self.fixed[self.best_fixed].rate

    @property
    def misses(self) -> str:
        """Which bar is missed, or an empty string."""
        if self.held > MOST_REGRET:
            return f"{self.trace.name}: {100 * self.held:.1f} % slower than the oracle"
        if self.share < LEAST_SHARE:
            return f"{self.trace.name}: {self.share:.3f} of the best fixed choice, {self.best_fixed} steps"
        return ""

    @property
    def stock_share(self) -> float:
        """The same of upstream's policy."""
        return statistics.fmean(played.rate for played in self.stock) / self.fixed[self.best_fixed].rate

    def as_json(self) -> dict[str, Any]:
        """Return the numbers."""
        return {
            "trace": self.trace.name,
            "regret": round(self.regret, 5),
            "stock_regret": round(self.stock_regret, 5),
            "late_regret": round(self.late.regret, 5),
            "held": round(self.held, 5),
            "fixed_regret": {str(steps): round(played.regret, 5) for steps, played in self.fixed.items()},
            "best_fixed": self.best_fixed,
            "share_of_best_fixed": round(self.share, 5),
            "stock_share_of_best_fixed": round(self.stock_share, 5),
            "decided": [played.decided for played in self.ours],
            "settled": [played.settled for played in self.ours],
            "switches": [len(played.switches) for played in self.ours],
            "stock_switches": [len(played.switches) for played in self.stock],
        }


def compare(policies: Policies, trace: Trace, seeds: int = 3) -> Comparison:
    """Play a trace with every arm."""
    return Comparison(
        trace,
        tuple(play(trace, Goodput(policies, trace, seed), seed) for seed in range(seeds)),
        tuple(play(trace, Stock(policies, trace), seed) for seed in range(seeds)),
        {steps: play(trace, Fixed(steps)) for steps in trace.candidates},
        play(trace, Late(trace)),
    )
