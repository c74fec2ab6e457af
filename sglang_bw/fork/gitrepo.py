"""Git, in a scratch repository that nothing of the user's reaches.

Facts this module rests on (git 2.39): ``git apply`` inside another repository skips files with exit code 0 unless
``GIT_CEILING_DIRECTORIES`` stops the search; ``am`` and ``format-patch`` give the same bytes back with the options
below, and the same commit ids when author, committer and both dates are fixed.
"""

from __future__ import annotations

import functools
import io
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_bw.errors import GitError, OutputError

MIN_GIT = (2, 30)
# An older git takes the style's name for a fatal error.
ZDIFF3_GIT = (2, 35)

COMMITTER = "sglang-bw"
COMMITTER_EMAIL = "sglang-bw@users.noreply.invalid"
# Fixed, so that the same files make the same commit ids on any day.
EPOCH = "2000-01-01T00:00:00+0000"

_CONFIG = {
    "core.autocrlf": "false",
    "core.eol": "lf",
    "core.safecrlf": "false",
    "core.hooksPath": os.devnull,
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
    "core.fsmonitor": "false",
    "core.quotePath": "false",
    # Scratch objects live for seconds: do not spend time on compressing them.
    "core.compression": "0",
    "pack.compression": "0",
    "commit.gpgSign": "false",
    "gc.auto": "0",
    "diff.renames": "true",
    "advice.detachedHead": "false",
}

_FORMAT = (
    "--keep-subject",
    "--zero-commit",
    "--no-signature",
    "--full-index",
    "--no-numbered",
    "--stat=80,60,12",
    "--stat-graph-width=10",
)


def git_program() -> str:
    """Return the git to run.

    :raises GitError: none on PATH.
    """
    found = shutil.which("git")
    if not found:
        raise GitError(
            "git is not installed", hint="install it (for example `apt install git`) and run the command again"
        )
    return found


@functools.cache
def _version(program: str) -> tuple[str, tuple[int, int]]:
    """Return what a git says of itself, and its version; (0, 0) when it cannot be recognised."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"(\d+)\.(\d+)", done.stdout)
    return (done.stdout or done.stderr).strip(), (int(found[1]), int(found[2])) if found else (0, 0)


def git_environment(ceiling: Path) -> dict[str, str]:
    """Return an environment in which git sees no configuration of the user's or the system's."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return kept | {
        "GIT_CEILING_DIRECTORIES": str(ceiling),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_EDITOR": "true",
        "GIT_COMMITTER_NAME": COMMITTER,
        "GIT_COMMITTER_EMAIL": COMMITTER_EMAIL,
        "GIT_COMMITTER_DATE": EPOCH,
        "GIT_AUTHOR_NAME": COMMITTER,
        "GIT_AUTHOR_EMAIL": COMMITTER_EMAIL,
        "GIT_AUTHOR_DATE": EPOCH,
        "LC_ALL": "C",
        "TZ": "UTC",
    }


@dataclass(frozen=True)
class GitResult:
    """What one git process said."""

    code: int
    stdout: bytes
    stderr: str

    @property
    def text(self) -> str:
        """Standard output, decoded and stripped."""
        return self.stdout.decode("utf-8", "replace").strip()


