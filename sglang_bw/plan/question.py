"""What a plan is asked: a command line, the machine it shall run on, and the engine that shall run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_bw.host.boards import Board
from sglang_bw.plan.resolve import EngineFiles
from sglang_bw.recipes.flags import ALIASES, Flags
from sglang_bw.recipes.hardware import Hardware
from sglang_bw.recipes.schema import Recipe


@dataclass(frozen=True)
class PlannedEngine:
    """The engine that the launch is planned for.

    :ivar version: ``0.5.23+bw.1``.
    :ivar patches: topics of its patches, without number.
    :ivar files: where it is installed; ``None`` when it is not, so that only formulas can answer.
    """

    version: str
    patches: frozenset[str] = frozenset()
    files: EngineFiles | None = None


@dataclass(frozen=True)
class Question:
    """One launch on one machine.

    :ivar flags: the whole command line, recipe and user's wishes joined.
    :ivar env: variables that the launch sets.
    :ivar context: tokens of the requests that shall fit; ``None``: whatever does.
    :ivar concurrency: requests at the same time, likewise.
    :ivar fetch: whether the hub may be asked for headers.
    :ivar notes: how well this is known.
    :ivar warnings: what will come between the user and the start.
    """

    recipe: Recipe
    flags: Flags
    env: Mapping[str, str]
    machine: Hardware
    board: Board
    engine: PlannedEngine
    context: int | None = None
    concurrency: int | None = None
    fetch: bool = False
    notes: tuple[str, ...] = field(default_factory=tuple)
    warnings: tuple[str, ...] = ()


def asked(flags: Flags) -> dict[str, Any]:
    """Return a command line by the engine's field names, with numbers as numbers: ``tp_size`` -> 8."""
    values: dict[str, Any] = {}
    for flag in flags:
        name = ALIASES.get(flag.name, flag.name).replace("-", "_")
        parsed = [_parsed(value) for value in flag.values]
        values[name] = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
    return values


def _parsed(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
