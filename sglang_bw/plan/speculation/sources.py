"""Where tau and R come from for a launch that nobody has measured yet, in the order in which they are believed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sglang_bw.errors import SpeculationInputError
from sglang_bw.plan.speculation import nearest
from sglang_bw.plan.speculation.accept import AcceptCurve, draft_kind, expected, golden
from sglang_bw.plan.speculation.allreduce import AllReduce, AllReduceCost
from sglang_bw.plan.speculation.cost import CurveCost, RoundCost
from sglang_bw.plan.speculation.curve import Roofline, StepCurve
from sglang_bw.plan.speculation.nearest import Host

EVIDENCE = "recipe evidence"
_EVIDENCE_SIGMA = 0.08


def accept_curve(
    model: str, draft: str = "", *, measured: Mapping[int, float] | None = None, source: str = EVIDENCE
) -> AcceptCurve:
    """Return the accept lengths to plan with.

    ``measured`` (draft steps -> accept length on served traffic, e.g. the recipe's evidence) is believed first, then
    the golden curve of the model and kind of draft, turned from a benchmark into mixed traffic. A model card's numbers
    come from benchmarks and are no ``measured``: served traffic of the drafts they describe accepts less. For a log of
    one's own see :func:`~sglang_bw.plan.speculation.served.accept_curve`.

    :param draft: model id of a separate draft; empty for one inside the target (MTP).

    :raises SpeculationInputError: when a measured length is impossible.
    """
    kind = draft_kind(draft or "mtp")
    shape = golden(kind, model)
    if measured:
        steps = max(measured)
        return shape.through(steps, measured[steps], sigma=_EVIDENCE_SIGMA, source=source)
    return expected(kind, model)


def round_cost(
    host: Host, speeds: Mapping[tuple[int, int], float] | None = None, reduce: AllReduce | None = None
) -> RoundCost:
    """Return what a round costs on a host.

    A result of ``probe round`` is better than any of this, see :mod:`~sglang_bw.plan.speculation.probe`.

    :param host: model, engine (its words, e.g. ``sglang moe=flashinfer_cutlass``) and split, e.g. ``TP8``.
    :param speeds: plain decoding on it: (context in tokens, concurrency) -> tokens per second of all requests.
    :param reduce: its all-reduces.
    :raises SpeculationInputError: when a speed is not a positive number.
    """
    cost = _measured(host, speeds) if speeds else _borrowed(host)
    return AllReduceCost(cost, reduce) if reduce else cost


def _measured(host: Host, speeds: Mapping[tuple[int, int], float]) -> CurveCost:
    if not all(concurrency > 0 and 0 < speed < math.inf for (_, concurrency), speed in speeds.items()):
        raise SpeculationInputError("a plain decode speed is not a positive number of tokens per second")
    points = {(context, requests): requests / speed for (context, requests), speed in speeds.items()}
    return CurveCost(nearest.curve(host, points), host.engine)


def _borrowed(host: Host) -> CurveCost:
    """Return the cost of the nearest host in the table; only one with the same model, split and board is trusted."""
    found = nearest.most_like(host)
    same = found is not None and nearest.alike(found[0].model, host.model)
    if found is None or (not same and nearest.experts(host.model) is None):
        return CurveCost(Roofline({(0, 1): 1.0}), host.engine, "a dense model by its roofline", trusted=False)
    other, points = found
    trusted = same and nearest.same_split(host, other) and nearest.same_machine(host, other)
    origin = f"{other.model} {other.parallel} on {other.machine} ({other.source})"
    return CurveCost(StepCurve(points), other.engine, origin, trusted)