class GitRepo:
    """A repository at ``path`` that exists for one piece of work."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._program = git_program()
        self._environment = git_environment(path.parent)

    @classmethod
    def create(cls, path: Path) -> GitRepo:
        """Make an empty repository.

        :raises GitError: git is missing or too old.
        """
        path.mkdir(parents=True, exist_ok=True)
        repo = cls(path)
        repo.require_version()
        repo.run("init", "--quiet", "--template=", "--initial-branch=main")
        return repo

    def require_version(self) -> None:
        """Refuse a git that is older than the options used here.

        :raises GitError: too old, or not recognisable.
        """
        said, version = _version(self._program)
        if version < MIN_GIT:
            wanted = ".".join(map(str, MIN_GIT))
            raise GitError(f"git {wanted} or newer is needed, this is: {said}", hint="install a newer git")

    def settings(self) -> dict[str, str]:
        """Return the configuration that every git process here gets, and none of the user's."""
        style = "zdiff3" if _version(self._program)[1] >= ZDIFF3_GIT else "diff3"
        return _CONFIG | {"merge.conflictStyle": style}

    def run(self, *arguments: str, stdin: bytes | None = None, check: bool = True) -> GitResult:
        """Run git here.

        :raises GitError: it failed and ``check`` is set.
        """
        settings = [part for key, value in self.settings().items() for part in ("-c", f"{key}={value}")]
        done = subprocess.run(
            [self._program, *settings, *arguments],
            cwd=self.path,
            env=self._environment,
            input=stdin if stdin is not None else b"",
            capture_output=True,
            check=False,
        )
        result = GitResult(done.returncode, done.stdout, done.stderr.decode("utf-8", "replace"))
        if check and result.code:
            said = (result.stderr or result.text).strip()
            if "No space left on device" in said:
                raise OutputError(f"the disk is full ({self.path.parent})", hint="free about 1 GB, or set TMPDIR")
            raise GitError(
                f"`git {' '.join(arguments)}` failed with exit code {result.code}: {said}",
                hint="nobody expects this: please report it with the output of `git --version`",
            )
        return result

    def commit_files(self, files: Mapping[str, bytes], message: str, *, work_on: Iterable[str]) -> None:
        """Commit ``files`` on the empty main branch and check out only what ``work_on`` names.

        A release has thousands of files and a series touches a few: the others never reach the work tree.
        """
        self.import_files(files, message, "refs/heads/main")
        self.check_out(work_on)

    def import_files(self, files: Mapping[str, bytes], message: str, ref: str) -> str:
        """Commit ``files`` as the root commit of a new ref, without touching the work tree, and return the commit id.

        They go into one pack. Every file gets the same mode, since upstream's wheels of one release differ in it.
        """
        stream = [f"commit {ref}\ncommitter {COMMITTER} <{COMMITTER_EMAIL}> 946684800 +0000\n".encode()]
        stream.append(data_command(message.encode()))
        for path, data in files.items():
            stream += [f"M 100644 inline {path}\n".encode(), data_command(data)]
        self.run("fast-import", "--quiet", stdin=b"".join(stream))
        return self.run("rev-parse", ref).text

    def commit_on(self, parent: str, files: Mapping[str, bytes]) -> str:
        """Commit changed or new files on a commit, without touching HEAD or the work tree, and return the commit id."""
        ref = "refs/scratch/commit"
        stream = [f"commit {ref}\ncommitter {COMMITTER} <{COMMITTER_EMAIL}> 946684800 +0000\n".encode()]
        stream += [data_command(b"some of a patch"), f"from {self.run('rev-parse', parent).text}\n".encode()]
        for path, data in files.items():
            stream += [f"M 100644 inline {path}\n".encode(), data_command(data)]
        self.run("fast-import", "--quiet", "--force", stdin=b"".join(stream))
        return self.run("rev-parse", ref).text

    def check_out(self, work_on: Iterable[str] | None) -> None:
        """Bring the work tree to HEAD: only what ``work_on`` names, or everything for ``None``."""
        patterns = "/*\n" if work_on is None else "".join(f"/{path}\n" for path in sorted(set(work_on)))
        info = self.path / ".git" / "info"
        info.mkdir(exist_ok=True)
        (info / "sparse-checkout").write_text(patterns or "/nothing\n", encoding="utf-8")
        self.run("config", "core.sparseCheckout", "true")
        self.run("read-tree", "-m", "-u", "HEAD")

    def commit_all(self, message: str) -> str:
        """Commit everything that lies in the work tree, ignored or not, and return the tree id."""
        self.run("add", "--all", "--force", ".")
        self.run("commit", "--quiet", "--allow-empty", "--no-verify", "--message", message)
        return self.tree()

    def tree(self, revision: str = "HEAD", subdirectory: str = "") -> str:
        """Return the tree id of a revision, or of a directory in it."""
        return self.run("rev-parse", f"{revision}:{subdirectory}").text

    def am(self, *patches: Path) -> GitResult:
        """Apply patch mails, one commit each, exactly as they say; the caller looks at the result.

        One process for all: most of its time goes into reading an index of thousands of files.
        """
        return self.run(
            "am",
            "--quiet",
            "--keep-non-patch",
            "--3way",
            "--keep-cr",
            "--committer-date-is-author-date",
            "--",
            *(str(patch.resolve()) for patch in patches),
            check=False,
        )

    def export(self, since: str, folder: Path) -> list[Path]:
        """Write one patch file a commit after ``since`` and return them in order."""
        listed = self.run("format-patch", *_FORMAT, "--output-directory", str(folder.resolve()), f"{since}..HEAD")
        return [Path(line) for line in listed.text.splitlines()]

    def read_many(self, revision: str, paths: Iterable[str]) -> dict[str, bytes]:
        """Return path -> bytes of those files that exist at a revision, with one process."""
        wanted = list(dict.fromkeys(paths))
        asked = "".join(f"{revision}:{path}\n" for path in wanted)
        answer = io.BytesIO(self.run("cat-file", "--batch", stdin=asked.encode("utf-8", "surrogateescape")).stdout)
        found: dict[str, bytes] = {}
        for path in wanted:
            header = answer.readline().split()
            if header[-1] == b"missing":
                continue
            data = answer.read(int(header[-1]) + 1)[:-1]
            if header[-2] == b"blob":
                found[path] = data
        return found

    def changed(self, since: str, until: str = "HEAD") -> dict[str, str]:
        """Return path -> status letter (A, M, D) between two revisions, renames shown as D and A."""
        listed = self.run("diff", "--no-renames", "--name-status", "-z", since, until)
        parts: Sequence[str] = listed.stdout.decode("utf-8", "surrogateescape").split("\0")
        return dict(zip(parts[1::2], parts[0::2], strict=False))


def data_command(content: bytes) -> bytes:
    """Return a fast-import data command."""
    return b"data %d\n%b\n" % (len(content), content)
