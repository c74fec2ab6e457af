"""Does speculation pay, and where: S = tau / R.

``sources`` finds tau and R for a launch, ``verdict`` decides a cell; ``accept``, ``served`` know tau, ``cost``,
``probe`` and ``allreduce`` know R.
"""

from __future__ import annotations

from sglang_bw.plan.speculation.nearest import Host
from sglang_bw.plan.speculation.sources import accept_curve, round_cost
from sglang_bw.plan.speculation.verdict import Cell, Interval, Verdict, verdicts

__all__ = ["Cell", "Host", "Interval", "Verdict", "accept_curve", "round_cost", "verdicts"]
