"""The measured decode curve that is most like a host, where the host's own points end."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from sglang_bw.host import boards
from sglang_bw.plan.speculation.accept import family
from sglang_bw.plan.speculation.curve import Points, Roofline, StepCurve
from sglang_bw.plan.speculation.tables import table

# A curve that is to lend its shape needs this many batches.
_ENOUGH = 4
# What a difference counts against the root mean square of log times, the measure of the shapes' distance.
_OTHER_FAMILY, _OTHER_PARALLEL, _OTHER_ENGINE, _OTHER_SOURCE, _NO_FURTHER = 0.3, 0.15, 0.05, 0.05, 0.02
_NOTHING_SHARED = 0.5
_FABRICS = {"pcie": "PCIe", "nvlink": "NVLink"}
_WORD = re.compile(r"[a-z0-9]+")
_ACTIVE = re.compile(r"[-_ ]A\d+(\.\d+)?B\b", re.IGNORECASE)


@dataclass(frozen=True)
class Host:
    """What a decode curve was measured on, in the words of its source.

    :ivar board: empty where it is not known; two hosts that differ in nothing else are one.
    :ivar fabric: how its GPUs are joined; empty with one of them.
    """

    model: str
    engine: str
    parallel: str = ""
    source: str = ""
    board: str = field(default="", compare=False)
    fabric: str = field(default="", compare=False)

    @property
    def machine(self) -> str:
        """The boards of a source, for the reader."""
        return f"{self.board} over {_FABRICS[self.fabric]}" if self.fabric else self.board


Curves = Mapping[Host, Points]


@cache
def known_curves() -> Curves:
    """Return the plain decode curves that ship with the tool."""
    curves: defaultdict[Host, dict[tuple[int, int], float]] = defaultdict(dict)
    for row in table("decode_curves"):
        board = boards.find(row["board"])
        host = Host(row["model"], row["engine"], row["parallel"], row["source"], board.name, board.fabric)
        concurrency = int(row["concurrency"])
        curves[host][int(row["context"]), concurrency] = concurrency / float(row["tok_s"])
    return dict(curves)


def curve(host: Host, points: Points, known: Curves | None = None) -> StepCurve:
    """Return the decode curve through ``points``, its gaps filled with the shape of the nearest known curve.

    :param points: (context in tokens, requests) -> seconds of a plain decode step.
    """
    if not experts(host.model) and len({rows for _, rows in points}) == 1:
        return Roofline(points)
    near = nearest(host, points, known_curves() if known is None else known)
    return StepCurve(points, StepCurve(near[1]) if near else None)


def nearest(host: Host, points: Points, known: Curves) -> tuple[Host, Points] | None:
    """Return the known curve nearest in shape, model, split and engine; ``None`` when there is none."""
    candidates = [
        (_distance(host, points, other, theirs), number, other, theirs)
        for number, (other, theirs) in enumerate(known.items())
        if len(_shortest(theirs)) >= _ENOUGH and not theirs.items() <= points.items()
    ]
    return min(candidates, key=lambda item: item[:2])[2:] if candidates else None


def most_like(host: Host, known: Curves | None = None) -> tuple[Host, Points] | None:
    """Return the known curve to go by when a host has none of its own: same model, split and engine, most points."""
    candidates = [
        (not alike(host.model, other.model), not same_split(host, other), _strange(host, other), -len(points), n)
        for n, (other, points) in enumerate((known_curves() if known is None else known).items())
    ]
    curves = list((known_curves() if known is None else known).items())
    return curves[min(candidates)[-1]] if candidates else None


def alike(model: str, other: str) -> bool:
    """Return whether two models are of one family and as sparse as each other."""
    return family(model) == family(other) and experts(model) == experts(other)


def same_split(host: Host, other: Host) -> bool:
    """Return whether two hosts split the model alike; ``DCP1`` is no split."""
    return host.parallel.replace(" DCP1", "") == other.parallel.replace(" DCP1", "")


def same_machine(host: Host, other: Host) -> bool:
    """Return whether two hosts have the same boards, joined alike; what is not known of one is no difference."""
    pairs = ((host.board, other.board), (host.fabric, other.fabric))
    return all(ours == theirs for ours, theirs in pairs if ours and theirs)


def experts(model: str) -> tuple[int, int] | None:
    """Return (routed experts, experts a token takes) by a model's name; ``None`` for a dense model."""
    name = model.lower().replace(" ", "-")
    for row in table("architectures"):
        if row["pattern"] in name:
            return (int(row["experts"]), int(row["active"])) if int(row["experts"]) else None
    return (128, 8) if _ACTIVE.search(name) else None


def expert_growth(model: str, before: float, after: float) -> float:
    """Return how many more experts ``after`` rows read than ``before`` rows; 1 for a dense model.

    N(t) = E (1 - (1 - K/E)^t) of E experts are read by t tokens that take K each under uniform routing (MoESD,
    arXiv 2505.19645).
    """
    if (found := experts(model)) is None:
        return 1.0
    idle = 1 - found[1] / found[0]
    return float((1 - idle**after) / (1 - idle**before))


def _distance(host: Host, points: Points, other: Host, theirs: Points) -> float:
    ours, them = _shortest(points), _shortest(theirs)
    logs = [math.log(ours[rows] / them[rows]) for rows in ours.keys() & them.keys()]
    shape = _NOTHING_SHARED
    if logs:
        mean = sum(logs) / len(logs)
        shape = math.sqrt(sum((value - mean) ** 2 for value in logs) / len(logs)) + abs(mean) / 2
    differences: Iterable[tuple[bool, float]] = (
        (not alike(host.model, other.model), _OTHER_FAMILY),
        (not same_split(host, other), _OTHER_PARALLEL),
        (_first(host.engine) != _first(other.engine), _OTHER_ENGINE),
        (host.source != other.source, _OTHER_SOURCE),
        (max(them) <= max(ours, default=0), _NO_FURTHER),
    )
    return shape + sum(weight for differs, weight in differences if differs)


def _shortest(points: Points) -> dict[int, float]:
    """Return rows -> seconds at the shortest context."""
    shortest = min(context for context, _ in points)
    return {rows: seconds for (context, rows), seconds in points.items() if context == shortest}


def _strange(host: Host, other: Host) -> float:
    """Return how different the words are that describe two engines, the first word counting most."""
    ours, theirs = set(_WORD.findall(host.engine.lower())), set(_WORD.findall(other.engine.lower()))
    shared = len(ours & theirs) / max(len(ours | theirs), 1)
    return (_first(host.engine) != _first(other.engine)) + 1 - shared


def _first(words: str) -> str:
    return words.split()[0].lower() if words.split() else ""
