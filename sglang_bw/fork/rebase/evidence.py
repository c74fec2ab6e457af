"""What upstream has of a patch already: by lines, and by the names that the patch adds.

A name that both sides add is never carried over: either upstream has the same (merged), or its own version of the
same interface, or a person must look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sglang_bw.fork import strict
from sglang_bw.fork.rebase.outcome import HunkReport, HunkWord
from sglang_bw.fork.rebase.same import made, used
from sglang_bw.fork.rebase.units import Lines, Thing, Unit, split_lines, things, units

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Versions:
    """One file of a patch: before and after it on the old release, and on the new one (``None``: not there).

    ``path`` is the old release's name, ``there`` the new one's. ``new`` has the patches before this one on it,
    ``stock`` is upstream's own. ``added`` are the lines of ``patched`` (from 1) that the patch adds.
    """

    path: str
    there: str
    old: bytes
    patched: bytes
    new: bytes | None
    stock: bytes | None
    added: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Hunk:
    """One hunk with its lines."""

    report: HunkReport
    file: _File
    lines: tuple[Any, ...]

    @property
    def removed(self) -> Lines:
        """The lines that the patch takes away."""
        return tuple(_raw(line) for line in self.lines if line.is_removed)

    @property
    def added(self) -> Lines:
        """The lines that the patch adds."""
        return tuple(_raw(line) for line in self.lines if line.is_added)

    @property
    def context(self) -> Lines:
        """The lines that the patch leaves."""
        return tuple(_raw(line) for line in self.lines if line.is_context)

    @cached_property
    def is_support(self) -> bool:
        """Whether it changes imports, comments or blank lines only, which says nothing about the patch's purpose."""
        return self.file.is_support(self.lines)


def hunks_of(name: str, diff: bytes, files: Mapping[str, Versions]) -> list[Hunk]:
    """Return every hunk of a patch with what the new release has of it."""
    found: list[Hunk] = []
    for file in strict.parse(name, diff):
        versions = files[file.path]
        file_hunks = _File(versions)
        found += [file_hunks.hunk(len(found) + number, hunk) for number, hunk in enumerate(file, start=1)]
    return found


