"""What a round of speculation costs, in plain decode steps: R.

A verify pass of c requests and k draft tokens has c(k + 1) rows, so it costs about what a plain decode step of c(k + 1)
requests costs. That needs no draft: two points of plain decoding, at c and at (k + 1)c, give R.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sglang_bw.plan.speculation.curve import NEAREST, StepCurve
from sglang_bw.plan.speculation.tables import Parameters, parameters


@dataclass(frozen=True)
class Ratio:
    """The cost of a round over that of a plain decode step, or the reason why it is unknown.

    :ivar ratio: R, ``None`` when unknown.
    :ivar sigma: standard deviation of its logarithm.
    :ivar basis: where it comes from.
    :ivar reason: why there is no ratio, or why ``pays`` must not be said whatever it is.
    :ivar trusted: it rests on measurements of this host, or of another with the same model and split. Otherwise an
        interval that reaches 1 leaves the verdict open.
    """

    ratio: float | None
    sigma: float
    basis: str
    reason: str = ""
    trusted: bool = True


class RoundCost(Protocol):
    """Anything that knows R."""

    def ratio(self, context: int, concurrency: int, steps: int) -> Ratio:
        """Return R at ``context`` tokens a request, ``concurrency`` requests and ``steps`` draft steps."""
        ...


@dataclass(frozen=True)
class Parts:
    """The times a round is made of, seconds.

    :ivar plain: a plain decode step at this batch.
    :ivar verify: a plain decode step at the rows of the verify pass.
    :ivar shared: attention within ``verify`` that query tokens of one request can share.
    :ivar one: a plain decode step of one request at short context, the yardstick of a draft step.
    :ivar steps: draft steps.
    """

    plain: float
    verify: float
    shared: float
    one: float
    steps: int
    basis: str

    def ratio(self, draft_step: float, attention: float) -> float:
        """Return R; the parameters are those of :class:`~sglang_bw.plan.speculation.tables.Parameters`."""
        verify = self.verify - (1 - attention) * self.shared
        return (verify + self.steps * draft_step * self.one) / self.plain


def parts(curve: StepCurve, context: int, concurrency: int, steps: int) -> Parts:
    """Return what a round is made of, from a decode curve."""
    plain = curve.at(context, concurrency)
    verify = curve.at(context, concurrency * (steps + 1))
    one = curve.at(curve.shortest, 1)
    shared = max(verify.attention - plain.attention, 0.0)
    return Parts(plain.seconds, verify.seconds, shared, one.seconds, steps, verify.basis)


def attention_share(engine: str, fitted: Parameters) -> float:
    """Return the parameter of an engine by the first word of its name; between the known ones for another."""
    known = fitted.attention
    words = engine.lower().split()
    return known.get(words[0] if words else "", sum(known.values()) / len(known))


@dataclass(frozen=True)
class CurveCost:
    """R from plain decode points: T((k + 1)c) / T(c), with the draft steps on top.

    :ivar engine: its first word chooses the attention kernels' parameter.
    :ivar origin: whose points they are when not this host's.
    :ivar trusted: see :class:`Ratio`.
    """

    curve: StepCurve
    engine: str = "sglang"
    origin: str = ""
    trusted: bool = True

    def ratio(self, context: int, concurrency: int, steps: int) -> Ratio:
        """Return R at ``context`` tokens a request, ``concurrency`` requests and ``steps`` draft steps."""
        fitted = parameters()
        found = parts(self.curve, context, concurrency, steps)
        ratio = found.ratio(fitted.draft_step, attention_share(self.engine, fitted))
        basis = f"plain decoding of {self.origin or 'this host'}, {found.basis}"
        if (rows := self.curve.cliff(concurrency, concurrency * (steps + 1))) is not None:
            basis += f", cliff at {rows} rows"
        sigma = fitted.sigma[found.basis]
        if not self.trusted:
            sigma = fitted.sigma["nearest host"]
        return Ratio(ratio, sigma, basis, trusted=self.trusted and (bool(self.origin) or found.basis != NEAREST))

    def measured_here(self, context: int, concurrency: int, steps: int) -> bool:
        """Return whether a step of the verify pass's rows was measured on this host, or between two that were."""
        basis = self.curve.at(context, concurrency * (steps + 1)).basis
        return not self.origin and basis in ("measured", "interpolated")
