"""The second, strict reader of a patch: zero fuzz, zero offset, in memory, on bytes.

It knows nothing of git. The build applies each patch with both and compares the bytes, so that a wrong place or a
skipped file in either cannot pass.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from sglang_bw.errors import PatchApplyError

Reader = Callable[[str], bytes | None]


def apply_exactly(name: str, diff: bytes, read: Reader) -> dict[str, bytes | None]:
    """Apply a diff and return path -> new bytes, ``None`` for a deleted file.

    :param name: what to call the patch in errors.
    :param read: gives a file's bytes by its path below the tree, ``None`` when there is no such file.
    :raises PatchApplyError: a hunk's old lines are not found at exactly the line it names, a file is missing or in
        the way, or the diff has something else than text hunks (binary, mode only).
    """
    changed: dict[str, bytes | None] = {}

    def current(path: str) -> bytes | None:
        return changed[path] if path in changed else read(path)

    for file in parse(name, diff):
        if file.is_binary_file or (not file and not file.is_rename):
            raise PatchApplyError(
                f"{name}: {file.path}: no text hunks (binary or mode change)",
                hint="a patch of this series changes text only",
            )
        source, target = sides(file)
        old = current(source) if source else b""
        if old is None:
            raise PatchApplyError(
                f"{name}: {source}: no such file in this release",
                hint="upstream moved or deleted it: refresh the patch against this release",
            )
        if target and target != source and current(target) is not None:
            raise PatchApplyError(
                f"{name}: {target}: the patch creates this file, but it exists already",
                hint="upstream or an earlier patch has it: refresh the patch against this release",
            )
        new = _apply_hunks(name, source or target, old, file)
        if source and source != target:
            changed[source] = None
        if target:
            changed[target] = new
    return changed


def parse(name: str, diff: bytes) -> PatchSet:
    """Parse a diff; bytes that are no UTF-8 survive.

    :raises PatchApplyError: it is no unified diff.
    """
    try:
        patch = PatchSet(io.StringIO(diff.decode("utf-8", "surrogateescape")))
    except UnidiffParseError as error:
        raise PatchApplyError(f"{name}: the diff is corrupt: {error}", hint="export it again from a commit") from None
    if not patch:
        raise PatchApplyError(f"{name}: the diff is empty", hint="a patch must change something")
    return patch


def sides(file: Any) -> tuple[str, str]:
    """Return the old and the new path of a file in a diff, empty where it does not exist."""
    return _side(file.source_file), _side(file.target_file)


def touched(name: str, diff: bytes) -> list[str]:
    """Return the paths that a diff names, old and new."""
    return sorted({side for file in parse(name, diff) for side in sides(file) if side})


def _side(path: str) -> str:
    """Return a path without ``a/`` or ``b/``, empty for /dev/null."""
    if path == "/dev/null":
        return ""
    return path[2:] if path[:2] in ("a/", "b/") else path


def _apply_hunks(name: str, path: str, old: bytes, file: Any) -> bytes:
    lines = _split_lf(old)
    result: list[bytes] = []
    done = 0
    for number, hunk in enumerate(file, start=1):
        source = _bytes([line for line in hunk if line.is_context or line.is_removed], hunk)
        # A hunk that only adds names the line before it.
        start = hunk.source_start - (1 if hunk.source_length else 0)
        if start < done or lines[start : start + len(source)] != source:
            raise PatchApplyError(*_explain(name, path, number, hunk, lines, source, start))
        # A hunk without context at an end says that the file ends there, as git reads it too.
        ends = start + len(source)
        if (start > 0 and not hunk[0].is_context) or (ends < len(lines) and not _last(hunk).is_context):
            where = f"{name}: {path}: hunk {number} (line {hunk.source_start})"
            raise PatchApplyError(f"{where} has no context at its end, but the file goes on there")
        result += lines[done:start]
        result += _bytes([line for line in hunk if line.is_context or line.is_added], hunk)
        done = start + len(source)
    return b"".join(result + lines[done:])


def _last(hunk: Any) -> Any:
    """Return the last line of a hunk that is a line of the file."""
    return next(line for line in reversed(list(hunk)) if line.line_type != "\\")


def _split_lf(text: bytes) -> list[bytes]:
    """Split at LF only: a lone CR or a CRLF is part of a line."""
    parts = text.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _bytes(lines: Sequence[Any], hunk: Any) -> list[bytes]:
    """Return hunk lines as file lines; one before a "no newline" mark loses its LF."""
    everything = list(hunk)
    unended = {id(before) for before, mark in itertools.pairwise(everything) if mark.line_type == "\\"}
    encoded = [(line.value.encode("utf-8", "surrogateescape"), id(line) in unended) for line in lines]
    return [value.removesuffix(b"\n") if cut else value for value, cut in encoded]


def _explain(
    name: str, path: str, number: int, hunk: Any, lines: list[bytes], source: list[bytes], start: int
) -> tuple[str]:
    """Say which hunk failed and what stands there instead."""
    places = [at for at in range(len(lines) - len(source) + 1) if lines[at : at + len(source)] == source]
    where = f"{name}: {path}: hunk {number} (line {hunk.source_start})"
    if places and source:
        nearest = min(places, key=lambda at: abs(at - start))
        return (f"{where} would apply {nearest - start:+d} lines off; an offset is refused: refresh the patch",)
    for offset, want in enumerate(source):
        have = lines[start + offset] if start + offset < len(lines) else None
        if have != want:
            found = "the end of the file" if have is None else repr(have.decode("utf-8", "replace").rstrip("\n"))
            wanted = repr(want.decode("utf-8", "replace").rstrip("\n"))
            return (f"{where} does not apply: line {start + offset + 1} should be {wanted}, found {found}",)
    return (f"{where} does not apply: it overlaps the hunk before it",)
