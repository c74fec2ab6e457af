"""The report of a rebase, as values: ``cli`` shows them as a table, markdown or JSON."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_bw.fork.rebase.outcome import HunkWord, PatchOutcome
from sglang_bw.fork.rebase.state import Phase, RebaseState
from sglang_bw.fork.series import has_tests, root_option

if TYPE_CHECKING:
    from sglang_bw.fork.rebase.publish import Made

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Report:
    """What a rebase gave so far.

    ``waiting`` are patches that were not tried yet; ``stopped`` is the one that a person must look at, in ``tree``;
    ``folder`` is the new base when it was written; ``version`` what its wheel is called; ``then`` is the command that
    was asked for, where it goes on only after this.
    """

    state: RebaseState
    tree: Path
    seconds: float
    stopped: PatchOutcome | None = None
    folder: Path | None = None
    version: str = ""
    wheel: str = ""
    digest: str = ""
    tested: int = 0
    then: str = ""

    @classmethod
    def of(
        cls,
        state: RebaseState,
        *,
        tree: Path,
        seconds: float,
        made: Made | None = None,
        folder: Path | None = None,
    ) -> Report:
        """Make the report of a rebase that stopped, or of the base that was made."""
        return cls(
            state=state,
            tree=tree,
            seconds=seconds,
            stopped=state.outcomes[-1] if state.phase is Phase.STOPPED else None,
            folder=folder,
            version=made.series.pins.full_version if made else "",
            wheel=made.wheel.path.name if made else "",
            digest=made.wheel.digest if made else "",
            tested=len(made.tests) if made else 0,
        )

    @property
    def base(self) -> str:
        """The release that the patches come from."""
        return self.state.request.base

    @property
    def new(self) -> str:
        """The release that they go to."""
        return self.state.request.new

    @property
    def is_local(self) -> bool:
        """Whether a user's own series was moved, not ours."""
        return bool(self.state.request.local)

    @property
    def outcomes(self) -> tuple[PatchOutcome, ...]:
        """What became of each patch that was tried."""
        return self.state.outcomes

    @property
    def waiting(self) -> tuple[str, ...]:
        """The patches that were not tried yet."""
        return self.state.patches[len(self.outcomes) :]

    @property
    def is_dry(self) -> bool:
        """Whether nothing was to be written."""
        return self.stopped is None and self.folder is None

    @property
    def left_out(self) -> tuple[PatchOutcome, ...]:
        """The patches that the new series is without although they needed a person."""
        return tuple(outcome for outcome in self.outcomes if outcome.left_out)

    @property
    def needs_a_person(self) -> bool:
        """Whether a rebase to this release does not finish by itself."""
        return bool(self.stopped or self.left_out)

    @property
    def summary(self) -> str:
        """The count of each word."""
        counts = Counter(outcome.word.value for outcome in self.outcomes)
        words = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        return (words or "no patch to move") + (f", {len(self.waiting)} not tried yet" if self.waiting else "")

    @property
    def next_steps(self) -> tuple[str, ...]:
        """The commands that follow."""
        return (*self._own_steps, self.then) if self.then else self._own_steps

    @property
    def _own_steps(self) -> tuple[str, ...]:
        elsewhere = root_option(Path(self.state.request.root))
        if self.stopped:
            return tuple(self.state.request.then(word) for word in ("continue", "skip", "abort"))
        if self.folder is None:
            can_test = not self.is_local and has_tests(Path(self.state.request.root))
            return (self.state.command + (" --test" if can_test else ""),)
        if self.is_local:
            return (f"sglang-bw upgrade {self.new} --local {shlex.quote(str(self.folder.resolve()))}{elsewhere}",)
        # Those two work on the checkout's own patches/.
        checkout = (
            ()
            if elsewhere
            else (
                f"scripts/lock --base {self.new} --wheel WHEEL",
                *(() if self.tested else (f"pytest tests/patches/test_series.py -k {self.new}",)),
            )
        )
        return (*checkout, f"sglang-bw patches refresh --base {self.new} --release{elsewhere}")

    def as_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        return {
            "schema_version": SCHEMA_VERSION,
            "base": self.base,
            "new": self.new,
            "state": "stopped" if self.stopped else "written" if self.folder else "checked",
            "needs_a_person": self.needs_a_person,
            "summary": self.summary,
            "patches": [outcome.model_dump(mode="json") for outcome in self.outcomes],
            "waiting": list(self.waiting),
            "stopped": self.stopped.patch if self.stopped else None,
            "tree": str(self.tree) if self.stopped else None,
            "folder": str(self.folder) if self.folder else None,
            "version": self.version,
            "wheel": self.wheel,
            "digest": self.digest,
            "tested": self.tested,
            "seconds": round(self.seconds, 2),
            "next": list(self.next_steps),
        }

    def as_markdown(self) -> str:
        """Return the report for a pull request."""
        lines = [f"## SGLang {self.base} to {self.new}", "", f"{self.summary}.", ""]
        lines += ["| patch | word | what says so |", "|---|---|---|"]
        lines += [f"| `{one.patch}` | {word_of(one)} | {_cell(one.says)} |" for one in self.outcomes]
        for outcome in self.outcomes:
            if outcome.word.needs_a_person or outcome.merged_hunks:
                lines += ["", f"### {outcome.patch}: {word_of(outcome)}", "", *_details(outcome)]
        return "\n".join(lines) + "\n"


def word_of(outcome: PatchOutcome) -> str:
    """Return a patch's word, with what a person decided."""
    if outcome.resolved:
        return f"{outcome.word}, resolved by hand"
    return f"{outcome.word}, left out" if outcome.left_out else str(outcome.word)


def _details(outcome: PatchOutcome) -> list[str]:
    lines = []
    for hunk in outcome.hunks:
        if hunk.word is not HunkWord.APPLIED:
            where = f"{hunk.path}:{hunk.line}" + (f" in `{hunk.where}`" if hunk.where else "")
            proof = f" ({hunk.proof})" if hunk.proof else ""
            lines.append(f"- hunk {hunk.number}, {where}: {hunk.word}{': ' + hunk.says if hunk.says else ''}{proof}")
    for conflict in outcome.conflicts:
        lines += ["", f"`{conflict.path}:{conflict.line}`: {conflict.why}"]
        for side, text in (("upstream", conflict.theirs), ("the patch", conflict.ours)):
            if text:
                lines += ["", f"{side}:", "", "```", text.replace("```", "'''"), "```"]
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
