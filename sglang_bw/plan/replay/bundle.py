"""Rows in the form of specbundle.csv: end to end throughput of a target, draft and configuration on a data set.

Inputs are target, draft, dataset, batch, steps, topk, draft_tokens and base_tps. accept_len was measured in the run
with speculation, so it is an answer unless the caller says otherwise. What is known of other rows comes from the table
that ships with the tool, never from the file, and never from the row's own data set (for R) or own run (for tau): a row
that is in the shipped table is predicted as if it were not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median

from sglang_bw.plan.replay.cells import positive
from sglang_bw.plan.replay.result import Prediction
from sglang_bw.plan.speculation.effects import additive
from sglang_bw.plan.speculation.nearest import expert_growth, experts
from sglang_bw.plan.speculation.tables import parameters, table
from sglang_bw.plan.speculation.verdict import Interval

Row = Mapping[str, str]
Config = tuple[int, int, int]
_SIZE = re.compile(r"(\d+(?:\.\d+)?)B\b", re.IGNORECASE)
_REFERENCE_SIZE = 8.0
# A round with draft steps in it takes longer than a plain step; this much below is more than noise.
_IMPOSSIBLE = 0.95
# Standard deviation of log S by what is known: this draft or target, or neither.
_SIGMA_KNOWN, _SIGMA_UNKNOWN = 0.1, 0.2


@dataclass(frozen=True)
class Run:
    """The inputs of a row.

    :ivar config: draft steps, topk, draft tokens of the verify pass.
    :ivar base: tokens per second without speculation, ``None`` when the row does not say; no part of what names a run.
    """

    target: str
    draft: str
    dataset: str
    batch: int
    config: Config
    base: float | None = field(compare=False)

    @classmethod
    def of(cls, row: Row) -> Run:
        """Read a row.

        :raises ValueError: when a number is missing or not positive.
        """
        numbers = [positive(row[name]) for name in ("batch", "steps", "topk", "draft_tokens")]
        batch, steps, topk, width = (round(number) if number is not None else 0 for number in numbers)
        if not all((batch, steps, topk, width)):
            raise ValueError("batch, steps, topk and draft_tokens must be positive numbers")
        config = (steps, topk, width)
        return cls(row["target"], row["draft"], row["dataset"], batch, config, positive(row.get("base_tps")))


@dataclass(frozen=True)
class Measured:
    """A row of the shipped table: inputs, accept length and speedup."""

    run: Run
    accept_length: float
    speedup: float


@cache
def shipped() -> tuple[Measured, ...]:
    """Return the shipped table."""
    return tuple(Measured(Run.of(row), float(row["accept_len"]), float(row["speedup"])) for row in table("bundle"))


def predict(rows: Sequence[Row], *, accept_length_given: bool = False) -> list[Prediction]:
    """Predict the speedup of every row."""
    runs: dict[int, Run] = {}
    reasons = {}
    for number, row in enumerate(rows):
        try:
            runs[number] = Run.of(row)
        except ValueError as error:
            reasons[number] = str(error)
    wrong = _wrong_baselines(rows, runs)
    best = best_baselines([*runs.values(), *(known.run for known in shipped())])
    return [
        replace(_predict(row, runs[number], best, accept_length_given), left_out=runs[number].target in wrong)
        if number in runs
        else Prediction(None, positive(row.get("speedup")), reason=reasons[number])
        for number, row in enumerate(rows)
    ]


def _wrong_baselines(rows: Sequence[Row], runs: Mapping[int, Run]) -> set[str]:
    """Return the targets whose answers cannot be: some round cost less than a plain decode step.

    Only the comparison looks at this; nothing is predicted from it.
    """
    wrong = set()
    for number, run in runs.items():
        tau, faster = positive(rows[number].get("accept_len")), positive(rows[number].get("speedup"))
        if tau is not None and faster is not None and tau / faster < _IMPOSSIBLE:
            wrong.add(run.target)
    return wrong


def best_baselines(runs: Sequence[Run]) -> dict[tuple[str, int], float]:
    """Return the fastest baseline of each (target, batch): the one nearest to pure decoding."""
    best: dict[tuple[str, int], float] = {}
    for run in runs:
        if run.base is not None:
            key = (run.target, run.batch)
            best[key] = max(best.get(key, 0.0), run.base)
    return best


def waiting(run: Run, best: Mapping[tuple[str, int], float]) -> float:
    """Return the share of the baseline's time that speculation leaves as it is: prefill, and batches that run empty.

    A data set whose baseline is slower than the target's best one spends its time elsewhere than in full decode steps.
    """
    if run.base is None:
        return 0.0
    return 1 - run.base / best[run.target, run.batch]


def speedup(accept_length: float, ratio: float, wait: float) -> float:
    """Return 1 / (f + (1 - f) R / tau): Amdahl's law around S = tau / R."""
    return 1 / (wait + (1 - wait) * ratio / accept_length)


