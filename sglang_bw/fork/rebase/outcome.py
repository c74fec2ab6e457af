"""What became of a patch: one word that means one thing, and the evidence for it."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Word(StrEnum):
    """What became of a patch on the new release."""

    # The patch file fits as it is: no line moved.
    CLEAN = "clean"
    # All of it was carried over, but lines moved or a file was renamed: the patch was exported anew.
    OFFSET = "offset"
    # Upstream has all of it: dropped, with the place that proves it.
    MERGED = "merged"
    # Upstream has some of the hunks, each named; the others were carried over.
    PARTLY_MERGED = "partly merged"
    # The two sides cannot be joined with certainty: a person decides.
    CONFLICT = "conflict"
    # A file or function that the patch changes is not there any more: a person decides.
    GONE = "gone"
    # The new release is outside of the patch's Applies-To, and upstream does not have all of it: left out.
    INAPPLICABLE = "inapplicable"

    @property
    def needs_a_person(self) -> bool:
        """Whether the rebase stops here."""
        return self in (Word.CONFLICT, Word.GONE)

    @property
    def is_dropped(self) -> bool:
        """Whether the new series is without the patch, by itself."""
        return self in (Word.MERGED, Word.INAPPLICABLE)


class HunkWord(StrEnum):
    """What became of one hunk."""

    # Carried over.
    APPLIED = "applied"
    # Upstream has the same lines.
    MERGED = "merged"
    # Upstream has what the hunk adds, under the same name and with the same parameters, but in words of its own.
    OWN = "upstream's own"
    # The sides cannot be joined with certainty.
    CONFLICT = "conflict"
    # What the hunk changes is not there any more.
    GONE = "gone"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HunkReport(_Frozen):
    """One hunk: ``number`` counts from 1 through the patch, ``where`` is the function or class it lies in.

    ``proof`` is ``file:line`` in the new release: where upstream has it, or the nearest code that survived.
    """

    number: int
    path: str
    line: int
    where: str
    word: HunkWord
    proof: str = ""
    says: str = ""


class Conflict(_Frozen):
    """A place that a person must look at: the lines of both sides, and why they cannot be joined."""

    path: str
    line: int = 0
    why: str
    theirs: str = ""
    ours: str = ""


class PatchOutcome(_Frozen):
    """One patch on the new release.

    ``otherwise``: the word that an inapplicable patch would have without its range. ``resolved``: a person joined the
    sides. ``left_out``: it needed a person and the new series is without it.
    """

    patch: str
    word: Word
    otherwise: Word | None = None
    says: str = ""
    hunks: tuple[HunkReport, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    tests: tuple[str, ...] = ()
    resolved: bool = False
    left_out: bool = False
    seconds: float = 0.0

    @property
    def merged_hunks(self) -> tuple[HunkReport, ...]:
        """The hunks that upstream has."""
        return tuple(hunk for hunk in self.hunks if hunk.word in (HunkWord.MERGED, HunkWord.OWN))