class _File:
    """A patched file with its units and names on all sides."""

    def __init__(self, versions: Versions) -> None:
        self.versions = versions

    @cached_property
    def patched_units(self) -> tuple[Unit, ...]:
        return units(self.versions.path, self.versions.patched)

    @cached_property
    def old_units(self) -> tuple[Unit, ...]:
        return units(self.versions.path, self.versions.old)

    @cached_property
    def new_lines(self) -> Lines:
        return split_lines(self.versions.stock or b"")

    @cached_property
    def new_units(self) -> dict[str, Unit]:
        return {unit.key: unit for unit in units(self.versions.there, self.versions.stock or b"")}

    @cached_property
    def there(self) -> dict[str, Thing]:
        """What the new release defines."""
        return things(self.versions.there, self.versions.stock or b"")

    @cached_property
    def names(self) -> tuple[tuple[int, bytes], ...]:
        """The names that stand in the added lines of the patch, each with its line."""
        return tuple(used(self.versions.path, self.versions.patched, self.versions.added))

    @cached_property
    def added(self) -> dict[str, Thing]:
        """What the patch defines anew; what lies in something that is added itself comes with it."""
        before = things(self.versions.path, self.versions.old)
        after = things(self.versions.path, self.versions.patched)
        added = {name: thing for name, thing in after.items() if name not in before}
        return {name: thing for name, thing in added.items() if not _parents(name) & set(added)}

    def hunk(self, number: int, hunk: Any) -> Hunk:
        """Return one hunk, judged by what the new file has."""
        lines = tuple(line for line in hunk if line.line_type != "\\")
        if self.versions.stock is not None and self.versions.stock == self.versions.old:
            # Upstream did not touch the file: nothing of the patch can be there.
            report = self._report(number, hunk, "", HunkWord.APPLIED, "", "")
            return Hunk(report, self, lines)
        changed = [at for at, line in enumerate(lines) if not line.is_context]
        core = lines[max(changed[0] - 1, 0) : changed[-1] + 2]
        source = tuple(_raw(line) for line in core if not line.is_added)
        target = tuple(_raw(line) for line in core if not line.is_removed)
        numbers = {line.target_line_no for line in lines if line.is_added}
        unit = _at(self.patched_units, min(numbers) - 1) if numbers else None
        unit = unit or _at(self.old_units, next(line.source_line_no for line in lines if line.is_removed) - 1)
        word, proof, says = self._judge(source, target, numbers, lines, unit)
        if word is HunkWord.APPLIED and (at := self._code_there(hunk)):
            word, proof, says = HunkWord.MERGED, f"{self.versions.there}:{at}", "the same code"
        return Hunk(self._report(number, hunk, unit.key if unit else "", word, proof, says), self, lines)

    def _report(self, number: int, hunk: Any, where: str, word: HunkWord, proof: str, says: str) -> HunkReport:
        line = hunk.source_start
        path = self.versions.path
        return HunkReport(number=number, path=path, line=line, where=where, word=word, proof=proof, says=says)

    def _judge(
        self, source: Lines, target: Lines, numbers: set[int], lines: tuple[Any, ...], unit: Unit | None
    ) -> tuple[HunkWord, str, str]:
        at = self._lines_there(source, target, unit)
        if at:
            return HunkWord.MERGED, f"{self.versions.there}:{at}", "the same lines"
        own = [thing for thing in self.added.values() if thing.line in numbers and thing.kind != "import"]
        present = [(thing, self.there[thing.name]) for thing in own if thing.name in self.there]
        if not present:
            return HunkWord.APPLIED, "", ""
        first = present[0][1]
        proof = f"{self.versions.there}:{first.line}"
        names = ", ".join(thing.name for thing, _ in present)
        covered = {line for thing in own for line in _span(thing)}
        rest = [
            line for line in lines
            if not line.is_context and line.value.strip() and not line.value.lstrip().startswith("#")
            and (line.is_removed or line.target_line_no not in covered)
        ]  # fmt: skip
        if len(present) < len(own) or rest:
            return HunkWord.CONFLICT, proof, f"upstream has {names} already, and the hunk does more than to add it"
        if all(mine.content == other.content for mine, other in present):
            return HunkWord.MERGED, proof, f"upstream has {names}"
        if all(mine.interface == other.interface and mine.kind == "function" for mine, other in present):
            return HunkWord.OWN, proof, f"upstream has {names} in words of its own"
        return HunkWord.CONFLICT, proof, f"upstream has {names}, but not the same"

    def _lines_there(self, source: Lines, target: Lines, unit: Unit | None) -> int:
        """Return the line (from 1) where the new release has a hunk's lines as the patch leaves them, else 0."""
        where = self.new_units.get(unit.key) if unit else None
        telling = [line for line in target if line.strip()]
        if self.versions.stock is None or len(telling) < 2:
            return 0
        lines, begin = (where.lines, where.start) if where else (self.new_lines, 0)
        at = _find(target, lines)
        if at is None and where:
            # A hunk may reach over the end of its function.
            lines, begin = self.new_lines, 0
            at = _find(target, lines)
        if at is None or _find(source, lines) is not None:
            return 0
        return begin + at + 2

    def _code_there(self, hunk: Any) -> int:
        """Return the line (from 1) where the new release has a hunk's edits in its own layout, else 0."""
        one = self.versions
        numbers = {line.target_line_no for line in hunk if line.is_added}
        # Code that is there is there under its names; to compare it takes a parser, once for every hunk.
        if one.stock is None or any(line in numbers and name not in one.stock for line, name in self.names):
            return 0
        return made(one.path, one.old, with_hunks(one.old, [hunk]), one.there, one.stock)

    def is_support(self, lines: tuple[Any, ...]) -> bool:
        """Whether only imports, comments and blank lines change."""
        for line in lines:
            text = line.value.strip()
            if line.is_context or not text or text.startswith("#"):
                continue
            side = self.patched_units if line.is_added else self.old_units
            unit = _at(side, (line.target_line_no if line.is_added else line.source_line_no) - 1)
            if unit is None or not unit.key.startswith(("from ", "import ")):
                return False
        return True


def with_hunks(old: bytes, hunks: Sequence[Any]) -> bytes:
    """Return a file with some hunks of a patch made for it."""
    lines, result, done = split_lines(old), b"", 0
    for hunk in hunks:
        start = hunk.source_start - (1 if hunk.source_length else 0)
        target = [_raw(line) for line in hunk if line.is_context or line.is_added]
        result += b"".join((*lines[done:start], *target))
        done = start + hunk.source_length
    return result + b"".join(lines[done:])


def added_lines(hunks: Sequence[Any]) -> frozenset[int]:
    """Return the lines (from 1) that some hunks of a patch add, in a file with these alone."""
    found: set[int] = set()
    moved = 0
    for hunk in hunks:
        line = hunk.source_start + moved + (0 if hunk.source_length else 1)
        for part in hunk:
            if part.is_added:
                found.add(line)
            line += part.is_added or part.is_context
        moved += hunk.added - hunk.removed
    return frozenset(found)


def _at(found: Sequence[Unit], line: int) -> Unit | None:
    return next((unit for unit in found if unit.start <= line < unit.start + len(unit.lines)), None)


def _find(wanted: Lines, lines: Lines) -> int | None:
    size = len(wanted)
    return next((at for at in range(len(lines) - size + 1) if lines[at : at + size] == wanted), None)


def _parents(name: str) -> set[str]:
    return {name[:at] for at, letter in enumerate(name) if letter in ".[" and at}


def _span(thing: Thing) -> range:
    node: Any = thing.node
    first = min([thing.line, *(item.lineno for item in getattr(node, "decorator_list", ()))])
    return range(first, (node.end_lineno or thing.line) + 1)


def _raw(line: Any) -> bytes:
    value: bytes = line.value.encode("utf-8", "surrogateescape")
    return value
