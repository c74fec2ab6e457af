"""What the user typed, as the `plan` of the same launch: a line that works when it is pasted."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from sglang_bw.errors import UnknownBoardError
from sglang_bw.host import boards
from sglang_bw.host.boards import Board
from sglang_bw.launch import secret, selection
from sglang_bw.recipes import flags
from sglang_bw.recipes.flags import Flags
from sglang_bw.recipes.hardware import Hardware

NO_SPEC = "--no-spec"


def check_place(command: str, engine_flags: Sequence[str]) -> None:
    """Refuse what stands behind ``--`` and is ours; the engine knows flags that begin like it.

    :raises click.UsageError: it does.
    """
    if NO_SPEC in engine_flags:
        raise click.UsageError(f"{NO_SPEC} is an option of `{command}`, it goes before '--'.")


@dataclass(frozen=True)
class Typed:
    """A launch as it was asked for.

    :ivar name: recipe, file or model.
    :ivar model: target in place of the recipe's.
    :ivar divides: GPUs were named, so that a model is divided over them.
    :ivar engine_flags: those behind ``--``.
    """

    name: str
    model: str | None = None
    draft: str | None = None
    speculate: bool = True
    divides: bool = False
    python: Path | None = None
    tree: Path | None = None
    engine_flags: Sequence[str] = ()

    def plan(self, seen: tuple[Hardware, Board] | None) -> str:
        """Return the line that shows the whole plan; no secret is in it.

        :param seen: the GPUs that the launch is for.
        """
        given = (
            ("--model-path", self.model),
            ("--draft", self.draft),
            *_machine(seen),
            ("--python", self.python),
            ("--engine-tree", self.tree),
        )
        words = [word for option, value in given if value for word in (option, str(value))]
        tail = self._tail(seen)
        line = ["plan", self.name, *words, *([] if self.speculate else [NO_SPEC]), *(["--", *tail] if tail else [])]
        return shlex.join(["sglang-bw", *line])

    def _tail(self, seen: tuple[Hardware, Board] | None) -> list[str]:
        parsed = flags.parse(self.engine_flags)
        # What is typed stays as it is, unless it must not be said again.
        words = flags.tokens(secret.public(parsed)) if secret.of(parsed) else list(self.engine_flags)
        # `plan --gpus` divides a model over the GPUs it is given; `serve` only over those that --gpus names.
        alone = seen is not None and seen[0].count > 1 and not self.divides and selection.is_model(self.name)
        return [*words, "--tp-size", "1"] if alone and not _is_divided(parsed) else words


def _is_divided(engine_flags: Flags) -> bool:
    return any(flags.has(engine_flags, size) for size in ("tp-size", "pp-size"))


def _machine(seen: tuple[Hardware, Board] | None) -> tuple[tuple[str, str | None], ...]:
    if seen is None:
        return ()
    machine, board = seen
    fabric = machine.fabric if machine.count > 1 and machine.fabric != board.fabric else None
    return ("--gpus", f"{machine.count}x{_spelled(board)}"), ("--fabric", fabric)


def _spelled(board: Board) -> str:
    """Return a board as ``--gpus`` takes it: by name where the plan knows that, else with its memory."""
    try:
        if boards.find(board.name) == board:
            return board.name
    except UnknownBoardError:
        pass
    return f"{board.name}:{board.memory_mib}MiB:{board.arch}"
