"""Moving one patch: git joins, the second merger and upstream's names decide whether it may count."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from sglang_bw.errors import PatchApplyError
from sglang_bw.fork import strict
from sglang_bw.fork.mail import Patch
from sglang_bw.fork.rebase import semantic
from sglang_bw.fork.rebase.attempt import Attempt, marked, pick
from sglang_bw.fork.rebase.evidence import Hunk, Versions, added_lines, hunks_of, with_hunks
from sglang_bw.fork.rebase.gone import with_loss
from sglang_bw.fork.rebase.marks import conflict_of
from sglang_bw.fork.rebase.outcome import Conflict, HunkReport, HunkWord, PatchOutcome, Word
from sglang_bw.fork.rebase.search import Tree
from sglang_bw.fork.rebase.semantic import Doubt
from sglang_bw.fork.rebase.units import split_lines
from sglang_bw.fork.rebase.uses import lost
from sglang_bw.fork.scratch import Scratch

_UPSTREAMS = frozenset({HunkWord.MERGED, HunkWord.OWN})


@dataclass(frozen=True)
class Tried:
    """A patch tried on the new release: what git made of it, and why that may not count."""

    attempt: Attempt
    doubts: tuple[Doubt, ...]
    conflicts: tuple[Conflict, ...]


class Mover:
    """Moves patches in a scratch repository, whose HEAD is the new release with the patches so far."""

    def __init__(self, scratch: Scratch, new: str, onto: str, tree: Tree) -> None:
        self.scratch = scratch
        self.repo = scratch.repo
        self.new = new
        self.onto = onto
        self.tree = tree

    def move(self, patch: Patch, commit: str) -> PatchOutcome:
        """Move a patch whose commit on the old release is ``commit``.

        HEAD has the patch afterwards, unless its word says that it is dropped or needs a person; then HEAD, index and
        work tree are as before.
        """
        started = time.monotonic()
        outcome = self._move(patch, commit)
        return outcome.model_copy(
            update={"seconds": round(time.monotonic() - started, 3), "tests": tuple(patch.all("Test"))}
        )

    def _move(self, patch: Patch, commit: str) -> PatchOutcome:
        files = self._versions(patch, commit)
        hunks = hunks_of(patch.name, patch.diff, files)
        tried = self._tried(commit, files)
        if tried.conflicts and any(hunk.report.word is HunkWord.MERGED for hunk in hunks):
            tried = self._without_merged(patch, commit, files, hunks) or tried
        conflicts: Sequence[Conflict] = tried.conflicts
        missing = {path for path, versions in files.items() if versions.new is None and versions.old}
        hunks = [with_loss(hunk, files[hunk.report.path], missing, self.tree) for hunk in hunks]
        otherwise = self._word(patch, hunks, conflicts, tried.attempt)
        # Proof that upstream has it says more than a range that somebody wrote down.
        word = Word.INAPPLICABLE if self._leaves_out(patch) and otherwise is not Word.MERGED else otherwise
        if word.is_dropped or word.needs_a_person:
            self.repo.run("reset", "--quiet", "--hard")
        else:
            self._commit(commit)
        if not otherwise.needs_a_person:
            conflicts = ()
        says = _says(otherwise, hunks, files)
        if word is Word.INAPPLICABLE:
            applies = f"Applies-To {patch.trailer('Applies-To')} leaves out {self.new}, otherwise {otherwise}"
            says = f"{applies}: {says}" if says else f"{applies}: check that {patch.trailer('Removal')}"
        return PatchOutcome(
            patch=patch.name,
            word=word,
            otherwise=otherwise if word is Word.INAPPLICABLE else None,
            says=says,
            hunks=tuple(self._finished(hunk, files[hunk.report.path], conflicts) for hunk in hunks),
            conflicts=tuple(conflicts),
        )

    def _tried(self, commit: str, files: Mapping[str, Versions]) -> Tried:
        attempt = pick(self.repo, commit)
        doubts = self._doubts(files, attempt) if attempt.tree else []
        return Tried(attempt, tuple(doubts), (*marked(self.scratch, attempt.unmerged), *map(conflict_of, doubts)))

    def _without_merged(
        self, patch: Patch, commit: str, files: dict[str, Versions], hunks: Sequence[Hunk]
    ) -> Tried | None:
        """Try the patch without the hunks that upstream has; ``None`` when the rest cannot be joined either."""
        merged = {hunk.report.number for hunk in hunks if hunk.report.word is HunkWord.MERGED}
        rest: dict[str, Versions] = {}
        number = 0
        for file in strict.parse(patch.name, patch.diff):
            kept = []
            for hunk in file:
                number += 1
                kept += [hunk] if number not in merged else []
            if kept:
                versions = files[file.path]
                rest[file.path] = replace(versions, patched=with_hunks(versions.old, kept), added=added_lines(kept))
        if not rest or any(not files[path].patched for path in rest):
            return None
        self.repo.run("reset", "--quiet", "--hard")
        smaller = self.repo.commit_on(f"{commit}^", {path: versions.patched for path, versions in rest.items()})
        tried = self._tried(smaller, rest)
        return tried if not tried.conflicts else None

    def _leaves_out(self, patch: Patch) -> bool:
        return not SpecifierSet(patch.trailer("Applies-To")).contains(self.new, prereleases=True)

    def _is_backport(self, patch: Patch) -> bool:
        """Whether the patch says that the new release has it."""
        since = re.match(r"Backport \[\S+, in (\S+)\]", patch.trailer("Upstream-Status"))
        return bool(since and Version(self.new) >= Version(since[1]))

    def hand_over(self, commit: str) -> None:
        """Leave the patch in a full work tree, with markers where git cannot join, for the user's own tools."""
        self.repo.check_out(None)
        if self.repo.run("cherry-pick", commit, check=False).code == 0:
            # Git is content and we are not: the changes stay staged, without a commit.
            self.repo.run("reset", "--quiet", "--soft", "HEAD~1")

    def _commit(self, commit: str) -> None:
        """Commit the index with the message, author and date of the patch."""
        self.repo.run("commit", "--quiet", "--no-verify", "--allow-empty", "--reuse-message", commit)

    def _versions(self, patch: Patch, commit: str) -> dict[str, Versions]:
        """Return each file of the patch on both sides, by its name in the patch."""
        parsed = {file.path: file for file in strict.parse(patch.name, patch.diff)}
        sides = {path: strict.sides(file) for path, file in parsed.items()}
        paths = [side for pair in sides.values() for side in pair if side]
        old = self.repo.read_many(f"{commit}^", paths)
        patched = self.repo.read_many(commit, paths)
        new = self.repo.read_many("HEAD", paths)
        stock = self.repo.read_many(self.onto, paths)
        files = {}
        for path, (source, target) in sides.items():
            there = source or target
            if there not in new and source and (moved := self.tree.renamed(source)):
                there = moved
                new |= self.repo.read_many("HEAD", [moved])
                stock |= self.repo.read_many(self.onto, [moved])
            files[path] = Versions(
                path=path,
                there=there,
                old=old.get(source, b""),
                patched=patched.get(target, b""),
                new=new.get(there),
                stock=stock.get(there),
                added=frozenset(line.target_line_no or 0 for hunk in parsed[path] for line in hunk if line.is_added),
            )
        return files

    def _doubts(self, files: Mapping[str, Versions], attempt: Attempt) -> list[Doubt]:
        """Compare git's tree with what the second merger makes of every file, and look for files nobody named."""
        changed = set(self.repo.changed("HEAD", attempt.tree))
        result = self.repo.read_many(attempt.tree, [side for one in files.values() for side in (one.there, one.path)])
        doubts = []
        expected: set[str] = set()
        for versions in files.values():
            where = versions.there if versions.there in result or not versions.patched else versions.path
            expected |= {versions.there, versions.path}
            if versions.new is None and versions.old and versions.there in result:
                doubts.append(Doubt(versions.there, "", 0, "git puts an edit into a file that upstream does not have"))
                continue
            final = result.get(where, b"")
            doubts += semantic.examine(where, versions.old, versions.patched, versions.new or b"", final)
            doubts += self._lost(where, versions, final, self._in_added(attempt.tree))
        doubts += [Doubt(path, "", 0, "git changes a file that the patch does not name") for path in changed - expected]
        return doubts

    def _in_added(self, tree: str) -> Callable[[str], bool]:
        """Return whether a word stands in what the series has added to the new release so far, or adds now."""

        @functools.cache
        def added() -> bytes:
            return self.repo.run("diff", "--no-color", "--unified=0", self.onto, tree).stdout

        return lambda word: (
            re.search(rb"(?m)^\+.*\bdef %b\b|^\+.*\b%b\b[^=\n]*=" % ((word.encode(),) * 2), added()) is not None
        )

    def _lost(self, path: str, versions: Versions, final: bytes, added: Callable[[str], bool]) -> list[Doubt]:
        """Doubt a result whose added lines use what neither the new release nor a patch before has."""
        lines = split_lines(versions.patched)
        found = lost(
            path,
            versions.patched,
            versions.added,
            final,
            self.tree.had,
            lambda word: self.tree.has(word) or added(word),
        )
        return [
            Doubt(
                path, name, 0, f"the patch uses {name}, which SGLang {self.new} does not have", (), (lines[line - 1],)
            )
            for name, line in found
        ]

    def _word(self, patch: Patch, hunks: Sequence[Hunk], conflicts: Sequence[Conflict], attempt: Attempt) -> Word:
        words = {hunk.report.word for hunk in hunks}
        if words != {HunkWord.APPLIED}:
            words = {hunk.report.word for hunk in hunks if not hunk.is_support} or words
        if words <= _UPSTREAMS or (attempt.tree and attempt.tree == self.repo.tree()):
            return Word.MERGED
        # That it is upstream was known when the patch was written, and something of it is found there.
        if self._is_backport(patch) and words & {*_UPSTREAMS, HunkWord.CONFLICT}:
            return Word.MERGED
        if HunkWord.GONE in words:
            return Word.GONE
        if conflicts or words & {HunkWord.CONFLICT, HunkWord.OWN}:
            return Word.CONFLICT
        if HunkWord.MERGED in words:
            return Word.PARTLY_MERGED
        return Word.CLEAN if self._fits(patch) else Word.OFFSET

    def _fits(self, patch: Patch) -> bool:
        """Whether the patch file applies to HEAD without moving a line."""
        before = self.repo.read_many("HEAD", strict.touched(patch.name, patch.diff))
        try:
            strict.apply_exactly(patch.name, patch.diff, before.get)
        except PatchApplyError:
            return False
        return True

    def _finished(self, hunk: Hunk, versions: Versions, conflicts: Sequence[Conflict]) -> HunkReport:
        """Return a hunk's report once the patch has its word: whether it lies in a conflict, and the nearest code."""
        report = hunk.report
        mine = {line.strip().decode("utf-8", "replace") for line in hunk.added if len(line.strip()) > 1}
        for conflict in conflicts if report.word is HunkWord.APPLIED else ():
            is_here = conflict.path in (versions.path, versions.there)
            ours = {line.strip() for line in conflict.ours.splitlines()}
            if is_here and (not ours or mine & ours):
                proof = "" if hunk.is_support else self.tree.nearest(hunk.removed or hunk.context)
                update = {"word": HunkWord.CONFLICT, "says": conflict.why, "proof": proof}
                return report.model_copy(update=update)
        return report


