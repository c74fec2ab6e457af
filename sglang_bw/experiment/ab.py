"""A baseline (A) and a treatment (B), measured in alternating blocks until the interval is narrow enough."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

from sglang_bw.errors import ArmError, BwError, EngineStartError, LoadError, PromptsError
from sglang_bw.experiment import arm as arms
from sglang_bw.experiment import blocks, load, stats, verdict
from sglang_bw.experiment.arm import Arm, Name
from sglang_bw.experiment.client import StreamFailedError
from sglang_bw.experiment.pair import Pair
from sglang_bw.experiment.prompts import Prompt
from sglang_bw.experiment.settings import Settings
from sglang_bw.launch import secret
from sglang_bw.launch.server import PortLostError
from sglang_bw.ledger.record import ArmRecord, Block, Outcome, Ratio, RunRecord
from sglang_bw.ledger.runfile import RunFile

LEAST_ROUNDS = 6
MOST_ROUNDS = 40
_OTHER_KV_POOL = 0.05


class Watcher(Protocol):
    """Is told what goes on, for a progress display."""

    def block(self, name: Name, round_number: int, concurrency: int, total: int) -> None:
        """Begin of a block of ``total`` requests; also the warm-up's, with ``round_number`` -1."""

    def answered(self, count: int) -> None:
        """So many requests of the block are answered."""

    def round_over(self, rounds: int, ratios: Sequence[tuple[int, float, float]]) -> None:
        """After a round: concurrency, ratio and half-width of each."""


