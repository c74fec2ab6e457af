"""What a rebase remembers between two calls, and how it is compared with what is asked."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from sglang_bw.errors import RebaseOpenError
from sglang_bw.fork.rebase.outcome import PatchOutcome
from sglang_bw.fork.series import local_option, root_option


class Phase(StrEnum):
    """Where a rebase stands."""

    # Patches are being moved; a kill here is repaired by doing the last patch again.
    MOVING = "moving"
    # A person works in the tree, which nothing may throw away.
    STOPPED = "stopped"
    # Every patch has its word; the new base is not written yet.
    MOVED = "moved"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Request(_Frozen):
    """What was asked: two releases by version and wheel, and the series as it lay on disk (file -> sha256).

    ``present`` is the new release's own series, which the patches that it lacks are put on top of; ``local`` is the
    folder of a local series that is moved instead, ``below`` what lies under it on both sides.
    """

    base: str
    new: str
    root: str
    base_wheel: str
    new_wheel: str
    new_wheels: dict[str, str]
    series: dict[str, str]
    present: dict[str, str] = {}
    local: str = ""
    below: tuple[dict[str, str], dict[str, str]] = ({}, {})

    @property
    def options(self) -> str:
        """The options that name what is moved, with a blank before each, or nothing."""
        return local_option(Path(self.local) if self.local else None) + root_option(Path(self.root))

    def then(self, word: str) -> str:
        """Return the command line that goes on with this rebase, or ends it: ``continue``, ``skip``, ``abort``."""
        return f"sglang-bw rebase --{word}{self.options}"


class Asked(_Frozen):
    """How a rebase was asked for, beside what is moved: said once, it holds to the end.

    ``out`` is where a local series goes, ``wheel`` the file in which the new release was given; both absolute.
    """

    keep_going: bool = False
    test: bool = False
    out: str = ""
    wheel: str = ""


class RebaseState(_Frozen):
    """A rebase that is open.

    ``patches`` are the files to move and ``series`` their commits on the old release; ``onto`` is the new release and
    ``head`` the last commit on it that is done; ``outcomes`` has one entry a patch that has its word, the stopped one's
    included.
    """

    schema_version: Literal[2] = 2
    tool: str
    request: Request
    phase: Phase
    origin: str
    patches: tuple[str, ...]
    series: tuple[str, ...]
    onto: str
    head: str
    outcomes: tuple[PatchOutcome, ...] = ()
    asked: Asked = Asked()

    @property
    def command(self) -> str:
        """The rebase as a command line that works from any place."""
        options = " --append" if self.request.present else ""
        for name, path in (("wheel", self.asked.wheel), ("out", self.asked.out)):
            options += f" --{name} {shlex.quote(path)}" if path else ""
        return f"sglang-bw rebase {self.request.new} --from {self.request.base}{options}{self.request.options}"

    @property
    def stopped_at(self) -> int:
        """The index of the patch that a person works on."""
        return len(self.outcomes) - 1


def require_same(state: RebaseState, request: Request) -> None:
    """Compare an open rebase with what is asked now.

    :raises RebaseOpenError: it is another one, or the series changed on disk since it began.
    """
    asked, known = request.model_dump(), state.request.model_dump()
    differs = sorted(key for key in asked if asked[key] != known[key])
    if not differs:
        return
    if set(differs) & {"base", "new"}:
        raise RebaseOpenError(
            f"a rebase from {state.request.base} to {state.request.new} is open",
            hint=f"finish it with `{state.request.then('continue')}`, or end it with `{state.request.then('abort')}`",
        )
    what = "the series on disk" if set(differs) <= {"series", "present"} else " and ".join(differs)
    raise RebaseOpenError(
        f"{what} changed since the rebase from {state.request.base} to {state.request.new} began",
        hint=f"end it with `{state.request.then('abort')}` and start again, or undo the change",
    )
