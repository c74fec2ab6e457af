"""What a round of speculation costs against a plain decode step, from servers with a simulated accept length.

The accept length n is forced, so a round of k drafts takes the same time whatever the draft is worth, and tokens per
second are a straight line through the origin in n: batch x n / T_round. Its slope gives T_round; how far the points
lie off it shows whether the measurement can be believed. R = T_round / T_dec is also the break-even accept length.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from sglang_bw.errors import BwError, RoundFitError
from sglang_bw.host.fingerprint import Fingerprint
from sglang_bw.ledger.entry import Number
from sglang_bw.ledger.failure import FailureClass, classify

# Off the line by more than this, a point says something else than the cost of a round.
TOLERANCE = 0.05
# Repeats of a time that differ by more than this share of it were disturbed.
NOISY = 0.10
COLD_DRAFT = (
    "simulated acceptance hides what a cold draft costs: after plain decoding a real draft accepts less for a while"
)


@dataclass(frozen=True)
class Point:
    """One server at one batch.

    :ivar accept_length: tokens a round emitted, bonus token included; 1 for plain decoding.
    :ivar seconds: of a round.
    :ivar spread: largest minus smallest of the repeats, as a share of the median.
    :ivar simulated: whether the accept length was forced; ``None`` for a server that somebody else started.
    """

    batch: int
    accept_length: float
    seconds: float
    spread: float
    simulated: bool | None

    @property
    def speed(self) -> float:
        """Tokens per second of all requests."""
        return self.batch * self.accept_length / self.seconds


@dataclass(frozen=True)
class Line:
    """Rounds of ``steps`` drafts at one batch: a straight line through the origin and some accept lengths.

    :ivar seconds: of a round, batch over the slope.
    :ivar residual: of the worst point, as a share of the line's speed there; ``None`` for a single point.
    """

    steps: int
    batch: int
    seconds: float
    residual: float | None
    points: tuple[Point, ...]

    @property
    def straight(self) -> bool | None:
        """Whether every point lies within the tolerance; ``None`` when there is nothing to compare."""
        return None if self.residual is None else self.residual <= TOLERANCE

    @property
    def simulated(self) -> bool | None:
        """Whether accept lengths were forced."""
        return self.points[0].simulated


def fit(steps: int, points: list[Point]) -> Line:
    """Fit speeds at one batch by least squares."""
    slope = sum(p.accept_length * p.speed for p in points) / sum(p.accept_length**2 for p in points)
    off = [abs(p.speed / (slope * p.accept_length) - 1) for p in points]
    batch = points[0].batch
    return Line(steps, batch, batch / slope, max(off) if len(points) > 1 else None, tuple(points))


@dataclass
class Result:
    """What was found so far.

    :ivar launch: what of the servers' command line the times depend on.
    :ivar context: tokens of a request's prompt.
    :ivar plain: plain decode steps.
    :ivar rounds: (steps, batch) -> the points of its line.
    """

    host: Fingerprint
    recipe: str
    engine: str
    device: str
    launch: dict[str, str] = field(default_factory=dict)
    context: int = 0
    plain: dict[int, Point] = field(default_factory=dict)
    rounds: dict[tuple[int, int], list[Point]] = field(default_factory=dict)
    servers: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False

    def lines(self) -> list[Line]:
        """Return the lines, by steps and batch."""
        return [fit(steps, self.rounds[steps, batch]) for steps, batch in sorted(self.rounds)]

    def spread(self, line: Line) -> float:
        """Return how far the repeats behind a line, and its plain step, lie apart: the worst of them."""
        plain = self.plain.get(line.batch)
        return max([point.spread for point in line.points] + ([plain.spread] if plain else []))

    def noisy(self) -> bool:
        """Tell whether any time was disturbed."""
        points = [*self.plain.values(), *(point for line in self.lines() for point in line.points)]
        return any(point.spread > NOISY for point in points)

    def ratio(self, line: Line) -> float | None:
        """Return R, which is the break-even accept length; ``None`` without a plain step at that batch."""
        plain = self.plain.get(line.batch)
        return line.seconds / plain.seconds if plain else None

    def as_json(self) -> dict[str, Any]:
        """Return the form that `plan` reads, with everything else; ``steps`` 0 is speculation's own off state."""
        return {
            "probe": "round",
            "schema": 1,
            "taken": datetime.now(UTC).isoformat(timespec="seconds"),
            "complete": self.complete,
            "note": COLD_DRAFT,
            "recipe": self.recipe,
            "engine": self.engine,
            "device": self.device,
            "launch": self.launch,
            "host": {"key": self.host.key, **asdict(self.host)},
            "context": self.context,
            "servers": self.servers,
            "plain": [
                {"batch": p.batch, "seconds": p.seconds, "spread": p.spread, "tokens_per_second": p.speed}
                for _, p in sorted(self.plain.items())
            ],
            "rounds": [self._row(line) for line in self.lines()],
            "table": [[steps, batch, seconds] for (steps, batch), seconds in sorted(self.table().items())],
        }

    def title(self) -> str:
        """Return what was measured, in words."""
        batches = sorted({*self.plain, *(batch for _, batch in self.rounds)})
        steps = ", ".join(map(str, sorted({steps for steps, _ in self.rounds}))) or "no"
        return f"rounds of {steps} steps at batch {', '.join(map(str, batches)) or 'none'}"

    def numbers(self) -> dict[str, Number]:
        """Return the times, and R where a plain step was measured beside a round."""
        found = {f"step at {batch}": Number(value=one.seconds, unit="s") for batch, one in sorted(self.plain.items())}
        for line in self.lines():
            at = f"of {line.steps} at {line.batch}"
            found[f"round {at}"] = Number(value=line.seconds, unit="s")
            if (ratio := self.ratio(line)) is not None:
                found[f"R {at}"] = Number(value=ratio)
        return found

    def failure(self, error: BwError) -> FailureClass:
        """Return why it failed."""
        return classify(error.message)

    def table(self) -> dict[tuple[int, int], float]:
        """Return seconds by (draft steps, batch): what a policy's start-up table holds.

        Where 0 steps were not measured as a state of a speculating server, plain decoding stands for them.
        """
        plain = {(0, batch): point.seconds for batch, point in self.plain.items()}
        return plain | {(line.steps, line.batch): line.seconds for line in self.lines()}

    def _row(self, line: Line) -> dict[str, Any]:
        return {
            "batch": line.batch,
            "steps": line.steps,
            "seconds": line.seconds,
            "simulated": line.simulated,
            "ratio": self.ratio(line),
            "break_even": self.ratio(line),
            "residual": line.residual,
            "straight": line.straight,
            "points": [{**asdict(point), "tokens_per_second": point.speed} for point in line.points],
        }

    def error(self) -> RoundFitError | None:
        """Return which lines are none."""
        bent = [line for line in self.lines() if line.straight is False]
        if not bent:
            return None
        worst = max(bent, key=lambda line: line.residual or 0)
        return RoundFitError(
            f"{len(bent)} of {len(self.rounds)} lines are not straight; {worst.steps} steps at batch {worst.batch} is "
            f"off by {100 * (worst.residual or 0):.0f} % (at most {100 * TOLERANCE:.0f} %)",
            hint="something else used the machine, or requests waited: measure again, with more --rounds.",
        )
