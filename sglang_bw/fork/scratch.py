"""Scratch repositories that outlive a command: upstream releases as commits, a series as commits on top.

They lie below the user's cache, one folder each, with an ordinary git work tree in it that the user may edit with his
own tools. A lock keeps a second process out; what a command must remember is one JSON file that is replaced in one
step. A repository is looked at before it is used again, and one that is damaged is refused, never repaired silently.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import platformdirs
from pydantic import BaseModel, ValidationError

from sglang_bw.errors import OutputError, PatchApplyError, RebaseOpenError, ScratchError
from sglang_bw.fork.apply import text_files
from sglang_bw.fork.gitrepo import COMMITTER, COMMITTER_EMAIL, GitRepo, data_command
from sglang_bw.fork.wheel import Wheel

_REPO = "tree"
_STATE = "state.json"
_NAMES = "refs/notes/patch-names"
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

State = TypeVar("State", bound=BaseModel)


@dataclass(frozen=True)
class Exported:
    """A commit as a patch file: ``name`` is the file name that its commit carries, empty for a new commit."""

    name: str
    subject: str
    data: bytes


def scratch_root() -> Path:
    """Return where scratch repositories are kept."""
    return Path(platformdirs.user_cache_dir("sglang-bw")) / "scratch"


class Scratch:
    """One scratch repository; get it from :func:`opened`, which holds its lock.

    ``repo`` is its git, ``tree`` the work tree for the user.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = folder / _REPO
        self.repo = GitRepo(self.tree)

    @property
    def exists(self) -> bool:
        """Whether there is a repository."""
        return (self.tree / ".git").is_dir()

    def create(self) -> None:
        """Make an empty repository where there is none; the user's own git gets the same settings as ours.

        :raises GitError: git is missing or too old.
        """
        self.repo = GitRepo.create(self.tree)
        mine = {"user.name": COMMITTER, "user.email": COMMITTER_EMAIL}
        # A patch keeps its file name when the user amends or reorders its commit.
        mine |= {"notes.rewriteRef": _NAMES, "notes.rewrite.amend": "true", "notes.rewrite.rebase": "true"}
        lines = []
        for key, value in (self.repo.settings() | mine).items():
            section, _, name = key.partition(".")
            lines.append(f'[{section}]\n\t{name} = "{value}"\n')
        # [notes "rewrite"] is a section of its own.
        text = "".join(lines).replace("[notes]\n\trewrite.", '[notes "rewrite"]\n\t')
        with (self.tree / ".git" / "config").open("a", encoding="utf-8") as config:
            config.write(text)

    def require_sound(self, *commits: str) -> None:
        """Look at the repository before it is used again.

        :param commits: what has to be whole; by default everything that HEAD, refs, reflogs and the index name, which
            must not change meanwhile.
        :raises ScratchError: it is gone, or objects are missing or damaged.
        """
        hint = f"remove {self.folder} and run the command again; your patches/ was not touched"
        if not self.exists:
            raise ScratchError(f"there is no scratch repository at {self.tree}", hint=hint)
        done = self.repo.run("fsck", "--no-dangling", "--no-progress", *commits, check=False)
        if done.code:
            said = (done.stderr or done.text).strip().splitlines()
            raise ScratchError(f"{self.tree} is damaged: {said[0] if said else 'git fsck fails'}", hint=hint)

    def release(self, version: str, sha256: str) -> str:
        """Return the commit of a release that was imported from that wheel, or an empty string."""
        known = self.repo.run(
            "rev-parse", "--verify", "--quiet", f"{_release(version, sha256)}^{{commit}}", check=False
        )
        return known.text if known.code == 0 else ""

    def import_release(self, wheel: Wheel) -> str:
        """Return the commit that holds a release's text files; the same wheel is imported once."""
        known = self.release(wheel.version, wheel.sha256)
        ref = _release(wheel.version, wheel.sha256)
        return known or self.repo.import_files(text_files(wheel), f"sglang {wheel.version}", ref)

    def releases(self) -> list[str]:
        """Return the commits of the releases that were imported; each takes about 70 MB."""
        return self.repo.run("for-each-ref", "--format=%(objectname)", "refs/releases").text.split()

    def files(self, revision: str) -> dict[str, bytes]:
        """Return every file of a commit, path -> bytes."""
        listed = self.repo.run("ls-tree", "-r", "--name-only", "-z", revision).stdout.decode("utf-8", "surrogateescape")
        return self.repo.read_many(revision, [path for path in listed.split("\0") if path])

    def start(self, commit: str, *, work_on: Iterable[str] | None = None) -> None:
        """Put HEAD, index and work tree at a commit; everything that lay there is thrown away.

        :param work_on: check out these paths only (a command that nobody looks at is quicker so); all for ``None``.
        """
        for unfinished in ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REBASE_HEAD", "index.lock", "MERGE_MSG", "AUTO_MERGE"):
            (self.tree / ".git" / unfinished).unlink(missing_ok=True)
        for unfinished in ("rebase-apply", "rebase-merge", "sequencer"):
            shutil.rmtree(self.tree / ".git" / unfinished, ignore_errors=True)
        self.repo.run("update-ref", "--no-deref", "HEAD", commit)
        self.repo.run("read-tree", "HEAD")
        for entry in self.tree.iterdir():
            if entry.name != ".git":
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        self.repo.check_out(work_on)
        self.repo.run("reset", "--quiet", "--hard")

    def am_series(self, files: Sequence[Path]) -> list[str]:
        """Commit patch files on HEAD, in order, and return one commit id each.

        :raises PatchApplyError: one does not apply; the tree is as it was before that patch.
        """
        if not files:
            return []
        before = self.repo.run("rev-parse", "HEAD").text
        done = self.repo.am(*files)
        if done.code:
            self.repo.run("am", "--quit", check=False)
            self.repo.run("reset", "--quiet", "--hard")
        commits = self.repo.run("rev-list", "--reverse", f"{before}..HEAD").text.split()
        self.set_names({commit: path.name for commit, path in zip(commits, files, strict=False)})
        if done.code:
            said = (done.stderr or done.text).strip().splitlines()
            raise PatchApplyError(
                f"{files[len(commits)].name}: git am refuses it: {said[0] if said else 'no reason given'}",
                hint="`sglang-bw patches lint` may say more",
            )
        return commits

    def set_names(self, names: dict[str, str]) -> None:
        """Remember the patch file names of commits, as git notes."""
        if not names:
            return
        parent = self.repo.run("rev-parse", "--verify", "--quiet", f"{_NAMES}^{{commit}}", check=False)
        stream = [f"commit {_NAMES}\ncommitter {COMMITTER} <{COMMITTER_EMAIL}> 946684800 +0000\n".encode()]
        stream.append(data_command(b"names"))
        stream += [f"from {parent.text}\n".encode()] if parent.code == 0 else []
        for commit, name in names.items():
            stream += [b"N inline " + commit.encode() + b"\n", data_command(name.encode())]
        self.repo.run("fast-import", "--quiet", stdin=b"".join(stream))

    def name_of(self, commit: str) -> str:
        """Return the patch file name that a commit carries, or an empty string."""
        done = self.repo.run("notes", f"--ref={_NAMES}", "show", commit, check=False)
        return done.text if done.code == 0 else ""

    def export(self, since: str) -> list[Exported]:
        """Return every commit after ``since`` as a patch file, in order."""
        listed = self.repo.run("rev-list", "--reverse", "--topo-order", f"{since}..HEAD").text.split()
        with tempfile.TemporaryDirectory(prefix="export-", dir=self.folder) as folder:
            files = self.repo.export(since, Path(folder))
            if len(files) != len(listed):
                raise ScratchError(
                    f"{len(listed)} commits give {len(files)} patches",
                    hint=f"a series has no merges and no empty commits: look at `git -C {self.tree} log`",
                )
            return [
                Exported(name, subject, path.read_bytes())
                for (subject, name), path in zip(self._described(listed), files, strict=True)
            ]

    def _described(self, commits: Sequence[str]) -> list[tuple[str, str]]:
        """Return the subject of each commit and the patch file name that it carries, if any."""
        if not commits:
            return []
        told = self.repo.run("log", "-z", "--no-walk=unsorted", f"--notes={_NAMES}", "--format=%s%x1f%N", *commits)
        lines = told.stdout.decode("utf-8", "replace").removesuffix("\0").split("\0")
        return [(subject, name.strip()) for subject, _, name in (line.partition("\x1f") for line in lines)]

    def changes(self) -> list[str]:
        """Return paths that differ from HEAD in index or work tree, untracked ones included."""
        listed = self.repo.run("status", "--porcelain", "--untracked-files=all", "-z").stdout.decode(
            "utf-8", "surrogateescape"
        )
        return sorted({entry[3:] for entry in listed.split("\0") if re.match(r"[ MADRCUT?!]{2} ", entry)})

    def read_state(self, model: type[State]) -> State | None:
        """Return what was remembered, ``None`` when there is nothing.

        :raises ScratchError: the file is damaged or of another schema version.
        """
        path = self.folder / _STATE
        try:
            return model.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise ScratchError(
                f"{path} cannot be read ({reason}): it is damaged, or another version of sglang-bw wrote it",
                hint=f"finish with the version that started it, or remove {self.folder}",
            ) from None

    def write_state(self, state: BaseModel | None) -> None:
        """Replace what is remembered, in one step that survives a power cut; ``None`` forgets it."""
        path = self.folder / _STATE
        if state is None:
            path.unlink(missing_ok=True)
            return
        with tempfile.NamedTemporaryFile("wb", dir=self.folder, prefix=".state-", delete=False) as file:
            file.write(state.model_dump_json(indent=1).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)  # noqa: PTH105

    def remove(self) -> None:
        """Delete the repository and what was remembered."""
        # The state goes first: a kill in between leaves a repository that nothing refers to.
        self.write_state(None)
        shutil.rmtree(self.tree, ignore_errors=True)


def _release(version: str, sha256: str) -> str:
    return f"refs/releases/{version}-{sha256[:16]}"


@contextmanager
def opened(name: str) -> Iterator[Scratch]:
    """Give the scratch repository of that name, locked until the block ends; it need not exist yet.

    :raises RebaseOpenError: another process works on it.
    :raises OutputError: the cache cannot be written to, or the disk is full.
    """
    folder = scratch_root() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"cannot write to {folder}: {error.strerror}", hint="set XDG_CACHE_HOME to a directory of your own"
        ) from None
    with lock:
        try:
            # The system lets go of it when the process dies, however it dies.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise RebaseOpenError(
                f"another sglang-bw (process {lock.read().strip() or 'unknown'}) works in {folder}",
                hint="wait until it has finished",
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            yield Scratch(folder)
        except OSError as error:
            if error.errno not in _FULL_DISK:
                raise
            raise OutputError(
                f"{error.strerror} ({error.filename or folder})",
                hint="free about 1 GB, or set XDG_CACHE_HOME; what was done so far is kept",
            ) from None