def _says(word: Word, hunks: Sequence[Hunk], files: dict[str, Versions]) -> str:
    """Return one line of evidence for a word."""
    found = [hunk for hunk in hunks if hunk.report.word in _UPSTREAMS]
    merged = [hunk for hunk in found if not hunk.is_support] or found
    if word is Word.MERGED:
        alike = [hunk for hunk in hunks if hunk.report.word is HunkWord.CONFLICT]
        first = next((hunk.report for hunk in (*merged, *alike)), None)
        known = "Upstream-Status says so, and " if alike else ""
        return f"{known}{first.says}: {first.proof}" if first else "nothing of it is left to apply"
    parts = []
    if merged:
        named = ", ".join(f"{hunk.report.number} ({hunk.report.proof})" for hunk in merged)
        parts.append(f"upstream has {len(merged)} of {len(hunks)} hunks: {named}")
    if word.needs_a_person:
        gone = [hunk.report for hunk in hunks if hunk.report.word is HunkWord.GONE and not hunk.is_support]
        parts += [
            f"{report.says}; {'see ' + report.proof if report.proof else 'nothing like it was found'}"
            for report in gone[:1]
        ]
    renamed = [f"{one.path} is {one.there} now" for one in files.values() if one.there != one.path and one.old]
    return "; ".join([*parts, *renamed])
