"""What a speculative round has cost on this host: from comparisons in the ledger."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from sglang_bw.ledger.record import ArmRecord, RunRecord


@dataclass(frozen=True)
class RoundCost:
    """Cost of a speculative round over a plain decode step, by requests at once.

    :ivar points: (requests at once, cost), the fewest requests first.
    :ivar run: id of the comparison.
    """

    points: tuple[tuple[int, float], ...]
    run: str

    def at(self, running: float) -> float:
        """Return the cost at a number of requests; between two measured ones by the logarithm, never beyond them."""
        first, last = self.points[0], self.points[-1]
        if running <= first[0]:
            return first[1]
        for (low, cost), (high, other) in zip(self.points, self.points[1:], strict=False):
            if running <= high:
                share = math.log(running / low) / math.log(high / low)
                return cost + share * (other - cost)
        return last[1]


def newest(runs: Iterable[RunRecord], *, model: str, steps: int | None, host: str) -> RoundCost | None:
    """Return the cost from the newest valid comparison of this model with and without speculation on this host.

    :param model: path or served name.
    :param steps: draft steps of the speculative arm; ``None`` for any.
    """
    found: RoundCost | None = None
    for run in runs:
        if run.host.fingerprint != host or run.outcome is None or not run.outcome.valid:
            continue
        if not any(arm.speculation and _serves(arm, model, steps) for arm in run.arms):
            continue
        points = sorted((one.concurrency, one.round_cost) for one in run.outcome.ratios if one.round_cost is not None)
        if points:
            found = RoundCost(tuple(points), run.id)
    return found


def _serves(arm: ArmRecord, model: str, steps: int | None) -> bool:
    names = {str(arm.config.get("model_path")), str(arm.config.get("served_model_name"))}
    return model in names and (steps is None or arm.config.get("speculative_num_steps") in (None, steps))
