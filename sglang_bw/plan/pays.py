"""Does speculation pay for a launch: tau and R from what is known of it, a verdict for each context and concurrency."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_bw.errors import SpeculationInputError
from sglang_bw.plan import seen
from sglang_bw.plan.memory import MemoryLedger
from sglang_bw.plan.models import Models
from sglang_bw.plan.question import Question, asked
from sglang_bw.plan.shapes import Parallel
from sglang_bw.plan.speculation import Cell, Host, Verdict, accept_curve, probe, round_cost, served, verdicts
from sglang_bw.plan.speculation.accept import AcceptCurve, draft_kind
from sglang_bw.plan.speculation.cost import RoundCost
from sglang_bw.plan.speculation.sources import EVIDENCE
from sglang_bw.recipes import flags

_CONTEXTS = (1024, 16384, 65536)
_CONCURRENCIES = (1, 4, 16, 64)
_ALL_REDUCES_A_LAYER = 2
_COLUMNS = ("context", "concurrency", "tok_s")
_FORM = f"A CSV file with the columns {', '.join(_COLUMNS)}: tokens, requests, tokens per second of all together."


@dataclass(frozen=True)
class Measured:
    """What a user measured on the host; each is better than what ships with the tool.

    :ivar accept_log: the engine's log, or JSON lines of responses with ``meta_info``.
    :ivar decode: CSV of plain decoding: context (tokens), concurrency, tok_s (of all requests together).
    :ivar round_probe: result of ``probe round``.
    :ivar allreduce_probe: result of ``probe allreduce``.
    """

    accept_log: Path | None = None
    decode: Path | None = None
    round_probe: Path | None = None
    allreduce_probe: Path | None = None


@dataclass(frozen=True)
class Pays:
    """Where speculation pays.

    :ivar steps: draft steps of the launch.
    :ivar accept_source: where tau comes from.
    """

    steps: int
    accept_source: str
    cells: tuple[Cell, ...]

    @property
    def never(self) -> bool:
        """Whether speculation loses in every cell for which there is a verdict, and there is one."""
        decided = [cell for cell in self.cells if cell.verdict is not Verdict.UNDECIDED]
        return bool(decided) and all(cell.verdict is Verdict.LOSES for cell in decided)

    def at(self, context: int, concurrency: int) -> Cell | None:
        """Return one cell."""
        return next((cell for cell in self.cells if (cell.context, cell.concurrency) == (context, concurrency)), None)

    def as_json(self) -> dict[str, Any]:
        """Return everything, for programs."""
        return {
            "draft_steps": self.steps,
            "accept_length_from": self.accept_source,
            "cells": [cell.to_json() for cell in self.cells],
        }


def judge(
    question: Question, models: Models, ledger: MemoryLedger, division: Parallel, measured: Measured
) -> Pays | None:
    """Judge the speculation of a launch; ``None`` when it does not speculate.

    :raises SpeculationInputError: a file of measurements cannot be read, or says something impossible.
    """
    if not flags.has(question.flags, "speculative-algorithm"):
        return None
    steps = ledger.settings.steps or int(asked(question.flags).get("speculative_num_steps", 3))
    host = _host(question, division)
    accept = _accept(question, host, steps, measured)
    cost = _cost(host, models, measured)
    # What was measured on this host is better than what others measured of the same launch.
    here = measured.round_probe or measured.decode
    rows = () if here else seen.speeds(question, ledger.settings, division)
    cells = [
        _cell(context, width, accept, cost, rows, steps)
        for context in _contexts(question, ledger)
        for width in _concurrencies(question)
    ]
    return Pays(steps, accept.source, tuple(cells))


def _cell(
    context: int, width: int, accept: AcceptCurve, cost: RoundCost, rows: tuple[seen.Seen, ...], steps: int
) -> Cell:
    """Judge a cell: as its speeds were measured, or by the model where nobody measured them."""
    row = next((row for row in rows if row.covers(context, width)), None)
    if row is None:
        (cell,) = verdicts(accept, cost, [context], [width], steps)
        return seen.held_against(cell, rows)
    if row.accept_length and accept.source == EVIDENCE:
        accept = accept.through(steps, row.accept_length, sigma=accept.sigma, source=accept.source)
    (cell,) = verdicts(accept, seen.SeenCost(cost, row, accept.length(steps)), [context], [width], steps)
    return cell


def _host(question: Question, division: Parallel) -> Host:
    model = question.recipe.target.id or flags.value(question.flags, "model-path") or ""
    moe = flags.value(question.flags, "moe-runner-backend")
    engine = f"SGLang moe={moe}" if moe else "SGLang"
    board, fabric = question.board.name, question.machine.fabric
    return Host(model, engine, f"TP{division.tp}", board=board, fabric=fabric)


def _accept(question: Question, host: Host, steps: int, measured: Measured) -> AcceptCurve:
    draft = flags.value(question.flags, "speculative-draft-model-path") or ""
    if measured.accept_log:
        kind = draft_kind(draft or "mtp")
        return served.accept_curve(measured.accept_log, steps, kind=kind, model=host.model)
    lengths = _served_lengths(question, steps)
    return accept_curve(host.model, draft, measured=lengths or None)


def _served_lengths(question: Question, steps: int) -> dict[int, float]:
    """Return accept lengths of the recipe's evidence that were seen on served traffic: with a speed beside them."""
    found = [
        row.numbers["accept_length"]
        for row in question.recipe.evidence
        if {"accept_length", "tok_s"} <= row.numbers.keys() and row.numbers.get("draft_steps") == steps
    ]
    return {steps: sum(found) / len(found)} if found else {}


