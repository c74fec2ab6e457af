"""One entry of the ledger: a start, a probe, a comparison or a trial, with what came of it."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from sglang_bw.ledger.failure import FailureClass, classify
from sglang_bw.ledger.record import ArmRecord, EngineRecord, Host, Outcome, RunRecord

Kind = Literal["start", "probe", "ab", "trial"]
Result = Literal["ok", "failed", "refused", "interrupted", "faster", "slower", "undecided", "invalid"]
Origin = Literal["here", "reported"]
RESULTS: tuple[Result, ...] = get_args(Result)
GOOD: frozenset[Result] = frozenset({"ok", "faster", "slower", "undecided"})

# What ended a run and lay in the launch of an arm: done again the same way, it ends the same way.
OF_THE_LAUNCH = ("start-failed", "server-died", "server-error", "timeout", "bad-stream")
_CLASS_OF_RUN = {
    "timeout": FailureClass.HANG,
    "bad-stream": FailureClass.NETWORK,
    "disk-full": FailureClass.OTHER,
    "interrupted": FailureClass.OTHER,
}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Number(_Part):
    """A measured value, with its 95 % interval when there is one.

    :ivar unit: ``tok/s``, ``s``, ``GiB``; empty for ratios and accept lengths.
    """

    value: float
    low: float | None = None
    high: float | None = None
    unit: str = ""

    def __str__(self) -> str:
        interval = f" [{self.low:.4g}, {self.high:.4g}]" if self.low is not None and self.high is not None else ""
        return f"{self.value:.4g}{interval}{f' {self.unit}' if self.unit else ''}"


class Note(_Part):
    """A remark that was added later."""

    at: AwareDatetime
    text: str


class Entry(_Part):
    """What was tried, where, and what came of it.

    :ivar kind: ``start`` of a server, ``probe`` of the host, ``ab`` comparison, ``trial`` of a tuning.
    :ivar changes: what was changed: key -> (before, after).
    :ivar against: what it was changed against: a recipe, a run.
    :ivar launch: digest of the exact launch (:mod:`sglang_bw.ledger.identity`), ``None`` when nothing was launched.
    :ivar argv: engine flags, secrets taken out.
    :ivar evidence: the log lines that prove the result.
    :ivar artefacts: paths and addresses of logs, run files and reports.
    :ivar origin: ``reported`` for what others published; nobody here has seen it.
    :ivar source: who reported it, and where.
    :ivar study: the tuning that a trial belongs to.
    :ivar search: digest of everything that makes two tunings the same; trials of one are not taken for another's.
    :ivar params: what a tuning chose for a trial.
    :ivar notes: kept beside the entry, which itself never changes.
    """

    id: str = Field(min_length=1)
    kind: Kind
    at: AwareDatetime
    hypothesis: str = ""
    recipe: str | None = None
    changes: dict[str, tuple[Any, Any]] = Field(default_factory=dict)
    against: str = ""
    engine: EngineRecord | None = None
    host: Host | None = None
    launch: str | None = None
    argv: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    result: Result
    failure: FailureClass | None = None
    summary: str = ""
    evidence: tuple[str, ...] = ()
    fix: str = ""
    numbers: dict[str, Number] = Field(default_factory=dict)
    artefacts: tuple[str, ...] = ()
    origin: Origin = "here"
    source: str = ""
    study: str | None = None
    search: str | None = None
    params: dict[str, str] = Field(default_factory=dict)
    notes: tuple[Note, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether this is something not to do again the same way."""
        return self.result in ("failed", "refused")


def new_id(at: datetime) -> str:
    """Return an identifier that sorts by time."""
    return f"{at.astimezone(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def of_run(run: RunRecord, *, artefacts: tuple[str, ...] = ()) -> Entry:
    """Return the entry of a comparison, which is about the treatment, or about the arm that failed.

    A run that was killed has one as well.
    """
    outcome = run.outcome
    arm = next((one for one in run.arms if outcome and one.name == outcome.arm), run.arms[1])
    return Entry(
        id=run.id,
        kind="trial" if run.command == "trial" else "ab",
        at=run.began.astimezone(UTC),
        hypothesis=run.hypothesis,
        recipe=arm.recipe or run.recipe,
        changes=run.difference,
        against=run.arms[0].says,
        engine=arm.engine,
        host=run.host,
        launch=_launch(arm, outcome),
        argv=arm.argv,
        env=arm.env,
        result=_result(outcome),
        failure=_failure(outcome),
        summary=_summary(run),
        evidence=_evidence(outcome),
        numbers=_numbers(outcome),
        artefacts=artefacts,
        notes=(),
    )


def _launch(arm: ArmRecord, outcome: Outcome | None) -> str | None:
    """Return the launch that a run says something about: none when a prompt, a disk or a user ended it."""
    speaks = outcome is None or outcome.failure is None or outcome.failure in OF_THE_LAUNCH
    return arm.launch if speaks else None


def _result(outcome: Outcome | None) -> Result:
    if outcome is None or outcome.failure == "interrupted":
        return "interrupted"
    if outcome.failure:
        return "failed"
    if not outcome.valid:
        return "invalid"
    verdicts = {ratio.verdict for ratio in outcome.ratios}
    return verdicts.pop() if len(verdicts) == 1 else "undecided"


def _failure(outcome: Outcome | None) -> FailureClass | None:
    if outcome is None or outcome.failure is None or outcome.failure == "interrupted":
        return None
    phase = "" if outcome.failure == "start-failed" else "ready"
    return _CLASS_OF_RUN.get(outcome.failure) or classify(outcome.failure_text or "", phase=phase)


def _evidence(outcome: Outcome | None) -> tuple[str, ...]:
    if outcome is None or outcome.failure_text:
        return (outcome.failure_text,) if outcome and outcome.failure_text else ()
    return () if outcome.valid else outcome.warnings


def _summary(run: RunRecord) -> str:
    arms = f"{run.arms[1].says} against {run.arms[0].says}"
    if run.outcome is None:
        return f"{arms}: ended from outside after {len(run.blocks)} blocks"
    if run.outcome.failure:
        return f"{arms}: {run.outcome.failure} after {len(run.blocks)} blocks"
    found = ", ".join(f"{ratio.value:.3f} at {ratio.concurrency}" for ratio in run.outcome.ratios)
    mark = " (simulated acceptance)" if run.simulated else ""
    return f"{arms}: {found or 'nothing measured'}{mark}"


def _numbers(outcome: Outcome | None) -> dict[str, Number]:
    numbers: dict[str, Number] = {}
    for ratio in outcome.ratios if outcome else ():
        at = f"at {ratio.concurrency}"
        numbers[f"ratio {at}"] = Number(value=ratio.value, low=ratio.low, high=ratio.high)
        for name, arm in (("A", ratio.a), ("B", ratio.b)):
            numbers[f"{name} {at}"] = Number(value=arm.tok_s, unit="tok/s")
            if arm.accept_length is not None:
                numbers[f"{name} accept length {at}"] = Number(value=arm.accept_length)
    return numbers
