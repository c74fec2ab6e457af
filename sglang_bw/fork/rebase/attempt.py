"""What git makes of a patch on the new release, and the places that it marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_bw.errors import PatchApplyError
from sglang_bw.fork.gitrepo import GitRepo
from sglang_bw.fork.rebase.marks import marked_places
from sglang_bw.fork.rebase.outcome import Conflict
from sglang_bw.fork.scratch import Scratch


@dataclass(frozen=True)
class Attempt:
    """What git made of a patch: the tree id when it joined everything, else the paths it could not join."""

    tree: str
    unmerged: tuple[str, ...]


def pick(repo: GitRepo, commit: str) -> Attempt:
    """Let git join a commit with HEAD in the index."""
    done = repo.run("cherry-pick", "--no-commit", commit, check=False)
    listed = repo.run("ls-files", "--unmerged", "-z").stdout.decode("utf-8", "surrogateescape")
    unmerged = tuple(sorted({entry.partition("\t")[2] for entry in listed.split("\0") if entry}))
    if unmerged:
        return Attempt("", unmerged)
    if done.code:
        said = (done.stderr or done.text).strip().splitlines()
        raise PatchApplyError(
            f"git cherry-pick fails without a conflict: {said[0] if said else 'no reason given'}",
            hint="nobody expects this: please report it with the output of `git --version`",
        )
    return Attempt(repo.run("write-tree").text, ())


def marked(scratch: Scratch, unmerged: Sequence[str]) -> list[Conflict]:
    """Return the places that git marked in the work tree."""
    found: list[Conflict] = []
    for path in unmerged:
        file = scratch.tree / path
        if not file.is_file():
            # A sparse tree may lack it; without both sides in the index this fails, and there is nothing to show.
            scratch.repo.run("checkout", "--merge", "--ignore-skip-worktree-bits", "--", path, check=False)
        places = list(marked_places(path, file.read_bytes())) if file.is_file() else []
        found += places or [Conflict(path=path, why="one side deletes or renames the file, the other changes it")]
    return found
