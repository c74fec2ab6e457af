"""What a person made of a patch that needed one: taken when nothing is left to do in it, or the patch is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_bw.errors import RebaseOpenError, RebaseStoppedError, ScratchError
from sglang_bw.fork.mail import Patch
from sglang_bw.fork.rebase.marks import marked_places
from sglang_bw.fork.rebase.outcome import PatchOutcome
from sglang_bw.fork.rebase.semantic import twice
from sglang_bw.fork.rebase.state import Phase, RebaseState
from sglang_bw.fork.rebase.units import parse
from sglang_bw.fork.scratch import Scratch


def skip(scratch: Scratch, state: RebaseState) -> RebaseState:
    """Leave the patch that needs a person out of the new series."""
    return _decided(scratch, _require_stopped(state), state.head, left_out=True)


def accept(scratch: Scratch, state: RebaseState, patch: Patch) -> RebaseState:
    """Take what a person made of the patch: edited files, staged or not, or one finished commit.

    Message, author, date and trailers are the original patch's.

    :raises RebaseStoppedError: markers are left, a file does not parse, something is defined twice, nothing is left.
    :raises ScratchError: files or commits that are no part of the patch.
    """
    _require_stopped(state)
    repo, commit = scratch.repo, state.series[state.stopped_at]
    _require_one_commit(scratch, state)
    touched = set(repo.changed(f"{commit}^", commit))
    edited = scratch.changes()
    _require_known(scratch, edited, touched)
    in_tree = [path for path in edited if (scratch.tree / path).is_file()]
    _refuse(scratch, state, patch, _problems({path: (scratch.tree / path).read_bytes() for path in in_tree}))
    if edited:
        repo.run("add", "--all", "--", *edited)
    tree = repo.run("write-tree").text
    changed = repo.read_many(tree, repo.changed(state.head, tree))
    _refuse(scratch, state, patch, _problems(changed) or _defined_twice(scratch, state, commit, changed))
    if tree == repo.tree(state.head):
        raise RebaseStoppedError(
            f"nothing is left of {patch.name}",
            hint=f"`{state.request.then('skip')}` leaves it out of the new series",
        )
    repo.run("reset", "--quiet", "--soft", state.head)
    repo.run("commit", "--quiet", "--no-verify", "--reuse-message", commit)
    head = repo.run("rev-parse", "HEAD").text
    scratch.set_names({head: patch.name})
    return _decided(scratch, state, head, resolved=True)


def _require_stopped(state: RebaseState) -> RebaseState:
    if state.phase is not Phase.STOPPED:
        raise RebaseOpenError(
            "no patch waits for a person",
            hint=f"go on with `{state.request.then('continue')}`, or end it with `--abort`",
        )
    return state


def _require_one_commit(scratch: Scratch, state: RebaseState) -> None:
    """Look at what the user's own git did: HEAD is where we left it, or one commit further."""
    listed = scratch.repo.run("rev-list", f"{state.head}..HEAD").text.split()
    behind = scratch.repo.run("rev-list", f"HEAD..{state.head}").text.split()
    if behind or len(listed) > 1:
        raise ScratchError(
            f"{scratch.tree} is {len(listed)} commits ahead and {len(behind)} behind: one patch is one commit",
            hint=f"squash them, or `git -C {scratch.tree} reset --soft {state.head[:12]}`",
        )


def _require_known(scratch: Scratch, edited: Sequence[str], touched: set[str]) -> None:
    tracked = scratch.repo.run("ls-files", "-z").stdout.decode("utf-8", "surrogateescape").split("\0")
    strange = sorted(set(edited) - set(tracked) - touched)
    if strange:
        raise ScratchError(
            f"{scratch.tree} has files that are no part of the patch: {', '.join(strange)}",
            hint="delete them, or `git add` them if the patch needs them",
        )


def _refuse(scratch: Scratch, state: RebaseState, patch: Patch, problems: Sequence[str]) -> None:
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise RebaseStoppedError(
            f"{patch.name} is not resolved yet:{listed}",
            hint=f"edit {scratch.tree}, then `{state.request.then('continue')}`",
        )


def _problems(files: Mapping[str, bytes]) -> list[str]:
    found = []
    for path, data in files.items():
        marks = marked_places(path, data)
        found += [f"{path}:{mark.line}: conflict markers are left" for mark in marks]
        if not marks and path.endswith(".py") and parse(path, data) is None:
            found.append(f"{path}: is no valid Python")
    return found


def _defined_twice(scratch: Scratch, state: RebaseState, commit: str, changed: Mapping[str, bytes]) -> list[str]:
    new = scratch.repo.read_many(state.head, changed)
    patched = scratch.repo.read_many(commit, changed)
    return [
        f"{path}: {doubt.why}"
        for path, data in changed.items()
        for doubt in twice(path, patched.get(path, b""), new.get(path, b""), data)
    ]


def _decided(
    scratch: Scratch, state: RebaseState, head: str, *, resolved: bool = False, left_out: bool = False
) -> RebaseState:
    last: PatchOutcome = state.outcomes[-1].model_copy(update={"resolved": resolved, "left_out": left_out})
    outcomes = (*state.outcomes[:-1], last)
    state = state.model_copy(update={"outcomes": outcomes, "head": head, "phase": Phase.MOVING})
    scratch.write_state(state)
    return state
