"""A plan: what the engine will do, whether it fits, what is known not to run, whether speculation pays."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sglang_bw.errors import BwError, OtherEngineError, PlanDoesNotFitError, PlanInputError, PlanRefusedError
from sglang_bw.plan import memory, models, numbers, releases, settings
from sglang_bw.plan import resolve as resolver
from sglang_bw.plan.fraction import restate
from sglang_bw.plan.instead import allowed
from sglang_bw.plan.memory import Alternative, MemoryLedger
from sglang_bw.plan.models import Models
from sglang_bw.plan.pays import Measured, Pays, judge
from sglang_bw.plan.question import Question, asked
from sglang_bw.plan.resolution import Resolution
from sglang_bw.plan.resolve import EngineTooOldError
from sglang_bw.plan.rules import check as rules
from sglang_bw.plan.rules import facts
from sglang_bw.plan.rules.check import Finding
from sglang_bw.plan.settings import EngineSettings, from_resolved, parallel_of
from sglang_bw.plan.shapes import Parallel
from sglang_bw.recipes import flags
from sglang_bw.recipes import releases as flag_releases
from sglang_bw.recipes.releases import Translation

Tell = Callable[[str], None]
_SIZES = ("nnodes", "tp_size", "pp_size", "ep_size", "dp_size", "attn_dp_size")
Ask = Literal["run", "cached", "no"]
_PLAIN_NOTE = "restated, not run"


@dataclass(frozen=True)
class Demand:
    """Requests that shall run at the same time.

    :ivar resident: how many of them the pool and the engine's limit hold.
    """

    name: str
    context: int
    concurrency: int
    resident: int


@dataclass(frozen=True)
class Plan:
    """The answer to a question.

    :ivar translations: flags that this engine release does not take as they are written.
    :ivar resolution: ``restated`` when the engine could not be asked, or was not.
    :ivar pays: where speculation pays; ``None`` without any.
    :ivar misfits: in what the machine differs from the recipe's.
    :ivar notes: how well all this is known.
    :ivar seconds: how long it took.
    """

    question: Question
    models: Models
    resolution: Resolution
    translations: tuple[Translation, ...]
    findings: tuple[Finding, ...]
    ledger: MemoryLedger
    alternatives: tuple[Alternative, ...] = ()
    pays: Pays | None = None
    misfits: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def demands(self) -> tuple[Demand, ...]:
        """The traffic that was asked about, or the recipe's workloads."""
        question, pool = self.question, self.ledger
        if question.context or question.concurrency:
            context = question.context or pool.context
            asked_for = [("asked", context, question.concurrency or 1)]
        else:
            asked_for = [(load.name, load.context, load.concurrency) for load in question.recipe.workloads]
        return tuple(
            Demand(name, context, wanted, min(wanted, self._held(context))) for name, context, wanted in asked_for
        )

    def _held(self, context: int) -> int:
        """Return the requests of a context that run at once: none where the launch takes none so long."""
        pool = self.ledger
        if context > (pool.settings.context_length or math.inf):
            return 0
        return min(pool.max_requests, pool.kv_tokens // context)

    @property
    def refusals(self) -> tuple[str, ...]:
        """What will not run, in sentences."""
        found = [f"{finding.rule}: {finding.reason}" for finding in self.findings if finding.severity == "error"]
        found += [translation.reason for translation in self.translations if translation.breaks]
        if refusal := self.resolution.refusal:
            found.append(f"sglang {self.resolution.engine} refuses it ({refusal.rule}): {refusal.message}")
        return tuple(found)

    def error(self) -> BwError | None:
        """Return why the launch should not be tried, or ``None``."""
        reasons = self.ledger.reasons if self.ledger.verdict == "does not fit" else ()
        if not (reasons or self.refusals):
            return None
        heads = [head for head, found in (("does not fit", reasons), ("will not run", self.refusals)) if found]
        message = [f"this launch {' and '.join(heads)}:", *(f"  {line}" for line in (*reasons, *self.refusals))]
        kind = PlanDoesNotFitError if reasons else PlanRefusedError
        hint = "The plan shows what would fit, and the fix of each rule. --force goes on all the same."
        return kind("\n".join(message), hint=hint)

    @property
    def verdict(self) -> str:
        """``fits``, ``tight``, ``does not fit`` or ``refused``."""
        fits = self.ledger.verdict != "does not fit"
        return "refused" if self.refusals and fits else self.ledger.verdict

    def as_json(self) -> dict[str, Any]:
        """Return everything, for programs."""
        question = self.question
        error = self.error()
        return {
            "recipe": question.recipe.id,
            "engine": question.engine.version,
            "machine": {
                "gpus": question.machine.count,
                "board": question.board.name,
                "arch": question.board.arch,
                "memory_mib": question.board.memory_mib,
                "fabric": question.machine.fabric,
            },
            "argv": flags.tokens(question.flags),
            "env": dict(question.env),
            "verdict": self.verdict,
            "exit_code": error.exit_code if error else 0,
            "refusals": list(self.refusals),
            "resolution": self.resolution.as_json(),
            "flags": [translation.as_json() for translation in self.translations],
            "findings": [finding.as_json() for finding in self.findings],
            "memory": self.ledger.to_json(),
            "demands": [vars(demand) for demand in self.demands],
            "alternatives": [
                {
                    "title": other.title,
                    "flags": other.flags,
                    "problem": other.problem,
                    "warned_by": list(other.warned),
                    "memory": other.ledger.to_json() if other.ledger else None,
                }
                for other in self.alternatives
            ],
            "speculation": self.pays.as_json() if self.pays else None,
            "misfits": list(self.misfits),
            "warnings": list(question.warnings),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 2),
        }