class Experiment:
    """One run, from the first start to the outcome; what is finished is on the disk."""

    def __init__(self, head: RunRecord, pair: Pair, settings: Settings, file: RunFile, watcher: Watcher) -> None:
        self.head = head
        self.pair = pair
        self.settings = settings
        self.file = file
        self.watcher = watcher
        self.blocks: list[Block] = []
        self._known: dict[str, ArmRecord] = {}
        self._warnings: list[str] = []
        self._at: Name | None = None

    def run(self) -> Outcome:
        """Measure, and return the outcome, which is written as well.

        :raises BwError: a server failed, or an arm is not what it is meant to be.

        Whatever ends it, a fault of this tool as well, the outcome is written.
        """
        self.file.write(self.head)
        try:
            self._rounds()
        except BaseException as error:
            if isinstance(error, BwError):  # it quotes the address, and is printed and recorded
                error.message, error.hint = map(secret.without_userinfo, (error.message, error.hint))
            self._end(*_failure(error))
            raise
        finally:
            self.pair.close()
        return self._end(None, None)

    def _rounds(self) -> None:
        together, asked = self.pair.together, time.monotonic()
        for name in _order(0) if together else _order(0)[:1]:
            self._enter(name)
        # Where arms take turns, each round loads one: the one that it begins with is there from the round before.
        began = time.monotonic()
        budget_s = self.settings.budget_s - (0.0 if together else began - asked)
        number, ratios, spent = 0, list[Ratio](), 0.0
        while not self._is_enough(number, ratios):
            if number and spent + spent / number > budget_s:
                self._warn(self._unfinished(number))
                return
            if self.pair.together:
                self._alternate(number)
            else:
                for name in _order(number):
                    self._visit(name, number)
            number += 1
            ratios = self._ratios()
            self.watcher.round_over(number, [(ratio.concurrency, ratio.value, ratio.half_width) for ratio in ratios])
            spent = time.monotonic() - began
        if self.settings.rounds is None and number >= MOST_ROUNDS and not self._is_narrow(ratios):
            self._warn(
                f"after {MOST_ROUNDS} rounds, the most that are made for --within, not every interval was within "
                f"{100 * self.settings.within:g} %; --rounds asks for more"
            )

    def _unfinished(self, number: int) -> str:
        """Return what the end of the budget left undone."""
        if self.settings.rounds is not None:
            return f"the budget ended after {number} of {self.settings.rounds} rounds; give it more time with --budget"
        return f"the budget ended before every interval was within {100 * self.settings.within:g} %"

    def _is_narrow(self, ratios: Sequence[Ratio]) -> bool:
        return all(ratio.half_width <= self.settings.within for ratio in ratios)

    def _is_enough(self, number: int, ratios: Sequence[Ratio]) -> bool:
        if self.settings.rounds is not None:
            return number >= self.settings.rounds
        if number % 2 or number < LEAST_ROUNDS:  # an even number, so that neither arm was first more often
            return False
        return number >= MOST_ROUNDS or self._is_narrow(ratios)

    def _visit(self, name: Name, number: int) -> None:
        """Measure the whole block of one arm: the other is not up."""
        arm = self._enter(name)
        for concurrency in self.settings.concurrencies:
            self._keep(self._measure(arm, number, concurrency, self.settings.prompts.prompts))

    def _alternate(self, number: int) -> None:
        """Measure a round of arms that are both up: a part of the block on one, on the other, then the next part.

        What disturbs a machine for seconds meets both arms then.
        """
        running = {name: self._enter(name) for name in _order(number)}
        for concurrency in self.settings.concurrencies:
            found: dict[Name, list[Block]] = {name: [] for name in _order(number)}
            for turn, part in enumerate(blocks.split(self.settings.prompts.prompts, concurrency)):
                for name in _order(number + turn):
                    found[name].append(self._measure(running[name], number, concurrency, part, flush=turn == 0))
            for parts in found.values():
                self._keep(blocks.joined(parts, len(self.blocks)))

    def _enter(self, name: Name) -> Arm:
        """Return an arm that runs, is what it should be, and is warm."""
        self._at = name
        arm, is_new = self.pair.use(name)
        if is_new:
            self._introduce(arm)
            for concurrency in self.settings.concurrencies:
                self._measure(arm, -1, concurrency, self.settings.prompts.prompts[: max(concurrency, 2)])
        return arm

    def _keep(self, block: Block) -> None:
        self.blocks.append(block)
        self.file.write(block)

    def _introduce(self, arm: Arm) -> None:
        """Write down what an arm is; one that was started again must be the same as before."""
        name, record = arm.plan.name, arm.record
        if (before := self._known.get(name)) and (changed := arms.difference(before, record)):
            raise ArmError(
                f"arm {name} is configured differently after a restart: {', '.join(changed)}",
                hint="Fix what changed by a flag, for example --set mem-fraction-static=0.8.",
            )
        if record.speculation:
            self.settings.refuse_noise(name)
        if before is None:
            self._known[name] = record
            a, b = (self._known.get(x.name, x) for x in self.head.arms)
            both = len(self._known) > 1
            self.head = self.head.model_copy(
                update={"arms": (a, b), "difference": arms.difference(a, b) if both else {}}
            )
            self.file.write(self.head)
            if both:
                self._compare_arms(a, b)

    def _compare_arms(self, a: ArmRecord, b: ArmRecord) -> None:
        if a.kv_tokens and b.kv_tokens and abs(a.kv_tokens / b.kv_tokens - 1) > _OTHER_KV_POOL:
            self._warn(f"the KV pools differ: {a.kv_tokens} and {b.kv_tokens} tokens")
        if a.graphs != b.graphs:
            self._warn(f"decode graphs: {a.graphs} in A, {b.graphs} in B")

    def _measure(
        self, arm: Arm, number: int, concurrency: int, prompts: Sequence[Prompt], *, flush: bool = True
    ) -> Block:
        try:
            return self._ask(arm, number, concurrency, prompts, flush=flush)
        except LoadError as error:
            if reason := self.pair.why(arm.plan.name):
                said = f"{reason}; seen as: {error.message}"
                raise StreamFailedError("server-died", said, hint=error.hint) from error
            raise

    def _ask(self, arm: Arm, number: int, concurrency: int, prompts: Sequence[Prompt], *, flush: bool) -> Block:
        settings = self.settings
        self._at = arm.plan.name
        if settings.flush and flush:
            arm.flush()
        self.watcher.block(arm.plan.name, number, concurrency, len(prompts))
        began = datetime.now(UTC)
        with arm.observed() as seen:
            found = load.run_block(
                arm.url,
                prompts,
                settings.sampling,
                concurrency,
                api_key=arm.plan.api_key,
                on_done=self.watcher.answered,
                adapts=arm.adapts,
            )
        return Block(
            arm=arm.plan.name,
            round=max(number, 0),
            position=len(self.blocks),
            concurrency=concurrency,
            began=began,
            seconds=found.seconds,
            rows=found.rows,
            spread_s=found.spread_s,
            client_lag_s=found.lag_s,
            client_cpu=found.cpu,
            kv_use=found.kv_use,
            gpu=seen.gpu,
            policy=found.policy,
            graph_share=seen.graph_share,
        )

    def _ratios(self) -> list[Ratio]:
        a, b = (self._known.get(x.name, x).speculation is not None for x in self.head.arms)
        found = (
            verdict.ratio(self.blocks, concurrency, self.settings.limits, (a, b))
            for concurrency in self.settings.concurrencies
        )
        return [ratio for ratio in found if ratio]

    def _end(self, failure: str | None, text: str | None) -> Outcome:
        ratios = self._ratios()
        self._look_at_the_client()
        if any(ratio.rounds < stats.LEAST_ROUNDS for ratio in ratios):
            self._warn(
                f"fewer than {stats.LEAST_ROUNDS} rounds: no verdict, an interval of so few contains the truth less "
                "often than it says"
            )
        broken = [ratio for ratio in ratios if verdict.is_broken(ratio)]
        drifted = [ratio for ratio in ratios if ratio.drifted]
        for ratio in broken:
            self._warn(
                f"R is {ratio.round_cost:.2f} at concurrency {ratio.concurrency}: a speculative round cannot cost less "
                "than a decode step; the baseline is broken (no decode graph? another load on the machine?)"
            )
        for ratio in drifted:
            self._warn(
                f"the baseline drifted at concurrency {ratio.concurrency}: to {ratio.drift:.3f} of its first speed by "
                "the last block, more than the interval; something else changed (clocks, heat, load)"
            )
        if not ratios and failure is None:
            self._warn("fewer than two rounds: there is no interval; give it more time with --budget")
        greedy = self.settings.sampling.temperature == 0 and not self.head.simulated
        outcome = Outcome(
            ended=datetime.now(UTC),
            valid=bool(ratios) and failure is None and not broken and not drifted,
            ratios=tuple(ratios),
            outputs=verdict.compare_outputs(self.blocks) if greedy else None,
            warnings=tuple(self._warnings),
            failure=failure,
            failure_text=text,
            arm=self._at if failure else None,
        )
        self.file.write(outcome)
        self.file.close()
        return outcome

    def _look_at_the_client(self) -> None:
        for concurrency in self.settings.concurrencies:
            blocks = [block for block in self.blocks if block.concurrency == concurrency]
            lag = statistics.median(block.client_lag_s for block in blocks) if blocks else 0.0
            cpu = statistics.median(block.client_cpu for block in blocks) if blocks else 0.0
            if load.is_slow(lag, cpu):
                self._warn(
                    f"the client may be the bottleneck at concurrency {concurrency}: its own work is late by "
                    f"{lag * 1000:.1f} ms, and it uses {cpu:.0%} of a core; free a core for it, or run it on another "
                    "machine with --url"
                )

    def _warn(self, text: str) -> None:
        self._warnings.append(text)


def _order(number: int) -> tuple[Name, Name]:
    return ("A", "B") if number % 2 == 0 else ("B", "A")


def _failure(error: BaseException) -> tuple[str, str]:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "interrupted by the user"
    text = error.message if isinstance(error, BwError) else f"{type(error).__name__}: {error}"
    if isinstance(error, StreamFailedError):
        return error.failure, text
    classes = (
        (PortLostError, "other"),
        (EngineStartError, "start-failed"),
        (ArmError, "wrong-arm"),
        (PromptsError, "prompts"),
    )
    return next((name for kind, name in classes if isinstance(error, kind)), "other"), text
