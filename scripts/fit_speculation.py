"""Fit the parameters of the speculation model and write sglang_bw/plan/data/speculation.json.

`python -m scripts.fit_speculation speculation_cells.csv` fits on all rows of the file (and on the shipped SpecBundle
table). `scripts.plan_accuracy` reports how well parameters do that were fitted on half of the sources only.

Five numbers describe all cells: two traffic exponents, the time of a draft step, two shares of attention cost. Each has
a prior from elsewhere, because tau and the cost of a round can make up for each other:

* traffic: acceptance by position on 8x RTX PRO 6000 is .655/.40/.25 for Kimi's EAGLE-3 and .80/.55/.285 for GLM's MTP;
  the golden curves have .83/.60/.45 and .84/.66/.49. So 1.9 and 1.5 (rtx6kpro kimi-k26-v4 and glm5.1_v2).
* draft step: 2.5 ms for three steps and a draft extend beside a plain step of 11 to 17 ms: 0.07.
* attention: near 1 for kernels that take each query token as a request of its own (vLLM's MLA decode kernels), lower
  for those that share a request's KV between its query tokens.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from sglang_bw.plan.replay import bundle
from sglang_bw.plan.replay.cells import Cell, costs, observed
from sglang_bw.plan.replay.forms import read
from sglang_bw.plan.speculation.accept import golden
from sglang_bw.plan.speculation.cost import Parts, attention_share
from sglang_bw.plan.speculation.curve import NEAREST
from sglang_bw.plan.speculation.nearest import Curves, Host
from sglang_bw.plan.speculation.tables import Parameters, parameters

OUTPUT = Path(__file__).resolve().parent.parent / "sglang_bw" / "plan" / "data" / "speculation.json"
# name, prior, its standard deviation, upper bound
_PRIORS = (
    ("eagle3", 1.9, 0.3, 9.0),
    ("mtp", 1.5, 0.3, 9.0),
    ("draft_step", 0.07, 0.02, 1.0),
    ("vllm", 0.85, 0.2, 1.0),
    ("sglang", 0.5, 0.3, 1.0),
)
# Interpolation lies between measured points and is as good.
_BASES = {"measured": "measured", "interpolated": "measured", "extrapolated": "extrapolated", NEAREST: NEAREST}
# 80 % of a normal distribution lie within this many standard deviations.
_Z80 = 1.2816
# A log error counts up to here: some published cells are plainly broken runs.
_OUTLIER = 0.3


@dataclass(frozen=True)
class Example:
    """A cell with its answer."""

    cell: Cell
    parts: Parts
    speedup: float

    def predicted(self, fitted: Parameters) -> float:
        """Return the speedup that these parameters predict."""
        cell = self.cell
        tau = _length(cell.kind, cell.host.model, cell.steps, fitted.traffic[cell.kind])
        return tau / self.parts.ratio(fitted.draft_step, attention_share(cell.host.engine, fitted))


@lru_cache(maxsize=4096)
def _length(kind: str, model: str, steps: int, traffic: float) -> float:
    return golden(kind, model).harder(traffic).length(steps)


def examples(rows: Sequence[dict[str, str]], known: Curves | None = None) -> list[Example]:
    """Return the rows with their rounds, from their own plain decode points and ``known`` curves."""
    cells = [Cell.of(row) for row in rows]
    answers = [observed(row) for row in rows]
    rounds = costs(cells, known)
    return [Example(cell, cost, answer) for cell, cost, answer in zip(cells, rounds, answers, strict=True) if answer]


def fit(cells: Sequence[Example], start: Parameters) -> Parameters:
    """Return ``start`` with the parameters that predict ``cells`` with the smallest error."""
    values = [prior for _, prior, _, _ in _PRIORS]

    def cost(trial: Sequence[float]) -> float:
        return _loss(cells, _named(trial, start)) + _prior(trial)

    return _named(_descend(cost, values), start)


def left_out_errors(rows: Sequence[bundle.Measured]) -> list[float]:
    """Return log errors of S = tau / R with R from the other data sets and tau as measured."""
    best = bundle.best_baselines([row.run for row in rows])
    errors = []
    for row in rows:
        ratio, _ = bundle.round_ratio(row.run, rows)
        predicted = bundle.speedup(row.accept_length, ratio, bundle.waiting(row.run, best))
        errors.append(math.log(predicted / row.speedup))
    return errors


def fit_bundle(rows: Sequence[bundle.Measured]) -> dict[str, float]:
    """Return the least-squares weights of ``bundle.features`` for log R."""
    best = bundle.best_baselines([row.run for row in rows])
    names = list(bundle.features(rows[0].run))
    inputs = [[bundle.features(row.run)[name] for name in names] for row in rows]
    ratios = [math.log(bundle.own_ratio(row, bundle.waiting(row.run, best))) for row in rows]
    squares = [[sum(row[m] * row[n] for row in inputs) for n in range(len(names))] for m in range(len(names))]
    products = [sum(row[m] * ratio for row, ratio in zip(inputs, ratios, strict=True)) for m in range(len(names))]
    return {name: round(weight, 4) for name, weight in zip(names, _solve(squares, products), strict=True)}


def _solve(matrix: list[list[float]], values: list[float]) -> list[float]:
    """Return x with ``matrix`` x = ``values``: Gaussian elimination with pivots, for a handful of unknowns."""
    rows = [[*row, value] for row, value in zip(matrix, values, strict=True)]
    for place in range(len(rows)):
        pivot = max(range(place, len(rows)), key=lambda n: abs(rows[n][place]))
        rows[place], rows[pivot] = rows[pivot], rows[place]
        rows[place] = [value / rows[place][place] for value in rows[place]]
        for other, row in enumerate(rows):
            if other != place:
                rows[other] = [a - row[place] * b for a, b in zip(row, rows[place], strict=True)]
    return [row[-1] for row in rows]


def held_out(rows: Sequence[dict[str, str]], trained: Sequence[str]) -> tuple[Parameters, list[Example]]:
    """Return the parameters fitted on some sources, and the cells of the others.

    Nothing of a held-out source is known while it is predicted but its own plain decode points: the curves that fill
    gaps come from the trained sources, and so do all parameters.
    """
    train = [row for row in rows if row["source"] in trained]
    known: dict[Host, dict[tuple[int, int], float]] = {}
    for cell in map(Cell.of, train):
        known.setdefault(cell.host, {})[cell.context, cell.concurrency] = cell.seconds
    tested = []
    for source in sorted({row["source"] for row in rows} - set(trained)):
        tested += examples([row for row in rows if row["source"] == source], known)
    return fit(examples(train, {}), parameters()), tested


def spreads(rows: Sequence[dict[str, str]]) -> dict[str, float]:
    """Return basis -> standard deviation of log S, from the 80th percentile of the errors on sources held out singly.

    Nobody's host is in the table when it is another model's: its spread is twice that of a nearest curve.
    """
    sources = {row["source"] for row in rows}
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for source in sorted(sources):
        fitted, tested = held_out(rows, sorted(sources - {source}))
        for cell in tested:
            errors[_BASES[cell.parts.basis]].append(abs(math.log(cell.predicted(fitted) / cell.speedup)))
    found = {basis: round(sorted(own)[int(0.8 * len(own))] / _Z80, 3) for basis, own in errors.items()}
    return {
        "measured": found["measured"],
        "interpolated": found["measured"],
        "extrapolated": found["extrapolated"],
        NEAREST: found[NEAREST],
        "nearest host": round(2 * found[NEAREST], 3),
    }


def _named(values: Sequence[float], start: Parameters) -> Parameters:
    eagle3, mtp, draft_step, vllm, sglang = values
    return replace(
        start,
        traffic={"eagle3": eagle3, "mtp": mtp},
        draft_step=draft_step,
        attention={"vllm": vllm, "sglang": sglang},
    )


def _loss(cells: Sequence[Example], fitted: Parameters) -> float:
    """Return the sum of log errors, each up to ``_OUTLIER``."""
    return sum(min(abs(math.log(cell.predicted(fitted) / cell.speedup)), _OUTLIER) for cell in cells)


def _prior(values: Sequence[float]) -> float:
    return sum(((value - prior) / sigma) ** 2 / 2 for value, (_, prior, sigma, _) in zip(values, _PRIORS, strict=True))


def _descend(cost: Callable[[Sequence[float]], float], values: list[float]) -> list[float]:
    """Coordinate search: few parameters, a kinked loss, no gradient worth having."""
    steps = [sigma / 2 for _, _, sigma, _ in _PRIORS]
    best = cost(values)
    for _ in range(7):
        moved = True
        while moved:
            moved = False
            for place, (_, _, _, bound) in enumerate(_PRIORS):
                for step in (steps[place], -steps[place]):
                    trial = [*values[:place], values[place] + step, *values[place + 1 :]]
                    if 0 <= trial[place] <= bound and (value := cost(trial)) < best - 1e-9:
                        values, best, moved = trial, value, True
        steps = [step / 2 for step in steps]
    return values


def main(path: Path) -> None:
    start = Parameters(**json.loads(OUTPUT.read_text(encoding="utf-8"))["parameters"])
    rows = read(path).rows
    cells = examples(rows)
    fitted = fit(cells, start)
    fitted = replace(
        fitted,
        traffic={name: round(value, 3) for name, value in fitted.traffic.items()},
        attention={name: round(value, 3) for name, value in fitted.attention.items()},
        draft_step=round(fitted.draft_step, 4),
        bundle=fit_bundle(bundle.shipped()),
        sigma=spreads(rows),
    )
    made = {"made_by": f"python -m scripts.fit_speculation {path.name}", "rows": len(cells)}
    OUTPUT.write_text(json.dumps({**made, "parameters": asdict(fitted)}, indent=2) + "\n", encoding="utf-8")
    print(OUTPUT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