def make(
    question: Question,
    *,
    ask: Ask,
    force: bool = False,
    measured: Measured | None = None,
    tell: Tell = lambda _line: None,
) -> Plan:
    """Plan a launch.

    :param ask: whether the engine's own resolution may run, which takes seconds; or only be read if it ran before.
    :param force: go on with a recipe that is for another engine.
    :param measured: what the user measured on the host.
    :raises OtherEngineError: the recipe is for another engine.
    :raises PlanInputError: the launch contradicts the machine, or a model is unknown.
    :raises CheckpointError: a configuration lacks fields, or sizes contradict each other.
    :raises SpeculationInputError: a file of measurements is none.
    """
    begun = time.monotonic()
    notes = list(question.notes)
    if not question.recipe.engine.accepts(question.engine.version):
        notes.append(_other_engine(question, force=force))
    numbers.check(asked(question.flags))
    known = models.read(question)
    notes += known.notes
    if untested := question.recipe.composition.untested:
        notes.append(f"never run together: {untested}")
    resolution = _resolve(question, known, ask=ask, notes=notes, tell=tell)
    translations = flag_releases.translate_all(question.flags, None, question.engine.version)
    if not flag_releases.known(question.engine.version):
        notes.append(
            f"the flags of sglang {question.engine.version} were not read; those of the nearest older release count"
        )
    division = parallel_of(resolution.effective or asked(question.flags))
    _check_machine(question, division)
    memory_settings = _settings(question, known, resolution, division)
    ledger, others = _memory(question, known, division, memory_settings)
    known_facts = _facts(question, known, resolution)
    return Plan(
        question=question,
        models=known,
        resolution=resolution,
        translations=tuple(found for found in translations if found.fate is not flag_releases.Fate.SAME),
        findings=rules.check(known_facts),
        ledger=ledger,
        alternatives=allowed(others, known_facts),
        pays=judge(question, known, ledger, division, measured or Measured()),
        misfits=tuple(question.recipe.hardware.misfits(question.machine)),
        notes=tuple(notes),
        seconds=time.monotonic() - begun,
    )


def _other_engine(question: Question, *, force: bool) -> str:
    told = f"the recipe {question.recipe.id} is for sglang {question.recipe.engine.sglang}"
    told += f", and this plan for {question.engine.version}"
    if not force:
        raise OtherEngineError(told, hint="`sglang-bw install` installs the newest engine; --force plans all the same.")
    return told


