"""What all-reduces add to a verify pass: the same number of them as in a decode step, each over more rows.

T_verify = T_compute + n t(c(k + 1) h 2 bytes) and T_decode = T_compute' + n t(c h 2 bytes): n all-reduces a pass, t the
latency by message size, h the hidden size. On PCIe without a fast path t climbs steeply between the two sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from sglang_bw.errors import SpeculationInputError
from sglang_bw.plan.speculation.cost import CurveCost, Ratio
from sglang_bw.plan.speculation.tables import parameters

_BYTES = 2  # bf16 activations
# A baseline cannot consist of all-reduces alone: at most this share of a plain step is put down to them.
_MOST = 0.5
_SIGMA = 0.15


@dataclass(frozen=True)
class AllReduce:
    """All-reduces of one forward pass on one host.

    :ivar calls: all-reduces a pass, two a layer in a transformer split by tensor parallelism.
    :ivar hidden: hidden size; a row is ``hidden`` numbers of two bytes.
    :ivar latencies: (bytes, seconds), from ``probe allreduce``.
    """

    calls: int
    hidden: int
    latencies: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if self.calls < 1 or self.hidden < 1 or not self.latencies:
            raise SpeculationInputError("all-reduce calls, hidden size and latencies are needed")
        if not all(size > 0 and math.isfinite(seconds) and seconds > 0 for size, seconds in self.latencies):
            raise SpeculationInputError("an all-reduce latency is not a positive number")
        object.__setattr__(self, "latencies", tuple(sorted(self.latencies)))

    def seconds(self, rows: int) -> float | None:
        """Return the time of all all-reduces of a pass of ``rows`` rows; ``None`` past the largest size measured.

        Below the smallest size its latency is returned, which is too much: a bound from above.
        """
        size = rows * self.hidden * _BYTES
        if size > self.latencies[-1][0]:
            return None
        if size <= self.latencies[0][0]:
            return self.calls * self.latencies[0][1]
        for (small, quick), (large, slow) in pairwise(self.latencies):
            if size <= large:
                weight = math.log(size / small) / math.log(large / small)
                return self.calls * float(quick * (slow / quick) ** weight)
        raise AssertionError("the sizes are sorted")


@dataclass(frozen=True)
class AllReduceCost:
    """R where all-reduces were measured on this host, and the rest of a pass is known from a decode curve.

    :ivar curve: the host's own plain decode points, or another host's with the same model. Where the verify pass's rows
        were themselves measured on this host its all-reduces are in that time already, and nothing is added.
    """

    curve: CurveCost
    reduce: AllReduce

    def ratio(self, context: int, concurrency: int, steps: int) -> Ratio:
        """Return R at ``context`` tokens a request, ``concurrency`` requests and ``steps`` draft steps."""
        rest = self.curve.ratio(context, concurrency, steps)
        if rest.ratio is None or self.curve.measured_here(context, concurrency, steps):
            return rest
        width = concurrency * (steps + 1)
        verify, decode = self.reduce.seconds(width), self.reduce.seconds(concurrency)
        if verify is None or decode is None:
            size = width * self.reduce.hidden * _BYTES
            reason = f"no all-reduce was measured at the {size:,} bytes of its verify pass"
            return Ratio(None, 0.0, "all-reduce probe", reason)
        plain = self.curve.curve.at(context, concurrency)
        decode = min(decode, _MOST * plain.seconds)
        share = decode / plain.seconds
        ratio = rest.ratio * (1 - share) + verify / plain.seconds + self._drafts(decode, steps) / plain.seconds
        reason = ""
        if verify > plain.seconds:
            reason = (
                f"{self.reduce.calls} all-reduces of the verify pass take {verify * 1e3:.1f} ms, a whole plain step "
                f"{plain.seconds * 1e3:.1f} ms: make the all-reduce faster first"
            )
        sigma = math.hypot(rest.sigma, _SIGMA)
        return Ratio(ratio, sigma, f"all-reduce probe, {rest.basis}", reason, trusted=False)

    def _drafts(self, decode: float, steps: int) -> float:
        """Return the draft steps' own all-reduces: about as many, in proportion, as their share of a step."""
        return steps * parameters().draft_step * decode
