"""Finding in a new release what a patch was made for: renamed files, moved functions, the nearest surviving lines."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import PurePosixPath

from sglang_bw.fork.rebase.units import Lines, split_lines

# How alike two texts must be to be called the same one moved; git's own limit for renames.
ALIKE = 0.5
# So many equal lines are no accident, however long the text.
_ENOUGH = 6
# Shorter lines say nothing about where code went.
TELLING = 9
# Where lines of code are looked for; the thousands of tables of tuned numbers beside them have as many lines.
_CODE = (".py", ".pyi", ".cu", ".cuh", ".cpp", ".cc", ".h", ".hpp", ".rs", ".sh")
_IN_WORD = re.compile(rb"\w")
# So many files are compared whole with one that is missing.
_CANDIDATES = 10


class Tree:
    """The text files of a release, path -> bytes, and of the old one; read only when something is missing."""

    def __init__(self, files: Callable[[], Mapping[str, bytes]], old: Callable[[], Mapping[str, bytes]]) -> None:
        self._read = (files, old)
        # Kept with the tree, not with the class: a check of many releases must let go of each.
        self.had = functools.cache(self._had)
        self.has = functools.cache(self._has)
        self.renamed = functools.cache(self._renamed)
        self._lines_of = functools.cache(self._find_lines)

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """The new release."""
        return self._read[0]()

    @cached_property
    def old(self) -> Mapping[str, bytes]:
        """The old release."""
        return self._read[1]()

    @cached_property
    def _old_text(self) -> bytes:
        return _python(self.old)

    @cached_property
    def _new_text(self) -> bytes:
        return _python(self.files)

    def _had(self, word: str) -> bool:
        """Whether a word stands in any Python file of the old release."""
        return _has_word(self._old_text, word.encode())

    def _has(self, word: str) -> bool:
        """Whether a word stands in any Python file of the new release."""
        return _has_word(self._new_text, word.encode())

    def _renamed(self, path: str) -> str:
        """Return the file that the old release's ``path`` became, or an empty string."""
        if path in self.files or path not in self.old:
            return ""
        suffix, before = PurePosixPath(path).suffix, split_lines(self.old[path])
        wanted = _telling(before)
        shared = Counter({
            other: len(wanted & self._lines_of(other)) for other in self.files
            if other not in self.old and other.endswith(suffix)
        })  # fmt: skip
        scores = (
            (alike(before, split_lines(self.files[other])), other)
            for other, count in shared.most_common(_CANDIDATES) if count
        )  # fmt: skip
        score, found = max(scores, default=(0.0, ""))
        return found if score >= ALIKE else ""

    def definition(self, path: str, key: str, text: Lines) -> str:
        """Return ``file:line`` of the definition most like that of unit ``key``, or an empty string."""
        name = _bare(key)
        if not name.isidentifier():
            return ""
        pattern = re.compile(
            rb"^ *(?:(?:async )?def|class) _*%b\b|^ *_*%b\b[^=\n]*=[^=]" % ((name.encode(),) * 2), re.M
        )
        best = (0.0, "")
        for other, data in self.files.items():
            # `in` is many times faster than the pattern, and mostly decides.
            if not other.endswith(".py") or name.encode() not in data:
                continue
            for match in pattern.finditer(data):
                # As many lines as the text has: to parse every file that defines an `__init__` takes minutes.
                rest = data[match.start() : match.start() + 200 * len(text)].split(b"\n", len(text))
                score = alike(text, tuple(rest[: len(text)])) + (0.1 if other == path else 0)
                if score > best[0]:
                    line = data.count(b"\n", 0, match.start()) + 1
                    best = (score, f"{other}:{line}")
        return best[1]

    def nearest(self, lines: Iterable[bytes]) -> str:
        """Return ``file:line`` where most of these lines survive, or an empty string."""
        wanted = _telling(lines)
        counts = {path: len(wanted & self._lines_of(path)) for path in self.files if path.endswith(_CODE)}
        best = max(counts.values(), default=0)
        if not best:
            return ""
        path = min(path for path, count in counts.items() if count == best)
        there = [at for at, line in enumerate(split_lines(self.files[path]), start=1) if line.strip() in wanted]
        return f"{path}:{there[0]}" if best * 2 >= len(wanted) or best >= _ENOUGH else ""

    def _find_lines(self, path: str) -> set[bytes]:
        """Return the lines of a file of the new release; what is looked for says which of them are telling."""
        return set(map(bytes.strip, self.files[path].split(b"\n")))


def _telling(lines: Iterable[bytes]) -> frozenset[bytes]:
    return frozenset(line for line in map(bytes.strip, lines) if len(line) >= TELLING)


def _python(files: Mapping[str, bytes]) -> bytes:
    return b"\n".join(data for path, data in files.items() if path.endswith(".py"))


def _has_word(text: bytes, word: bytes) -> bool:
    # A pattern with word borders takes half a second for a release, this a few milliseconds.
    at = text.find(word)
    while at >= 0:
        if not _IN_WORD.match(text, at - 1 if at else len(text)) and not _IN_WORD.match(text, at + len(word)):
            return True
        at = text.find(word, at + 1)
    return False


def _bare(key: str) -> str:
    """Return a unit's own name: what moves to another file often loses or gets an underscore."""
    return re.sub(r"#\d+$", "", key).rpartition(".")[2].lstrip("_")


def alike(first: Lines, second: Lines) -> float:
    """Return which part of the longer text's lines the two share, from 0 to 1; blank lines do not count."""
    one, two = (Counter(line.strip() for line in lines if line.strip()) for lines in (first, second))
    return (one & two).total() / max(one.total(), two.total(), 1)
