"""Speeds with and without speculation in a recipe's evidence, where they are of the launch that is planned."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_bw.errors import UnknownBoardError
from sglang_bw.host import boards
from sglang_bw.plan.question import Question
from sglang_bw.plan.settings import EngineSettings
from sglang_bw.plan.shapes import Parallel
from sglang_bw.plan.speculation import Cell, Verdict
from sglang_bw.plan.speculation.cost import Ratio, RoundCost
from sglang_bw.plan.speculation.tables import parameters
from sglang_bw.recipes import flags
from sglang_bw.recipes.evidence import Evidence

_SPEEDS = {"tok_s", "tok_s_plain", "concurrency"}
# Contexts within this factor of the one that was measured count as the same.
_NEAR = 1.5
_EDITION = re.compile(r"\s+(server|workstation|max-q)\b.*", re.IGNORECASE)


@dataclass(frozen=True)
class Seen:
    """What speculation brought, once.

    :ivar contexts: shortest and longest context for which it counts.
    :ivar accept_length: tau beside it; ``None`` when it was not noted.
    """

    steps: int
    concurrency: int
    contexts: tuple[float, float]
    plain: float
    speed: float
    accept_length: float | None
    source: str

    @property
    def speedup(self) -> float:
        """Speed with speculation over speed without."""
        return self.speed / self.plain

    @property
    def basis(self) -> str:
        """Where it comes from, for the reader."""
        told = f"{self.plain:g} tok/s without and {self.speed:g} with it, {self.concurrency} at once"
        return f"the recipe's evidence, {told} ({self.source})"

    def covers(self, context: int, concurrency: int) -> bool:
        """Return whether a cell is the one that was measured."""
        return self.concurrency == concurrency and self.contexts[0] <= context <= self.contexts[1]


def speeds(question: Question, settings: EngineSettings, division: Parallel) -> tuple[Seen, ...]:
    """Return what was measured of this launch: same models, draft steps, board, number of GPUs and engine."""
    if not _is_the_recipes(question, settings):
        return ()
    longest = max((load.context for load in question.recipe.workloads), default=0)
    return tuple(
        _read(row, longest)
        for row in question.recipe.evidence
        if row.numbers.keys() >= _SPEEDS
        and min(row.numbers[name] for name in _SPEEDS) > 0
        and row.numbers.get("draft_steps") == settings.steps
        and row.engine.lower().startswith("sglang")
        and _same_board(row.hardware, question, division)
    )


def _is_the_recipes(question: Question, settings: EngineSettings) -> bool:
    """Return whether the launch speculates as its recipe does; flags behind ``--`` may change that."""
    recipe = question.recipe
    spec = recipe.on(question.machine).spec
    models = [(recipe.target, "model-path"), (recipe.draft, "speculative-draft-model-path")]
    named = [(known.id, flags.value(question.flags, name)) for known, name in models if known and known.id]
    return (
        spec is not None
        and (spec.steps, spec.topk) == (settings.steps, settings.topk)
        and all(known == given for known, given in named)
    )


def _same_board(hardware: str, question: Question, division: Parallel) -> bool:
    try:
        count, board = boards.parse_gpus(_EDITION.sub("", hardware))
    except UnknownBoardError:
        return False
    fabric = question.machine.fabric
    return board.name == question.board.name and count == division.gpus and fabric in ("", board.fabric)


def _read(row: Evidence, longest: int) -> Seen:
    """Read a row; one that does not name its context counts for those that the recipe is meant for."""
    numbers = row.numbers
    context = numbers.get("context_tokens")
    return Seen(
        steps=int(numbers["draft_steps"]),
        concurrency=int(numbers["concurrency"]),
        contexts=(context / _NEAR, context * _NEAR) if context else (0, longest),
        plain=numbers["tok_s_plain"],
        speed=numbers["tok_s"],
        accept_length=numbers.get("accept_length"),
        source=row.source,
    )


@dataclass(frozen=True)
class SeenCost:
    """R as a measurement with these draft steps has it, tau / S; other steps cost in proportion as ``rest`` says."""

    rest: RoundCost
    row: Seen
    accept_length: float

    def ratio(self, context: int, concurrency: int, steps: int) -> Ratio:
        """Return R at ``context`` tokens a request, ``concurrency`` requests and ``steps`` draft steps."""
        found, same = (self.rest.ratio(context, concurrency, count) for count in (steps, self.row.steps))
        # What was measured on this very host has the last word: its all-reduces may forbid it.
        if found.ratio is None or same.ratio is None or found.reason:
            return found
        measured = (self.row.accept_length or self.accept_length) / self.row.speedup
        return Ratio(measured * found.ratio / same.ratio, parameters().sigma["measured"], self.row.basis)


def held_against(cell: Cell, rows: tuple[Seen, ...]) -> Cell:
    """Return a cell that nobody measured, left open when the measured ones beside it say the opposite."""
    if cell.speedup is None or cell.verdict is Verdict.UNDECIDED:
        return cell
    for row in _beside(cell.concurrency, rows):
        if (row.speedup - 1) * (cell.speedup.mid - 1) < 0:
            told = f"the evidence is on the other side of 1: {row.speedup:.2f} with {row.concurrency} at once"
            return replace(cell, verdict=Verdict.UNDECIDED, reason=told)
    return cell


def _beside(concurrency: int, rows: tuple[Seen, ...]) -> Iterator[Seen]:
    """Yield the nearest measurements with as many requests or fewer, and with as many or more."""
    fewer = [row for row in rows if row.concurrency <= concurrency]
    more = [row for row in rows if row.concurrency >= concurrency]
    nearest = [max((row.concurrency for row in fewer), default=0), min((row.concurrency for row in more), default=0)]
    yield from (row for row in rows if row.concurrency in nearest)
