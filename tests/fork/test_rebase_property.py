"""For random edits of both sides a rebase gives what applying by hand gives, or it stops: never silently another thing.

Every line has a hidden number, so that "by hand" is known exactly: the patch's edits are made at the lines they mean,
whatever stands there in how many copies. New lines of either side are its own, and no side takes a line away that lies
beside an equal one: which of the two it meant, its text does not say.
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from sglang_bw.fork.gitrepo import git_environment, git_program
from sglang_bw.fork.rebase.semantic import examine

BODY = [b"    a()\n", b"    b()\n", b"    c()\n", b"\n", b"    return x\n"]


@dataclass(frozen=True)
class Line:
    """A line of the old release (``number`` >= 0), or one that a side puts in behind such a line."""

    number: int
    text: bytes


@dataclass(frozen=True)
class Edit:
    at: int
    kind: str
    text: bytes = b""


def apply(lines: list[Line], edits: list[Edit]) -> list[Line] | None:
    """Make edits by hand; ``None`` when a line that one means is not there any more, or is another one."""
    result = list(lines)
    for edit in edits:
        places = [at for at, line in enumerate(result) if line.number == edit.at]
        if not places and edit.kind == "delete":
            continue  # both sides delete it
        if not places:
            return None
        at = places[0]
        if edit.kind == "insert":
            result.insert(at + 1, Line(-1, edit.text))
        elif edit.kind == "replace":
            result[at] = Line(-2, edit.text)
        else:
            del result[at]
    return result


def text(lines: list[Line]) -> bytes:
    return b"".join(line.text for line in lines)


def merged_by_git(old: bytes, patched: bytes, new: bytes) -> bytes | None:
    """Return git's three-way merge, ``None`` for a conflict."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("new", "old", "patched")]
        for path, data in zip(paths, (new, old, patched), strict=True):
            path.write_bytes(data)
        command = [git_program(), "merge-file", "-p", *map(str, paths)]
        done = subprocess.run(command, cwd=folder, env=git_environment(Path(folder)), capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None


@st.composite
def files(draw: st.DrawFn) -> list[Line]:
    """Give a file of functions with few different lines."""
    lines: list[bytes] = []
    for number in range(draw(st.integers(1, 4))):
        lines += [
            b"def f%d():\n" % number,
            *draw(st.lists(st.sampled_from(BODY), min_size=1, max_size=8)),
            b"    end()\n",
            b"\n",
        ]
    return [Line(number, line) for number, line in enumerate(lines)]


def edits(lines: list[Line], texts: st.SearchStrategy[bytes], count: int) -> st.SearchStrategy[list[Edit]]:
    body = [line.number for line in lines if line.text in BODY]
    one = st.builds(Edit, st.sampled_from(body), st.sampled_from(["insert", "replace", "delete"]), texts)
    return st.lists(one, min_size=1, max_size=count, unique_by=lambda edit: edit.at)


def _is_alone(lines: list[Line], at: int) -> bool:
    return lines[at].text not in [line.text for line in (*lines[at - 1 : at], *lines[at + 1 : at + 2])]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_result_is_that_of_a_hand_or_none(data: st.DataObject) -> None:
    lines = data.draw(files())
    mine = data.draw(edits(lines, st.integers(0, 99).map(lambda n: b"    mine(%d)\n" % n), 2))
    own = st.integers(0, 99).map(lambda n: b"    upstream(%d)\n" % n)
    theirs = data.draw(edits(lines, own, 6))
    deleted = [edit.at for edit in mine if edit.kind == "delete"]
    lost = [edit.at for edit in theirs if edit.kind != "insert"]
    assume(len(deleted) < 2 and all(_is_alone(lines, at) for at in (*deleted, *lost)))
    old = text(lines)
    patched, upstream = apply(lines, mine), apply(lines, theirs)
    assert patched is not None
    assert upstream is not None
    result = merged_by_git(old, text(patched), text(upstream))
    if result is None or examine("f.py", old, text(patched), text(upstream), result):
        event("stopped")
        return
    by_hand = apply(upstream, mine)
    event("moved")
    assert by_hand is not None, "an edit was put somewhere although its line is gone"
    assert result == text(by_hand)
