"""Finding in a new release what a patch was made for: renamed files, moved functions, the nearest surviving lines."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import PurePosixPath

from sglang_bw.fork.rebase.units import Lines, split_lines, units

# How alike two texts must be to be called the same one moved; git's own limit for renames.
ALIKE = 0.5
# So many equal lines are no accident, however long the text.
_ENOUGH = 6
# Shorter lines say nothing about where code went.
TELLING = 9


class Tree:
    """The text files of a release, path -> bytes, and of the old one; read only when something is missing."""

    def __init__(self, files: Callable[[], Mapping[str, bytes]], old: Callable[[], Mapping[str, bytes]]) -> None:
        self._read = (files, old)

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

    @functools.cache  # noqa: B019, a tree lives as long as its rebase
    def had(self, word: str) -> bool:
        """Whether a word stands in any Python file of the old release."""
        return _has_word(self._texts[0], word.encode())

    @functools.cache  # noqa: B019
    def has(self, word: str) -> bool:
        """Whether a word stands in any Python file of the new release."""
        return _has_word(self._texts[1], word.encode())

    def renamed(self, path: str) -> str:
        """Return the file that the old release's ``path`` became, or an empty string."""
        if path in self.files or path not in self.old:
            return ""
        suffix, before = PurePosixPath(path).suffix, split_lines(self.old[path])
        scores = (
            (alike(before, split_lines(data)), other)
            for other, data in self.files.items()
            if other not in self.old and other.endswith(suffix)
            and 0.4 < (len(data) + 1) / (len(self.old[path]) + 1) < 2.5
        )  # fmt: skip
        score, found = max(scores, default=(0.0, ""))
        return found if score >= ALIKE else ""

    def definition(self, path: str, key: str, text: Lines) -> str:
        """Return ``file:line`` of the definition most like that of unit ``key``, or an empty string."""
        name = _bare(key)
        if not name.isidentifier():
            return ""
        pattern = re.compile(
            rb"^\s*(?:(?:async )?def|class) _*%b\b|^\s*_*%b\b[^=\n]*=[^=]" % ((name.encode(),) * 2), re.M
        )
        best = (0.0, "")
        for other, data in self.files.items():
            if not other.endswith(".py") or name.encode() not in data or not pattern.search(data):
                continue
            for unit in units(other, data):
                if _bare(unit.key) == name:
                    score = alike(text, unit.lines) + (0.1 if other == path else 0)
                    best = max(best, (score, f"{other}:{unit.code + 1}"))
        return best[1]

    def nearest(self, lines: Iterable[bytes]) -> str:
        """Return ``file:line`` where most of these lines survive, or an empty string."""
        wanted = {line.strip() for line in lines if len(line.strip()) >= TELLING}
        best, place = 0, ""
        for path, data in self.files.items():
            there = [line for line in wanted if line in data]
            if len(there) > best:
                line = data.count(b"\n", 0, min(map(data.index, there))) + 1
                best, place = len(there), f"{path}:{line}"
        return place if best * 2 >= len(wanted) or best >= _ENOUGH else ""


def _python(files: Mapping[str, bytes]) -> bytes:
    return b"\n".join(data for path, data in files.items() if path.endswith(".py"))


def _has_word(text: bytes, word: bytes) -> bool:
    # `in` is many times faster than the pattern, and mostly decides.
    return word in text and re.search(rb"\b%b\b" % re.escape(word), text) is not None


def _bare(key: str) -> str:
    """Return the name of a unit without its class; a member that becomes a function often loses its underscore."""
    return re.sub(r"#\d+$", "", key).rpartition(".")[2].lstrip("_")


def alike(first: Lines, second: Lines) -> float:
    """Return which part of the longer text's lines the two share, from 0 to 1; blank lines do not count."""
    one, two = (Counter(line.strip() for line in lines if line.strip()) for lines in (first, second))
    return (one & two).total() / max(one.total(), two.total(), 1)
