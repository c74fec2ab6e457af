"""Who decides the draft steps of the next round: the engine's policies, one fixed number, or an oracle."""

from __future__ import annotations

import json
import random
import tempfile
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from sglang_bw.experiment.policy.engine import Policies
from sglang_bw.experiment.policy.trace import Trace

# Batch sizes that have CUDA graphs of their own, and so a row in the start-up table.
CAPTURED = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


class Arm(Protocol):
    """Decides at every launch, and learns from results that arrive in launch order."""

    def launch(self, batch: int, done: float) -> int:
        """Return the draft steps of a round that is launched now, ``done`` tokens into the trace."""

    def observe(self, steps: int, batch: int, accepted: list[int], gap: float | None) -> None:
        """Take in a finished round: accepted drafts a request, seconds from the launch before it to its own."""


class Fixed:
    """Always the same number of draft steps; 0 is a server without speculation."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def launch(self, _batch: int, _done: float) -> int:
        """Return the number."""
        return self.steps

    def observe(self, _steps: int, _batch: int, _accepted: list[int], _gap: float | None) -> None:
        """Learn nothing."""


class Late:
    """An oracle that looks back: it knows the costs and, some rounds late, the acceptance."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._past: deque[float] = deque(maxlen=trace.known_after + 1)

    def launch(self, batch: int, done: float) -> int:
        """Choose what would have been best for this batch then."""
        self._past.append(done)
        then, trace = self._past[0], self._trace
        return max(trace.candidates, key=lambda steps: trace.length(steps, then) / trace.seconds(steps, batch))

    def observe(self, _steps: int, _batch: int, _accepted: list[int], _gap: float | None) -> None:
        """Learn nothing."""


class Stock:
    """Upstream's ``--speculative-adaptive``, with the trace's candidates at every batch size."""

    def __init__(self, policies: Policies, trace: Trace) -> None:
        config = {"1": {"candidate_steps": list(trace.candidates)}}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "adaptive.json"
            path.write_text(json.dumps(config))
            self.params = policies.stock.AdaptiveSpeculativeParams(initial_steps=trace.initial, cfg_path=str(path))

    def launch(self, batch: int, _done: float) -> int:
        """Ask it as the worker does."""
        return int(self.params.get_steps_for_batch(batch))

    def observe(self, steps: int, batch: int, accepted: list[int], gap: float | None) -> None:
        """Tell it through whichever of its two seams the engine has."""
        if hasattr(self.params, "on_verify_complete"):
            self.params.on_verify_complete(accepted, batch)
            return
        done = SimpleNamespace(num_steps=steps, batch_size=batch, num_correct_drafts_per_req=accepted, launch_gap_s=gap)
        self.params.on_round(done)


class Goodput:
    """``--speculative-adaptive-policy goodput``: on one rank, which makes the plans and follows them.

    :ivar policy: the engine's object.
    :ivar switches: (round, new draft steps) of every decision; probes are none.
    """

    def __init__(self, policies: Policies, trace: Trace, seed: int) -> None:
        self._modules = policies
        costs = _start_up_table(policies, trace, seed)
        keeps: dict[str, Any] = {}
        if trace.catch_up:
            keeps["catch_up"] = dict.fromkeys(CAPTURED, trace.catch_up)
            keeps["catch_up_tokens"] = trace.catch_up_tokens
        self.policy: Any = policies.policy.GoodputPolicy({1: trace.candidates}, trace.initial, costs=costs, **keeps)
        self.switches: list[tuple[int, int]] = []
        self._launches = 0

    def launch(self, batch: int, _done: float) -> int:
        """Count a launch."""
        self._launches += 1
        return int(self.policy.launch(batch))

    def observe(self, steps: int, batch: int, accepted: list[int], gap: float | None) -> None:
        """Learn, and make a plan when one is due, over the wire as ranks do."""
        module = self._modules.policy
        self.policy.observe(module.Round(steps, batch, accepted, gap))
        if self.policy.plan_due:
            plan = module.Plan.decode(self.policy.make_plan().encode())
            if self.policy.adopt(plan):
                self.switches.append((self._launches, plan.steps))


def _start_up_table(policies: Policies, trace: Trace, seed: int) -> Any:
    if trace.table_error is None:
        return None
    dice = random.Random(f"table/{trace.name}/{seed}")
    # Measured on an idle engine at no context: all of it is too low, and each cell is a little off.
    return policies.cost.CostTable(
        {
            (steps, size): 0.8 * trace.seconds(steps, size) * (1 + dice.uniform(-1, 1) * trace.table_error)
            for steps in trace.candidates
            for size in CAPTURED
        }
    )
