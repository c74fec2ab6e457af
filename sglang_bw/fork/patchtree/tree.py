"""Laying a series out as commits, and taking the commits back."""

from __future__ import annotations

import shlex
from pathlib import Path

from sglang_bw.errors import ScratchError
from sglang_bw.fork import message, upstream
from sglang_bw.fork.apply import Progress
from sglang_bw.fork.patchtree import guards
from sglang_bw.fork.patchtree.files import check, named_files, write
from sglang_bw.fork.patchtree.target import Export, Target, TreeState, digests, some
from sglang_bw.fork.scratch import Scratch, opened, scratch_root
from sglang_bw.fork.wheel import read_wheel

# What tools leave in a work tree and nobody wants in a patch; dist/ is what `build` makes when it runs there.
_IGNORED = "/dist/\n/python/dist/\n__pycache__/\n*.pyc\n*.orig\n*.rej\n*~\n.*.swp\n"


def open_tree(target: Target, topic: str, *, wheel: Path | None, progress: Progress) -> Path:
    """Lay the series out as commits, ready for a new patch, and return the work tree.

    A tree that is open already is used again, and follows the disk when patches were edited there.

    :param wheel: any upstream wheel of the base, else one is fetched.
    :raises ScratchError: there are edits in the tree that no patch file holds, or it is damaged.
    :raises DriftError: a patch file is not what git exports from it.
    """
    guards.require_writable(target)
    guards.require_new(target, topic)
    with opened(target.name) as scratch:
        state = scratch.read_state(TreeState)
        if state:
            guards.require_ours(scratch, state)
            guards.require_exported(scratch, state, target)
        if state is None or (state.files, state.below) != (digests(target.files()), digests(target.below())):
            state = _lay_out(scratch, target, wheel, progress)
            guards.require_same(scratch, state, target)
        scratch.write_state(state.model_copy(update={"topic": topic}))
        return scratch.tree


def export(target: Target, *, overwrite: bool = False, progress: Progress) -> Export:
    """Write the commits of the scratch tree as patch files; those that did not change keep every byte.

    Uncommitted edits become the commit of the topic that ``open_tree`` was called for. Numbers change only where
    the order asks for it.

    :param overwrite: patch files that were edited on disk give way to the tree.
    :raises ScratchError: no tree is open, it is not ours, or edits belong to no patch.
    :raises DriftError: patch files were edited on disk since.
    :raises LintError: a patch breaks the format; nothing was written.
    """
    guards.require_writable(target)
    with opened(target.name) as scratch:
        state = guards.open_state(scratch, target)
        _ignore(scratch)  # the tree may be from a version of the tool that ignored less
        if not overwrite:
            guards.require_undrifted(state, target)
        progress("committing")
        _commit_edits(scratch, state, target)
        progress("exporting")
        named = named_files(scratch.export(state.start), state.topic)
        unfilled = check(target, named)
        return write(scratch, state, target, named, unfilled)


def take_disk(target: Target, *, wheel: Path | None, progress: Progress) -> Export:
    """Start over from the patch files on disk and bring them into the exported form.

    :raises ScratchError: there are edits in the tree that no patch file holds.
    """
    guards.require_writable(target)
    with opened(target.name) as scratch:
        state = scratch.read_state(TreeState)
        if state:
            guards.require_ours(scratch, state)
            guards.require_exported(scratch, state, target)
        state = _lay_out(scratch, target, wheel, progress)
        named = named_files(scratch.export(state.start), "")
        return write(scratch, state, target, named, check(target, named))


def has_edits(target: Target) -> bool:
    """Whether a scratch tree is open for this series and holds something that no patch file has yet."""
    if not (scratch_root() / target.name).is_dir():
        return False
    with opened(target.name) as scratch:
        state = scratch.read_state(TreeState)
        return state is not None and scratch.exists and bool(guards.edits_of(scratch, state))


def _lay_out(scratch: Scratch, target: Target, wheel: Path | None, progress: Progress) -> TreeState:
    """Make the repository anew from wheel and patch files; it counts only once its state is written."""
    pins = target.series.pins
    if wheel is None:
        name = upstream.pick_wheel(pins, upstream.this_python(), upstream.this_machine())
        progress(f"fetching {name}")
        wheel = upstream.fetch(pins, name)
    source = read_wheel(wheel, sha256=upstream.pinned_digest(pins, wheel), version=pins.version)
    progress("importing the release")
    scratch.remove()
    scratch.create()
    _ignore(scratch)
    for key, value in message.identity().items():
        scratch.repo.run("config", key, value)
    scratch.start(scratch.import_release(source))
    below, files = target.below(), target.files()
    progress(f"applying {len(below) + len(files)} patches")
    scratch.am_series(below)
    start = scratch.repo.run("rev-parse", "HEAD").text
    scratch.am_series(files)
    head = scratch.repo.run("rev-parse", "HEAD").text
    return TreeState(start=start, head=head, below=digests(below), files=digests(files))


def _ignore(scratch: Scratch) -> None:
    (scratch.tree / ".git" / "info").mkdir(exist_ok=True)
    (scratch.tree / ".git" / "info" / "exclude").write_text(_IGNORED, encoding="utf-8")


def _commit_edits(scratch: Scratch, state: TreeState, target: Target) -> None:
    """Make the open topic's commit, and give it the trailers that its author has not written."""
    edits = scratch.changes()
    new = scratch.repo.run("rev-parse", "HEAD").text if _is_new(scratch, state) else ""
    if edits and (new or not state.topic):
        git = f"git -C {shlex.quote(str(scratch.tree))}"
        raise ScratchError(
            f"{scratch.tree} has edits that are not committed: {some(edits)}",
            hint=f"`{git} add --all && {git} commit --amend` adds them to the last patch; for an older one commit"
            " with --fixup and `git rebase -i --autosquash`; then export again",
        )
    draft = message.Draft(target.series.base, state.topic, local=target.local is not None)
    if edits:
        scratch.repo.run("add", "--all", ".")
        scratch.repo.run(*draft.commit_command(), stdin=draft.template().encode())
    elif new and state.topic:
        text = scratch.repo.run("log", "-1", "--format=%B").stdout
        if (filled := draft.completed(scratch.repo, text)) != text:
            scratch.repo.run("commit", "--quiet", "--amend", "--no-verify", "--file", "-", stdin=filled)


def _is_new(scratch: Scratch, state: TreeState) -> bool:
    """Whether the last commit is one that no patch file was exported from yet."""
    head = scratch.repo.run("rev-parse", "HEAD").text
    return head not in (state.start, state.head) and not scratch.name_of(head)
