"""When a scratch tree must not be used or patch files must not be written over: one error each, with the way out."""

from __future__ import annotations

import hashlib
import re
import shlex

from sglang_bw.errors import DriftError, LintError, OutputError, ScratchError
from sglang_bw.fork.patchtree.target import Target, TreeState, digests, some, topic_of
from sglang_bw.fork.refresh import READ_ONLY
from sglang_bw.fork.scratch import Scratch
from sglang_bw.fork.series import ORDER_FILE, is_packaged

_TOPIC = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_BUSY = ("rebase-merge", "rebase-apply", "MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD")


def require_writable(target: Target) -> None:
    """Refuse the series inside an installed tool, and what is no folder; a local one may lie on the first.

    :raises OutputError: it is one of them.
    """
    if target.folder.exists() and not target.folder.is_dir():
        raise OutputError(f"{target.folder} is no folder", hint="a local series is a folder: name one with --local DIR")
    if target.local is None and is_packaged(target.series.folder.parent):
        raise OutputError(f"{target.folder} is the copy inside the installed tool", hint=READ_ONLY)


def require_new(target: Target, topic: str) -> None:
    """Refuse what is no topic, or one that another patch has.

    :raises LintError: it is.
    """
    if not _TOPIC.fullmatch(topic):
        raise LintError([f"{topic!r} is no topic"], hint="small letters and digits, joined by '-': moe-backend")
    taken = [path.name for path in target.files() if topic_of(path.name) == topic]
    if taken:
        raise LintError(
            [f"the topic {topic} is taken by {taken[0]}"],
            hint="choose another one; to change that patch, amend its commit in the scratch tree",
        )


def require_ours(scratch: Scratch, state: TreeState) -> None:
    """Look at the repository: sound, made by us, and not in the middle of something.

    :raises ScratchError: it is not.
    """
    scratch.require_sound()
    hint = f"remove {scratch.folder} and begin again; patch files were not touched"
    known = scratch.repo.run("merge-base", "--is-ancestor", state.start, "HEAD", check=False)
    if known.code:
        raise ScratchError(
            f"{scratch.tree} does not lead from the series to HEAD: it is another repository, or commits below the"
            " patches were changed",
            hint=hint,
        )
    busy = [name for name in _BUSY if (scratch.tree / ".git" / name).exists()]
    if busy:
        raise ScratchError(
            f"{scratch.tree} is in the middle of a git operation ({busy[0]})",
            hint="finish it (`git status` there says how), then run the command again",
        )


def open_state(scratch: Scratch, target: Target) -> TreeState:
    """Return what is remembered of an open tree.

    :raises ScratchError: none is open, or it is not ours.
    :raises DriftError: what lies below local patches has changed.
    """
    state = scratch.read_state(TreeState)
    if state is None:
        raise ScratchError(
            f"no scratch tree is open for {target.folder}",
            hint=f"`sglang-bw patches new TOPIC{target.options}` opens one",
        )
    require_ours(scratch, state)
    if state.below != digests(target.below()):
        raise DriftError(
            f"the series of {target.series.base} has changed under the local patches",
            hint="export is not safe: save your commits"
            f" (`git -C {shlex.quote(str(scratch.tree))} format-patch {state.start[:12]}`),"
            f" remove {scratch.folder}, and begin again",
        )
    return state


def edits_of(scratch: Scratch, state: TreeState) -> list[str]:
    """Return what a tree has that no patch file has: paths, and a line for commits."""
    edits = scratch.changes()
    if scratch.repo.run("rev-parse", "HEAD").text != state.head:
        edits.append("commits that were made or amended")
    return edits


def require_exported(scratch: Scratch, state: TreeState, target: Target) -> None:
    """Refuse to go on where something would be thrown away.

    :raises ScratchError: the tree has edits that no patch file holds.
    """
    if edits := edits_of(scratch, state):
        raise ScratchError(
            f"{scratch.tree} has edits that no patch file holds yet: {some(edits)}",
            hint=f"`sglang-bw patches export{target.options}` writes them; to throw them away, remove {scratch.folder}",
        )


def require_same(scratch: Scratch, state: TreeState, target: Target) -> None:
    """Refuse patch files that are not what git exports from them.

    :raises DriftError: naming them; the tree is left without a state, as if it had not been opened.
    """
    exported = {one.name: hashlib.sha256(one.data).hexdigest() for one in scratch.export(state.start)}
    if drifted := [name for name, digest in state.files.items() if exported.get(name) != digest]:
        raise DriftError(
            f"not what git exports (edited by hand?): {some(drifted)}",
            hint=f"`sglang-bw patches export --from-disk{target.options}` brings them into that form, from what they"
            " say now",
        )


def require_undrifted(state: TreeState, target: Target) -> None:
    """Refuse to write over what was edited on disk; what a killed export wrote is no edit.

    :raises DriftError: naming the files.
    """
    on_disk = digests(sorted(target.folder.glob("*.patch")))
    known = state.files.keys() | state.writing.keys()
    drifted = [
        name
        for name in sorted(known | on_disk.keys())
        if on_disk.get(name) not in (state.files.get(name), state.writing.get(name))
    ]
    order = [path.name for path in target.files()]
    if order not in (list(state.files), list(state.writing)):
        drifted.append(ORDER_FILE)
    if drifted:
        raise DriftError(
            f"edited on disk since the scratch tree was opened: {some(drifted)}",
            hint=f"`sglang-bw patches export --overwrite{target.options}` lets the tree win;"
            f" `sglang-bw patches export --from-disk{target.options}` lets the disk win",
        )
