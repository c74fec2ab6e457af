"""What upstream has of a patch already: by lines, and by the names that the patch adds.

A name that both sides add is never carried over: either upstream has the same (merged), or its own version of the
same interface, or a person must look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_bw.fork import strict
from sglang_bw.fork.rebase.outcome import HunkReport, HunkWord
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
    """One hunk with its lines.

    ``is_support``: it changes imports, comments or blank lines only, which says nothing about the patch's purpose.
    """

    report: HunkReport
    removed: Lines
    added: Lines
    context: Lines
    is_support: bool


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
        new = versions.stock if versions.stock is not None else b""
        self.patched_units = units(versions.path, versions.patched)
        self.old_units = units(versions.path, versions.old)
        self.new_lines = split_lines(new)
        self.new_units = {unit.key: unit for unit in units(versions.there, new)}
        self.there = things(versions.there, new)
        before, after = things(versions.path, versions.old), things(versions.path, versions.patched)
        added = {name: thing for name, thing in after.items() if name not in before}
        # What lies in something that is added itself comes with it.
        self.added = {name: thing for name, thing in added.items() if not _parents(name) & set(added)}

    def hunk(self, number: int, hunk: Any) -> Hunk:
        """Return one hunk, judged by what the new file has."""
        lines = [line for line in hunk if line.line_type != "\\"]
        changed = [at for at, line in enumerate(lines) if not line.is_context]
        core = lines[max(changed[0] - 1, 0) : changed[-1] + 2]
        source = tuple(_raw(line) for line in core if not line.is_added)
        target = tuple(_raw(line) for line in core if not line.is_removed)
        numbers = {line.target_line_no for line in lines if line.is_added}
        unit = _at(self.patched_units, min(numbers) - 1) if numbers else None
        unit = unit or _at(self.old_units, next(line.source_line_no for line in lines if line.is_removed) - 1)
        word, proof, says = self._judge(source, target, numbers, lines, unit)
        report = HunkReport(
            number=number,
            path=self.versions.path,
            line=hunk.source_start,
            where=unit.key if unit else "",
            word=word,
            proof=proof,
            says=says,
        )
        removed = tuple(_raw(line) for line in lines if line.is_removed)
        added = tuple(_raw(line) for line in lines if line.is_added)
        context = tuple(_raw(line) for line in lines if line.is_context)
        return Hunk(report, removed, added, context, self._is_support(lines))

    def _judge(
        self, source: Lines, target: Lines, numbers: set[int], lines: list[Any], unit: Unit | None
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

    def _is_support(self, lines: list[Any]) -> bool:
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
