"""Search for settings that serve faster than the recipe as it is; Optuna chooses what to try next.

Every trial is a comparison with the recipe as it is, in alternating blocks, so that a machine that drifts does not
choose the winner. What was tried is in the ledger and nowhere else: a search that is begun again reads its trials from
there and goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial

from sglang_bw.errors import BwError, TuneError
from sglang_bw.experiment import space as spaces
from sglang_bw.experiment import stats
from sglang_bw.experiment.ab import MOST_ROUNDS, Experiment
from sglang_bw.experiment.space import Choice, Space
from sglang_bw.experiment.verdict import Limits
from sglang_bw.ledger.entry import Entry, Number
from sglang_bw.ledger.query import Query
from sglang_bw.ledger.record import Block, Ratio, RunRecord
from sglang_bw.ledger.store import Ledger

Metric = Literal["tok/s", "goodput"]
IsDecided = Callable[[Sequence[Ratio], Sequence[Block]], bool]
_SEED = 20261129
_ASKS = 30


@dataclass(frozen=True)
class Score:
    """Speed of a choice over the recipe as it is: geometric mean over the concurrencies, with its interval."""

    value: float
    low: float
    high: float

    @property
    def is_better(self) -> bool:
        """Whether it is faster beyond chance."""
        return self.low > 1


@dataclass(frozen=True)
class Tried:
    """What came of one choice.

    :ivar score: ``None`` when there is none to go by: it was refused, it failed, its run is not valid, or no request
        kept the limits.
    :ivar entry: id in the ledger.
    """

    choice: dict[str, str]
    result: str
    score: Score | None
    why: str
    entry: str


class Bench(Protocol):
    """What a search needs of the world: the launches behind the choices."""

    def refusal(self, choice: Choice) -> Entry | None:
        """Return the entry of a choice that need not be started: the plan refuses it, or it has failed here before."""

    def compare(self, choice: Choice, is_decided: IsDecided) -> tuple[RunRecord | None, Entry]:
        """Measure a choice against the recipe as it is; a failed start gives no run.

        :param is_decided: asked after each round; true ends the trial.
        :raises TuneError: the recipe as it is does not start, or fails while it is measured.
        :raises BwError: what ended the trial would end the others, too: a prompt, a disk, a port.
        """


@dataclass
class Tuning:
    """A search.

    :ivar name: under which its trials are in the ledger.
    :ivar search: digest of what is measured and how, beside the space: launch, host, prompts, load, metric.
    :ivar budget_s: no trial begins after this.
    :ivar most: at most so many trials, those of an earlier run of this search counted.
    :ivar limits: what a request must keep to count as good, for the metric ``goodput``.
    :ivar tell: called with each result.
    """

    name: str
    space: Space
    bench: Bench
    ledger: Ledger
    metric: Metric = "tok/s"
    limits: Limits = field(default_factory=Limits)
    within: float = 0.03
    budget_s: float = 7200.0
    most: int = 64
    tell: Callable[[Tried, int], None] = lambda _tried, _count: None
    search: str = ""
    tried: dict[str, Tried] = field(default_factory=dict)

    def run(self) -> list[Tried]:
        """Search until the budget, the trials or the choices end; return what was tried, the best first.

        :raises TuneError: the recipe as it is cannot be measured, or another search has this name.
        :raises BwError: something that is no choice's fault ended a trial.
        """
        study = self._study()
        for tried in self._earlier():
            self._learn(study, tried)
        waiting = [choice for choice in self.space.neighbours() if spaces.key(choice) not in self.tried]
        began = time.monotonic()
        while len(self.tried) < self.most and time.monotonic() - began < self.budget_s:
            choice = waiting.pop(0) if waiting else self._next(study)
            if choice is None:
                break
            tried = self._try(choice)
            self._learn(study, tried)
            self.tell(tried, len(self.tried))
        return ranked(self.tried.values())

    def is_decided(self, ratios: Sequence[Ratio], blocks: Sequence[Block]) -> bool:
        """Tell whether a trial can end: it loses to the best so far beyond chance, or its interval is narrow.

        Both by the metric's own score; a trial in which no request of either side was good has nothing to decide.
        """
        if not ratios or min(one.rounds for one in ratios) < stats.LEAST_ROUNDS:
            return False
        said = self._rounds(ratios, blocks)
        now = self._score(ratios, blocks)
        if not said or now is None or min(said) < stats.LEAST_ROUNDS:
            return not said
        best = max((tried.score.low for tried in self.tried.values() if tried.score), default=0.0)
        return now.high < max(best, 1.0) or (now.high - now.low) / 2 / now.value <= self.within

    def _try(self, choice: dict[str, str]) -> Tried:
        if (entry := self.bench.refusal(choice)) is not None:
            entry = entry.model_copy(update=self._mark(choice))
            self.ledger.add(entry)
            return _of_entry(choice, entry, None)
        run, entry = self.bench.compare(choice, self.is_decided)
        outcome = run.outcome if run else None
        score = self._score(outcome.ratios, run.blocks) if run and outcome and outcome.valid else None
        if outcome and outcome.valid and score is None:
            entry = entry.model_copy(update={"summary": f"{entry.summary}; no request kept the limits"})
        numbers = {"score": Number(value=score.value, low=score.low, high=score.high)} if score else {}
        entry = entry.model_copy(update={**self._mark(choice), "numbers": {**entry.numbers, **numbers}})
        self.ledger.add_all([entry], [run] if run else [])
        return _of_entry(choice, entry, score)

    def _score(self, ratios: Sequence[Ratio], blocks: Sequence[Block]) -> Score | None:
        if self.metric == "tok/s":
            score = combined([Score(one.value, one.low, one.high) for one in ratios])
        else:
            found = [_goodput(blocks, one.concurrency, self.limits) for one in ratios]
            score = combined([one for one in found if one])
        if score and min(self._rounds(ratios, blocks)) < stats.LEAST_ROUNDS:  # too few to win or to lose
            return replace(score, low=min(score.low, 1.0), high=max(score.high, 1.0))
        return score

    def _rounds(self, ratios: Sequence[Ratio], blocks: Sequence[Block]) -> list[int]:
        """Return how many rounds say something by the metric, for each concurrency at which some do."""
        if self.metric == "tok/s":
            return [one.rounds for one in ratios]
        found = (len(_good_rounds(blocks, one.concurrency, self.limits)) for one in ratios)
        return [count for count in found if count]

    def _mark(self, choice: Choice) -> dict[str, object]:
        """Return the fields by which a trial is found again."""
        return {"study": self.name, "search": self._identity, "params": dict(choice)}

    @property
    def _identity(self) -> str:
        return f"{self.space.digest}-{self.search}"

    def _earlier(self) -> list[Tried]:
        found = []
        for entry in self.ledger.select(Query(study=self.name)):
            if entry.search != self._identity:
                raise TuneError(
                    f"the study {self.name} has trials of another search, {entry.id} for one",
                    hint="Its recipe, engine, space, prompts, load or metric differ: take another name with --study.",
                )
            if entry.result == "interrupted":
                continue
            number = entry.numbers.get("score")
            known = number is not None and number.low is not None and number.high is not None
            score = Score(number.value, number.low, number.high) if known else None  # type: ignore[union-attr, arg-type]
            found.append(_of_entry(entry.params, entry, score))
        return found

    def _study(self) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(seed=_SEED, multivariate=True)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        study.add_trial(self._trial(self.space.as_is, Score(1.0, 1.0, 1.0)))
        return study

    def _learn(self, study: optuna.Study, tried: Tried) -> None:
        self.tried[spaces.key(tried.choice)] = tried
        if set(tried.choice) == set(self.space.as_is):
            study.add_trial(self._trial(tried.choice, tried.score))

    def _trial(self, choice: Choice, score: Score | None) -> optuna.trial.FrozenTrial:
        return create_trial(
            params=dict(choice),
            distributions=self._distributions(),
            value=math.log(score.value) if score else None,
            state=TrialState.COMPLETE if score else TrialState.FAIL,
        )

    def _distributions(self) -> dict[str, optuna.distributions.BaseDistribution]:
        return {setting.name: CategoricalDistribution(setting.values) for setting in self.space.settings}

    def _next(self, study: optuna.Study) -> dict[str, str] | None:
        """Return what Optuna would try and nobody has; ``None`` when everything was tried."""
        as_is = spaces.key(self.space.as_is)
        for _ in range(_ASKS):
            trial = study.ask(self._distributions())
            choice: dict[str, str] = dict(trial.params)
            study.tell(trial, state=TrialState.FAIL)  # its result is added as a trial of its own, by _learn
            if spaces.key(choice) not in (*self.tried, as_is):
                return choice
        rest = (choice for choice in self.space.choices() if spaces.key(choice) not in (*self.tried, as_is))
        return next(rest, None)


class Trial(Experiment):
    """A comparison that ends as soon as it is decided: by the search, which knows its metric."""

    is_decided: IsDecided = staticmethod(lambda _ratios, _blocks: False)

    def _is_enough(self, number: int, ratios: Sequence[Ratio]) -> bool:
        even = number % 2 == 0  # so that neither arm was first more often
        return number >= MOST_ROUNDS or (even and self.is_decided(ratios, self.blocks))


def ranked(tried: Iterable[Tried]) -> list[Tried]:
    """Return the best first; what has no score last."""
    return sorted(tried, key=lambda one: one.score.value if one.score else -1.0, reverse=True)


def best(tried: Iterable[Tried]) -> Tried | None:
    """Return the choice that is fastest, and faster than the recipe beyond chance; ``None`` when there is none."""
    return next((one for one in ranked(tried) if one.score and one.score.is_better), None)


def combined(scores: Sequence[Score]) -> Score | None:
    """Return the geometric mean of scores; its interval is at least as wide as it would be with independent errors.

    :return: ``None`` of none.
    """
    if not scores:
        return None
    logs = [[math.log(value) for value in (one.value, one.low, one.high)] for one in scores]
    value, low, high = (math.exp(sum(column) / len(logs)) for column in zip(*logs, strict=True))
    return Score(value, low, high)


def _goodput(blocks: Sequence[Block], concurrency: int, limits: Limits) -> Score | None:
    """Return goodput of B over A: requests a second that kept the limits, round against round.

    :return: ``None`` when fewer than two rounds say something.
    """
    rounds = _good_rounds(blocks, concurrency, limits)
    if len(rounds) < 2:
        return None
    # Half a request stands for none beside some: a ratio needs a number.
    logs = np.array([[math.log(max(count, 0.5) / seconds) for count, seconds in pair] for pair in rounds])
    found = stats.ratio(logs[:, 1:] - logs[:, :1])
    return Score(found.value, found.low, found.high)


def _good_rounds(
    blocks: Sequence[Block], concurrency: int, limits: Limits
) -> list[tuple[tuple[int, float], tuple[int, float]]]:
    """Return requests that kept the limits, and seconds, of A and of B in each round.

    A round in which neither side had a good request says nothing of their ratio, and is left out.
    """
    good: dict[str, list[tuple[int, float]]] = {"A": [], "B": []}
    for block in blocks:
        if block.concurrency == concurrency:
            good[block.arm].append((sum(limits.met(row) for row in block.rows), block.seconds))
    return [(a, b) for a, b in zip(good["A"], good["B"], strict=False) if a[0] or b[0]]


def _of_entry(choice: Choice, entry: Entry, score: Score | None) -> Tried:
    unsound = entry.failed or entry.result == "invalid"
    why = entry.evidence[0] if unsound and entry.evidence else entry.summary
    return Tried(dict(choice), entry.result, score, why, entry.id)


def guard(error: BwError) -> TuneError:
    """Return the error of a search whose recipe does not start as it is."""
    return TuneError(f"the recipe as it is cannot be measured: {error.message}", hint=error.hint or "Serve it first.")