def _cost(host: Host, models: Models, measured: Measured) -> RoundCost:
    if measured.round_probe:
        return probe.round_cost(measured.round_probe)
    shape = models.target.shape
    reduce = None
    if measured.allreduce_probe:
        calls = _ALL_REDUCES_A_LAYER * shape.layers
        reduce = probe.allreduce(measured.allreduce_probe, calls=calls, hidden=shape.hidden)
    return round_cost(host, speeds(measured.decode) if measured.decode else None, reduce)


def speeds(path: Path) -> dict[tuple[int, int], float]:
    """Read plain decode speeds: (context, concurrency) -> tokens per second of all requests.

    :raises SpeculationInputError: it cannot be read, or a row is no measurement.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpeculationInputError(f"{path} cannot be read: {error}", hint=_FORM) from error
    if not rows or not set(_COLUMNS) <= set(rows[0]):
        raise SpeculationInputError(f"{path} has no plain decode speeds", hint=_FORM)
    found: dict[tuple[int, int], float] = {}
    for number, row in enumerate(rows, start=1):
        try:
            context, concurrency, speed = int(row["context"]), int(row["concurrency"]), float(row["tok_s"])
        except (TypeError, ValueError) as error:
            raise SpeculationInputError(f"{path}, row {number}: not a number: {error}", hint=_FORM) from error
        if context < 0 or concurrency < 1 or not (math.isfinite(speed) and speed > 0):
            raise SpeculationInputError(f"{path}, row {number}: {row} is no measurement", hint=_FORM)
        found[context, concurrency] = speed
    return found


def _contexts(question: Question, ledger: MemoryLedger) -> list[int]:
    """Return the contexts to judge: none that the engine refuses, and where it refuses all of them its longest."""
    loads = {load.context for load in question.recipe.workloads}
    wanted = {question.context} if question.context else {*_CONTEXTS, *loads}
    limit = ledger.settings.context_length or max(wanted)
    return sorted(context for context in wanted if context <= limit) or [limit]


def _concurrencies(question: Question) -> Iterable[int]:
    if question.concurrency:
        return [question.concurrency]
    return sorted({*_CONCURRENCIES, *(load.concurrency for load in question.recipe.workloads)})
