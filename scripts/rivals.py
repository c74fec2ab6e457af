"""What other tools make of a patch on the same input, and whether a success of theirs is one.

An exit code says nothing about the place. The judge compares syntax trees: function by function with the patch on its
own release, and with the result of `sglang-bw rebase` where that carried the patch over.
"""

from __future__ import annotations

import ast
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sglang_bw.fork import strict
from sglang_bw.fork.gitrepo import git_environment
from sglang_bw.fork.mail import Patch
from sglang_bw.fork.rebase.semantic import twice
from sglang_bw.fork.rebase.units import parse, units
from sglang_bw.fork.scratch import Scratch

Files = Mapping[str, bytes]
# In a directory of its own, and in one that lies in somebody's checkout, as a vendored copy does.
IN_FOLDER = {
    "git apply": ("git", "apply"),
    "git apply in a checkout": ("git", "apply"),
    "patch": ("patch", "-p1", "--input"),
}
AM = "git am -3"
NAMES = (*IN_FOLDER, AM)


class Verdict(StrEnum):
    """What a tool's result is worth."""

    # It failed, and said so.
    REFUSED = "refused"
    # The same code as the patch means.
    RIGHT = "right"
    # Exit code 0, and nothing was changed.
    NOTHING = "nothing done"
    # Upstream has it already, and has it twice now.
    TWICE = "twice"
    # A function that the patch does not change was changed, or one that it does change came out otherwise.
    WRONG_PLACE = "wrong place"
    # It was put where it belongs, and uses what the release does not have, or is no Python.
    BROKEN = "broken"
    # It lies in the right functions, but upstream changed them, and nobody has shown that the result is right.
    UNPROVED = "unproved"

    @property
    def is_false(self) -> bool:
        """Whether the exit code said success and the result is wrong."""
        return self in (Verdict.NOTHING, Verdict.TWICE, Verdict.WRONG_PLACE, Verdict.BROKEN)


@dataclass(frozen=True)
class Given:
    """A patch and its input.

    ``old`` and ``patched`` are its files on its own release, ``new`` those of the other release with the patches before
    it, ``right`` the files as the rebase carried them over (``None``: it did not). ``merged``: the rebase says that
    upstream has it. ``doubt``: why the rebase does not carry it over.
    """

    patch: Patch
    old: Files
    patched: Files
    new: Files
    right: Files | None
    merged: bool
    doubt: str


@dataclass(frozen=True)
class Result:
    """One tool on one patch. ``seconds`` is the command alone."""

    verdict: Verdict
    seconds: float
    says: str = ""


def in_folder(name: str, given: Given) -> Result:
    """Run a tool that needs no repository over the files of the patch."""
    with tempfile.TemporaryDirectory(prefix="sglang-bw-rival-") as scratch:
        top = Path(scratch)
        folder = top / "vendored" if "checkout" in name else top
        environment = git_environment(top.parent)
        if folder != top:
            folder.mkdir()
            subprocess.run(["git", "init", "--quiet", str(top)], env=environment, check=True)
        for path, data in given.new.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        command = [*IN_FOLDER[name], str(given.patch.path.resolve())]
        started = time.monotonic()
        done = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        seconds = time.monotonic() - started
        if done.returncode:
            return Result(Verdict.REFUSED, seconds)
        touched = {*given.new, *strict.touched(given.patch.name, given.patch.diff)}
        made = {path: (folder / path).read_bytes() for path in touched if (folder / path).is_file()}
    return _judged(given, made, seconds)


def am(plain: Scratch, head: str, given: Given) -> Result:
    """Run `git am -3` in a repository that has the new release and nothing of the old one."""
    touched = {*given.new, *strict.touched(given.patch.name, given.patch.diff)}
    plain.start(head, work_on=touched)
    started = time.monotonic()
    done = plain.repo.run("am", "-3", str(given.patch.path.resolve()), check=False)
    seconds = time.monotonic() - started
    if done.code:
        plain.repo.run("am", "--abort", check=False)
        return Result(Verdict.REFUSED, seconds)
    changed = plain.repo.changed(head)
    return _judged(given, plain.repo.read_many("HEAD", {*touched, *changed}), seconds)


def _judged(given: Given, made: Files, seconds: float) -> Result:
    verdict, says = judge(given, made)
    return Result(verdict, seconds, says)


def judge(given: Given, made: Files) -> tuple[Verdict, str]:
    """Return what a result is worth, and the function that shows it.

    :param made: the files of the patch after a tool that reported success.
    """
    if dict(made) == dict(given.new):
        return Verdict.NOTHING, ""
    doubts = []
    for path in sorted({*made, *given.new}):
        before, after = given.new.get(path, b""), made.get(path, b"")
        if before == after:
            continue
        if path.endswith(".py") and after and parse(path, before) and not parse(path, after):
            return Verdict.BROKEN, f"{path} is no Python any more"
        if found := twice(path, given.patched.get(path, b""), before, after):
            return Verdict.TWICE, found[0].unit
        verdict, says = _places(path, given, after)
        if verdict.is_false:
            return verdict, says
        doubts += [says] if verdict is Verdict.UNPROVED else []
    if given.merged:
        return Verdict.TWICE, "upstream has it already"
    if given.right is not None:
        wrong = [path for path in {*made, *given.right} if code(path, made) != code(path, given.right)]
        return (Verdict.WRONG_PLACE, wrong[0]) if wrong else (Verdict.RIGHT, "")
    if "does not have" in given.doubt:
        return Verdict.BROKEN, given.doubt.partition(", which")[0]
    return (Verdict.UNPROVED, doubts[0]) if doubts else (Verdict.RIGHT, "")


def _places(path: str, given: Given, after: bytes) -> tuple[Verdict, str]:
    """Compare the functions that changed with those that the patch changes, and with what it makes of them."""
    old, patched, before, result = (
        _functions(path, data)
        for data in (given.old.get(path, b""), given.patched.get(path, b""), given.new.get(path, b""), after)
    )
    verdict, says = Verdict.RIGHT, ""
    for key in {*before, *result}:
        if before.get(key) == result.get(key):
            continue
        if old.get(key) == patched.get(key):
            return Verdict.WRONG_PLACE, f"the patch leaves {key} alone"
        if before.get(key) == old.get(key) and result.get(key) != patched.get(key):
            return Verdict.WRONG_PLACE, f"{key} comes out otherwise than on the patch's own release"
        if before.get(key) != old.get(key):
            verdict, says = Verdict.UNPROVED, f"upstream changed {key}"
    return verdict, says


def _functions(path: str, data: bytes) -> dict[str, str]:
    """Return unit -> its code without comments and layout."""
    found = {}
    for unit in units(path, data):
        text = b"".join(unit.lines[unit.code - unit.start :])
        found[unit.key] = _code(text)
    return found


def code(path: str, files: Files) -> str:
    """Return a file's code without comments and layout; its text when it is no Python."""
    data = files.get(path, b"")
    module = parse(path, data)
    return ast.unparse(module) if module else data.decode("utf-8", "surrogateescape")


def _code(text: bytes) -> str:
    """Return a statement without comments and layout; a class's head has no body to parse."""
    lines = text.decode("utf-8", "surrogateescape").split("\n")
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    plain = "\n".join(line[indent:] for line in lines)
    for candidate in (plain, plain.rstrip() + " pass"):
        try:
            return ast.unparse(ast.parse(candidate))
        except SyntaxError:
            continue
    return plain.strip()
