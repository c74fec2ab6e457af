"""Predictions beside what was observed, and their summary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from sglang_bw.plan.replay.forms import Form
from sglang_bw.plan.speculation.verdict import UNDECIDED, Interval, Verdict, judge


@dataclass(frozen=True)
class Prediction:
    """One row.

    :ivar predicted: KV tokens or speedup; ``None`` with the ``reason``.
    :ivar observed: the answer, when the row has one.
    :ivar interval: 80 % interval of a predicted speedup.
    :ivar accept_length: tau that was expected.
    :ivar break_even: R that was expected.
    :ivar at_observed: the speedup predicted for the accept length that was observed: its error is that of R alone.
    :ivar basis: where the cost comes from.
    :ivar left_out: the observation cannot be true; the row is not compared.
    """

    predicted: float | None
    observed: float | None
    interval: Interval | None = None
    accept_length: float | None = None
    break_even: float | None = None
    at_observed: float | None = None
    basis: str = ""
    reason: str = ""
    left_out: bool = False

    @property
    def error(self) -> float | None:
        """Predicted over observed, minus 1."""
        return _error(self.predicted, self.observed)

    @property
    def error_at_observed(self) -> float | None:
        """The error that is left when the accept length is known."""
        return _error(self.at_observed, self.observed)


@dataclass(frozen=True)
class Replay:
    """All rows of a file, in its order."""

    form: Form
    rows: Sequence[Prediction]
    speculative: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculative", self.form in (Form.CELLS, Form.BUNDLE))

    def to_json(self) -> dict[str, Any]:
        """Return ``{"rows": [...], "summary": {...}}``."""
        return {"rows": [self._row(number, row) for number, row in enumerate(self.rows, 1)], "summary": self.summary()}

    def summary(self) -> dict[str, Any]:
        """Return the number of rows, median and 90th percentile of the error; for speedups also who was found.

        ``wins`` and ``losses`` are rows observed more than 6 % above and below 1; a prediction within 6 % of 1 is
        undecided and finds neither. ``always_pays`` is the share right when speculation is simply taken to pay.
        """
        kept = [row for row in self.rows if not row.left_out]
        errors = [abs(row.error) for row in kept if row.error is not None]
        result: dict[str, Any] = {
            "form": str(self.form),
            "rows": len(self.rows),
            "predicted": sum(row.predicted is not None for row in self.rows),
            "compared": len(errors),
            "left_out": len(self.rows) - len(kept),
            **spread(errors),
        }
        if self.speculative:
            known = [abs(row.error_at_observed) for row in kept if row.error_at_observed is not None]
            result |= {f"{name}_at_observed_accept_length": value for name, value in spread(known).items()}
            result |= found((row.predicted, row.observed) for row in kept)
        return result

    def _row(self, number: int, row: Prediction) -> dict[str, Any]:
        result: dict[str, Any] = {
            "row": number,
            "predicted": round(row.predicted) if row.predicted is not None and not self.speculative else row.predicted,
            "observed": row.observed,
            "error": row.error,
            "left_out": row.left_out,
        }
        if self.speculative:
            result |= {
                "verdict": str(judge(row.predicted)) if row.predicted is not None else None,
                "low": row.interval.low if row.interval else None,
                "high": row.interval.high if row.interval else None,
                "accept_length": row.accept_length,
                "break_even": row.break_even,
            }
        return result | {"basis": row.basis, "reason": row.reason}


def found(pairs: Iterable[tuple[float | None, float | None]]) -> dict[str, Any]:
    """Count wins and losses that were found among (predicted, observed) speedups."""
    judged = [(judge(predicted), observed) for predicted, observed in pairs if predicted is not None and observed]
    wins = [verdict for verdict, observed in judged if observed > 1 + UNDECIDED]
    losses = [verdict for verdict, observed in judged if observed < 1 - UNDECIDED]
    decided = len(wins) + len(losses)
    return {
        "wins": len(wins),
        "wins_found": wins.count(Verdict.PAYS),
        "losses": len(losses),
        "losses_found": losses.count(Verdict.LOSES),
        "undecided": sum(verdict is Verdict.UNDECIDED for verdict, _ in judged),
        "always_pays": len(wins) / decided if decided else None,
    }


def spread(errors: list[float]) -> dict[str, float | None]:
    """Return median and 90th percentile of absolute errors."""
    if not errors:
        return {"median": None, "p90": None}
    return {"median": median(errors), "p90": sorted(errors)[min(int(0.9 * len(errors)), len(errors) - 1)]}


def _error(predicted: float | None, observed: float | None) -> float | None:
    return predicted / observed - 1 if predicted is not None and observed else None