def _resolve(question: Question, known: Models, *, ask: Ask, notes: list[str], tell: Tell) -> Resolution:
    engine = question.engine
    plain = Resolution(asked(question.flags), asked(question.flags), source="restated", engine=engine.version)
    if engine.files is None:
        notes.append(f"{_PLAIN_NOTE}: sglang {engine.version} is not installed here, so its formulas are restated")
        return plain
    missing = [name for name in _model_names(question) if name not in known.folders]
    if missing and ask != "no":
        notes.append(f"{_PLAIN_NOTE}: the engine needs the config.json of {', '.join(missing)} on this disk")
        return plain
    found = None
    if ask != "no":
        try:
            found = resolver.resolve(
                flags.tokens(question.flags),
                question.board,
                question.machine.count,
                known.folders,
                engine.files,
                env=question.env,
                only_cached=ask == "cached",
                tell=tell,
            )
        except EngineTooOldError:
            notes.append(f"{_PLAIN_NOTE}: sglang {engine.version} is older than 0.5.19, the first to be resolved so")
            return plain
    if found is None:
        notes.append(f"{_PLAIN_NOTE}: the engine was not asked, its formulas are restated")
    return found or plain


def _model_names(question: Question) -> list[str]:
    names = [flags.value(question.flags, "model-path"), flags.value(question.flags, "speculative-draft-model-path")]
    return [name for name in names if name]


def _check_machine(question: Question, division: Parallel) -> None:
    said = asked(question.flags)
    wrong = [f"--{name.replace('_', '-')} {said[name]}" for name in _SIZES if name in said and not _is_size(said[name])]
    if wrong:
        raise PlanInputError(f"not a number of GPUs: {', '.join(wrong)}", hint="Sizes are whole numbers from 1 on.")
    # The older spelling counts groups of attention with it, which share the GPUs of tensor parallelism.
    replicas = 1 if said.get("enable_dp_attention") else said.get("dp_size", 1)
    nodes = said.get("nnodes", 1)
    if (needed := math.ceil(division.gpus * replicas / nodes)) > question.machine.count:
        shape = f"tp {division.tp} x pp {division.pp}" + (f" x dp {replicas}" if replicas > 1 else "")
        each = f" on each of {nodes} nodes" if nodes > 1 else ""
        raise PlanInputError(
            f"the launch is for {needed} GPUs{each} ({shape}), and there are {question.machine.count}",
            hint="--gpus says how many there are; --tp-size behind '--' how many the launch takes.",
        )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _settings(question: Question, known: Models, resolution: Resolution, division: Parallel) -> EngineSettings:
    release = releases.parse(question.engine.version)
    target, draft = known.target.shape, known.draft.shape if known.draft else None
    if resolution.source == "restated" or resolution.refusal:
        return restate(asked(question.flags), target, draft, question.board, division, release)
    default = "mem_fraction_static" not in resolution.asked
    return from_resolved(resolution.effective, release, context=target.context, fraction_is_default=default)


def _memory(
    question: Question, known: Models, division: Parallel, chosen: settings.EngineSettings
) -> tuple[MemoryLedger, tuple[Alternative, ...]]:
    target, draft = known.target, known.draft
    weights = memory.Weights(target.inventory, draft.inventory if draft else None)
    shapes = (target.shape, draft.shape if draft else None, question.board, division, chosen)
    # A launch may take shorter requests than those its recipe was written for; then its longest shall fit.
    limit = chosen.context_length or math.inf
    loads = [load.context for load in question.recipe.workloads]
    context = question.context or (int(min(limit, max(loads))) if loads else None)
    made = memory.ledger(*shapes, weights=weights, context=context)
    if context and context > limit:  # nothing that memory decides helps there
        return made, ()
    return made, tuple(memory.alternatives(*shapes, weights=weights, context=context))


def _facts(question: Question, known: Models, resolution: Resolution) -> facts.Facts:
    return facts.collect(
        machine=question.machine,
        board_mib=question.board.memory_mib,
        flags=question.flags,
        env=question.env,
        config=known.target.config,
        draft_config=known.draft.config if known.draft else None,
        engine=question.engine.version,
        patches=question.engine.patches,
        resolution=resolution if not resolution.refusal else None,
    )
