"""The servers of a search: the recipe as it is, and one choice after the other beside it or in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sglang_bw.errors import BwError, EngineStartError
from sglang_bw.experiment import arm as arms
from sglang_bw.experiment import space as spaces
from sglang_bw.experiment import tune
from sglang_bw.experiment.ab import Watcher
from sglang_bw.experiment.arm import Arm, ArmPlan, Name, OnStart
from sglang_bw.experiment.head import head
from sglang_bw.experiment.pair import Pair
from sglang_bw.experiment.settings import Settings
from sglang_bw.experiment.space import Choice
from sglang_bw.experiment.tune import IsDecided
from sglang_bw.launch.command import Command
from sglang_bw.launch.engine import Engine
from sglang_bw.launch.journal import Attempt
from sglang_bw.ledger import runfile
from sglang_bw.ledger.entry import OF_THE_LAUNCH, Entry, of_run
from sglang_bw.ledger.failure import FailureClass
from sglang_bw.ledger.record import Host, RunRecord
from sglang_bw.ledger.runfile import RunFile
from sglang_bw.ledger.store import Ledger

# What may end the trial of a choice and say something about it, beside what lay in its launch.
_OF_THE_CHOICE = (*OF_THE_LAUNCH, "wrong-arm", "prompts")


class KeptPair(Pair):
    """Both arms of a trial; where they run side by side, the baseline stays for the next trial."""

    def __init__(
        self,
        plans: tuple[ArmPlan, ArmPlan],
        start: Callable[[ArmPlan], Arm],
        *,
        together: bool,
        kept: dict[Name, Arm],
    ) -> None:
        super().__init__(plans, start, together=together)
        self._running.update(kept)
        self._kept = kept
        self._met: set[Name] = set()

    def use(self, name: Name) -> tuple[Arm, bool]:
        """Return an arm that runs, and whether this trial has not seen it yet."""
        arm, is_new = super().use(name)
        is_new = is_new or name not in self._met
        self._met.add(name)
        return arm, is_new

    def close(self) -> None:
        """Stop what runs, but for a baseline that can stay."""
        if self.together and (baseline := self._running.pop("A", None)):
            self._kept["A"] = baseline
        super().close()


@dataclass
class ServerBench:
    """Real servers on this machine.

    :ivar build: the launch of a choice on a port.
    :ivar forbids: why the plan would not start a launch; an empty string when it would.
    :ivar ports: of the recipe as it is, and of the choices.
    :ivar folder: for run files and engine logs.
    :ivar together: both servers fit beside each other.
    :ivar retry: start again what has failed here before.
    """

    recipe: str
    engine: Engine
    host: Host
    ledger: Ledger
    build: Callable[[Choice, int], Command]
    forbids: Callable[[Command], str]
    settings: Settings
    ports: tuple[int, int]
    folder: Path
    timeout_s: float
    on_start: OnStart
    watcher: Watcher
    together: bool
    retry: bool = False
    kept: dict[Name, Arm] = field(default_factory=dict)

    def refusal(self, choice: Choice) -> Entry | None:
        """Return the entry of a choice that the plan refuses, or that has failed on this host before."""
        attempt = self._attempt(choice)
        if problem := self.forbids(attempt.command):
            return attempt.entry(
                "refused",
                kind="trial",
                failure=FailureClass.REFUSED,
                summary="the plan refuses it",
                evidence=(problem,),
            )
        failures = [] if self.retry else self.ledger.known_failures(attempt.launch, self.host.fingerprint)
        if failures:
            last = failures[-1]
            return attempt.entry(
                "refused",
                kind="trial",
                failure=last.failure,
                summary=f"it has failed on this host before: {last.id}",
                evidence=last.evidence[:1] or (last.summary,),
            )
        return None

    def compare(self, choice: Choice, is_decided: IsDecided) -> tuple[RunRecord | None, Entry]:
        """Measure a choice; see :class:`sglang_bw.experiment.tune.Bench`."""
        attempt = self._attempt(choice)
        plans = (self._plan("A", {}, self.ports[0]), self._plan("B", choice, self.ports[1]))
        begin = head(plans, self.engine, self.settings, recipe=self.recipe).model_copy(update={"command": "trial"})
        path = self.folder / f"{begin.id}.jsonl"
        file = RunFile(path)
        pair = KeptPair(plans, self._start, together=self.together, kept=self.kept)
        try:
            trial = tune.Trial(begin, pair, self.settings, file, self.watcher)
            trial.is_decided = is_decided
            trial.run()
        except BwError as error:
            return None, self._failed(attempt, error, path)
        finally:
            pair.close()
        run = runfile.read(path)
        return run, of_run(run, artefacts=(str(path),))

    def close(self) -> None:
        """Stop the baseline."""
        arms.stop(self.kept.values())
        self.kept.clear()

    def _start(self, plan: ArmPlan) -> Arm:
        log = self.folder / f"{plan.name}-{plan.url.rpartition(':')[2]}.log"
        return arms.start(plan, self.engine, log, self.timeout_s, self.on_start)

    def _plan(self, name: Name, choice: Choice, port: int) -> ArmPlan:
        command = self.build(choice, port)
        words = self.recipe if name == "A" else f"{self.recipe} with {spaces.says(choice)}"
        return ArmPlan(name, words, command.url, command, api_key=command.api_key, recipe=self.recipe)

    def _attempt(self, choice: Choice) -> Attempt:
        changes = {name: ("as is", value) for name, value in choice.items() if value != spaces.AS_IS}
        command = self.build(choice, self.ports[1])
        return Attempt(self.recipe, command, self.engine.installation, self.host, spaces.says(choice), changes)

    def _failed(self, attempt: Attempt, error: BwError, path: Path) -> Entry:
        """Return the entry of a choice that failed; what was no choice's fault ends the search.

        :raises BwError: the recipe as it is failed, or what ended the trial would end the others, too: a prompt, a
            disk, a port.
        """
        run = runfile.read(path)
        outcome = run.outcome
        is_of_launch = outcome is not None and outcome.failure in OF_THE_LAUNCH
        if outcome is None or outcome.arm != "B" or outcome.failure not in _OF_THE_CHOICE:
            self.ledger.add_run(run, artefacts=(str(path),))  # no trial of the search: it is of no choice
            if is_of_launch:
                raise tune.guard(error) from error
            raise error
        starts = isinstance(error, EngineStartError)
        return attempt.entry(
            "failed",
            kind="trial",
            launch=attempt.launch if is_of_launch else None,  # a prompt that does not fit says nothing of others
            failure=of_run(run).failure,
            summary="it does not start" if starts else "it fails while it is measured",
            evidence=(error.message,),
            artefacts=(str(path),),
        )