def round_ratio(run: Run, known: Sequence[Measured]) -> tuple[float, str]:
    """Return R of a run and where it comes from: the same target, draft and configuration on other data sets.

    A target or draft that is not in the table is judged by :func:`modelled_ratio`.
    """
    others = [row for row in known if (row.run.target, row.run.dataset) != (run.target, run.dataset)]
    best = best_baselines([row.run for row in known])
    same = [row for row in others if (row.run.target, row.run.config) == (run.target, run.config)]
    same = [row for row in same if row.run.batch == run.batch]
    own = [row for row in same if row.run.draft == run.draft] or same
    if own:
        return median(own_ratio(row, waiting(row.run, best)) for row in own), "same target, other data sets"
    return modelled_ratio(run), "model of targets of its kind"


def own_ratio(row: Measured, wait: float) -> float:
    """Return the R that a measured row implies."""
    return max((1 / row.speedup - wait) * row.accept_length / (1 - wait), 0.1)


def modelled_ratio(run: Run) -> float:
    """Return R by what makes it: verify reads more experts, and each draft step costs its time."""
    fitted = parameters().bundle
    return math.exp(sum(weight * fitted[name] for name, weight in features(run).items()))


def features(run: Run) -> dict[str, float]:
    """Return what log R is a linear function of.

    A verify pass of a mixture of experts reads more experts than a decode step. A draft step costs less of a step of a
    larger dense target, taken as size^(-1/3): larger targets run on more GPUs, and their drafts grow too. That
    exponent is an assumption, the table has one dense size.
    """
    steps, topk, width = run.config
    dense = experts(run.target) is None
    size = (_REFERENCE_SIZE / _billions(run.target)) ** (1 / 3) if dense else 1.0
    return {
        "dense": float(dense),
        "experts": float(not dense),
        "growth": expert_growth(run.target, run.batch, run.batch * width) - 1,
        "dense_steps": steps * size if dense else 0.0,
        "experts_steps": 0.0 if dense else float(steps),
        "tree": steps * size if topk > 1 else 0.0,
    }


def _billions(target: str) -> float:
    """Return billions of parameters by a target's name."""
    found = _SIZE.search(target)
    return float(found[1]) if found and float(found[1]) > 0 else _REFERENCE_SIZE


def accept_length(run: Run, known: Sequence[Measured]) -> float:
    """Return the tau to expect: from the draft's other configurations on this data set, else from other drafts."""
    others = [row for row in known if row.run != run]
    return 1 + math.exp(
        additive(
            [(_levels(row.run), math.log(max(row.accept_length - 1, 0.01))) for row in others],
            _levels(run),
        )
    )


def _levels(run: Run) -> tuple[object, ...]:
    """Return what tau depends on, the common first."""
    draft = (run.target, run.draft)
    return (run.config, run.dataset, draft, (draft, run.dataset), (draft, run.config))


def _predict(row: Row, run: Run, best: Mapping[tuple[str, int], float], accept_length_given: bool) -> Prediction:
    ratio, basis = round_ratio(run, shipped())
    wait = waiting(run, best)
    measured = positive(row.get("accept_len"))
    tau = measured if accept_length_given and measured is not None else accept_length(run, shipped())
    predicted = speedup(tau, ratio, wait)
    sigma = _SIGMA_KNOWN if basis.startswith("same") else _SIGMA_UNKNOWN
    return Prediction(
        predicted=predicted,
        observed=positive(row.get("speedup")),
        interval=Interval.around(predicted, sigma),
        accept_length=tau,
        break_even=ratio,
        at_observed=speedup(measured, ratio, wait) if measured is not None else None,
        basis=basis,
    )
