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

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """The new release."""
        return self._read[0]()

    @cached_property
    def old(self) -> Mapping[str, bytes]:
        """The old release."""
        return self._read[1]()

    @cached_property
    def _texts(self) -> tuple[bytes, bytes]:
        return _python(self.old), _python(self.files)

    def _had(self, word: str) -> bool:
        """Whether a word stands in any Python file of the old release."""
        return _has_word(self._texts[0], word.encode())

    def _has(self, word: str) -> bool:
        """Whether a word stands in any Python file of the new release."""
        return _has_word(self._texts[1], word.encode())

    def _renamed(self, path: str) -> str:
        """Return the file that the old release's ``path`` became, or an empty string."""
        if path in self.files or path not in self.old:
            return ""
        suffix, before = PurePosixPath(path).suffix, split_lines(self.old[path])
        shared = Counter(
            other for line in {line.strip() for line in before} for other in self._lines.get(line, ())
            if other not in self.old and other.endswith(suffix)
        )  # fmt: skip
        scores = (
            (alike(before, split_lines(self.files[other])), other) for other, _ in shared.most_common(_CANDIDATES)
        )
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
        wanted = {line.strip() for line in lines if len(line.strip()) >= TELLING}
        counts = Counter(path for line in wanted for path in self._lines.get(line, ()))
        if not counts:
            return ""
        best = max(counts.values())
        path = min(path for path, count in counts.items() if count == best)
        there = [at for at, line in enumerate(split_lines(self.files[path]), start=1) if line.strip() in wanted]
        return f"{path}:{there[0]}" if best * 2 >= len(wanted) or best >= _ENOUGH else ""

    @cached_property
    def _lines(self) -> Mapping[bytes, list[str]]:
        """Line -> the files of the new release that have it."""
        found: dict[bytes, list[str]] = {}
        for path, data in self.files.items():
            for line in {line.strip() for line in data.split(b"\n")}:
                if len(line) >= TELLING:
                    found.setdefault(line, []).append(path)
        return found


def _python(files: Mapping[str, bytes]) -> bytes:
    return b"\n".join(data for path, data in files.items() if path.endswith(".py"))


def _has_word(text: bytes, word: bytes) -> bool:
    return word in text and re.search(rb"\b%b\b" % re.escape(word), text) is not None


def _bare(key: str) -> str:
    """Return a unit's own name: what moves to another file often loses or gets an underscore."""
    return re.sub(r"#\d+$", "", key).rpartition(".")[2].lstrip("_")


def alike(first: Lines, second: Lines) -> float:
    """Return which part of the longer text's lines the two share, from 0 to 1; blank lines do not count."""
    one, two = (Counter(line.strip() for line in lines if line.strip()) for lines in (first, second))
    return (one & two).total() / max(one.total(), two.total(), 1)
