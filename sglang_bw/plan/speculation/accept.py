"""How many tokens a round of speculation emits: accept length by number of draft steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from sglang_bw.errors import SpeculationInputError
from sglang_bw.plan.speculation.tables import parameters, table

# A drafter that was trained with its target and ships inside it accepts more than one trained afterwards.
_SELF_SPECULATION = re.compile(r"mtp|nextn|dspark|dflash", re.IGNORECASE)


@dataclass(frozen=True)
class AcceptCurve:
    """Accept length as a function of the draft steps.

    :ivar survival: probability that the draft token at position 1, 2, ... is accepted, all before it included;
        none is larger than the one before.
    :ivar sigma: standard deviation of the logarithm of the accept length.
    :ivar source: where it comes from, for the reader.
    """

    survival: tuple[float, ...]
    sigma: float
    source: str

    def length(self, steps: int) -> float:
        """Return tau after ``steps`` draft steps, bonus token included: 1 + sum of survival.

        Past the last known position the survival goes on falling by its last ratio.
        """
        known = self.survival[:steps]
        total = 1.0 + sum(known)
        last, ratio = self.survival[-1], _last_ratio(self.survival)
        for _ in range(steps - len(known)):
            last *= ratio
            total += last
        return total

    def marginal(self, steps: int) -> float:
        """Return what draft step number ``steps`` adds to the accept length."""
        return self.length(steps) - self.length(steps - 1)

    def harder(self, exponent: float) -> AcceptCurve:
        """Return the curve of harder traffic: every acceptance probability raised to ``exponent``."""
        return AcceptCurve(tuple(value**exponent for value in self.survival), self.sigma, self.source)

    def through(self, steps: int, length: float, *, sigma: float, source: str) -> AcceptCurve:
        """Return the curve of this shape whose accept length at ``steps`` is ``length``.

        :raises SpeculationInputError: when no draft of that many steps can have it.
        """
        if not 1.0 <= length <= steps + 1:
            raise SpeculationInputError(
                f"an accept length of {length:g} is impossible with {steps} draft steps",
                hint=f"it counts the bonus token and lies between 1 and {steps + 1}",
            )
        low, high = 0.0, 64.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.harder(middle).length(steps) > length else (low, middle)
        shape = self.harder((low + high) / 2)
        return AcceptCurve(shape.survival, sigma, source)


def from_lengths(lengths: Mapping[int, float], *, sigma: float, source: str) -> AcceptCurve:
    """Return the curve through accept lengths at 1, 2, ... steps.

    Measured curves are noisy and can fall; survival cannot, so neighbours that break the order are averaged.

    :raises SpeculationInputError: when a number of steps is missing or a length is below 1.
    """
    steps = sorted(lengths)
    if not steps or steps != list(range(1, len(steps) + 1)):
        raise SpeculationInputError(f"{source}: accept lengths are needed for 1, 2, ... draft steps without a gap")
    values = [1.0, *(lengths[step] for step in steps)]
    if not all(1.0 <= value <= step + 1 for step, value in enumerate(values)):
        raise SpeculationInputError(f"{source}: an accept length lies outside of 1 to steps + 1")
    return AcceptCurve(_falling([after - before for before, after in pairwise(values)]), sigma, source)


def draft_kind(*texts: str) -> str:
    """Return ``mtp`` for drafters that are part of the target, ``eagle3`` for separate ones, by their names."""
    return "mtp" if any(_SELF_SPECULATION.search(text) for text in texts) else "eagle3"


@cache
def golden(kind: str, model: str = "") -> AcceptCurve:
    """Return the published curve of a kind of draft: that of ``model``'s family, else the mean of the kind."""
    curves: dict[str, dict[int, float]] = {}
    for row in table("golden_accept_length"):
        if row["kind"] == kind:
            curves.setdefault(row["curve"], {})[int(row["steps"])] = float(row["accept_length"])
    own = {name: curve for name, curve in curves.items() if family(name) == family(model)} or curves
    mean = {steps: sum(curve[steps] for curve in own.values()) / len(own) for steps in next(iter(own.values()))}
    return from_lengths(mean, sigma=0.1, source=f"golden curves of {', '.join(own)}")


def expected(kind: str, model: str = "", traffic: float | None = None) -> AcceptCurve:
    """Return the curve to expect of mixed traffic, before anything was measured.

    Golden curves are taken on coding prompts; served traffic accepts less. ``traffic`` is the exponent of
    :meth:`AcceptCurve.harder`, fitted by ``scripts/fit_speculation.py``.
    """
    fitted = parameters()
    curve = golden(kind, model).harder(traffic if traffic is not None else fitted.traffic[kind])
    return AcceptCurve(curve.survival, fitted.accept_sigma, f"{curve.source}, on mixed traffic")


def family(model: str) -> str:
    """Return the first word of a model's name, ``kimi`` of ``moonshotai/Kimi-K2.6 INT4``."""
    name = model.rsplit("/", 1)[-1]
    found = re.match(r"[A-Za-z]+", name)
    return found.group().lower() if found else ""


def _falling(values: Sequence[float]) -> tuple[float, ...]:
    """Return the non-increasing sequence nearest to ``values`` (pool adjacent violators), within 0 to 1."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-1][0] > blocks[-2][0]:
            (late, n), (early, m) = blocks.pop(), blocks.pop()
            blocks.append(((late * n + early * m) / (n + m), n + m))
    return tuple(min(max(mean, 0.0), 1.0) for mean, count in blocks for _ in range(count))


def _last_ratio(survival: Sequence[float]) -> float:
    if len(survival) < 2 or survival[-2] <= 0:
        return survival[-1]
    return min(survival[-1] / survival[-2], 1.0)
