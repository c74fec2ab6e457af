"""A patch as the mail it is: subject, body and trailers, read by git's own mail and trailer readers."""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from sglang_bw.errors import LintError
from sglang_bw.fork.gitrepo import git_environment, git_program


class UpstreamStatus(StrEnum):
    """Where a patch stands with upstream (the vocabulary of Yocto's Upstream-Status)."""

    PENDING = "Pending"
    SUBMITTED = "Submitted"
    BACKPORT = "Backport"
    DENIED = "Denied"
    INAPPROPRIATE = "Inappropriate"


STATUS_FORM = re.compile(
    r"Pending|Submitted \[https?://\S+\]|Backport \[https?://\S+, in \S+\]|Denied \[https?://\S+\]|Inappropriate \[.+\]"
)


@dataclass(frozen=True)
class Patch:
    """One patch file. ``trailers`` keeps the order of the mail; a key may come twice."""

    path: Path
    subject: str
    body: str
    trailers: tuple[tuple[str, str], ...]
    diff: bytes
    sha256: str

    @property
    def name(self) -> str:
        """The file name in the series."""
        return self.path.name

    def trailer(self, key: str) -> str:
        """Return the value of a trailer, or an empty string."""
        return next((value for name, value in self.trailers if name == key), "")

    def all(self, key: str) -> list[str]:
        """Return every value of a trailer."""
        return [value for name, value in self.trailers if name == key]


def read_patch(path: Path) -> Patch:
    """Read a patch file.

    :raises LintError: it cannot be read, or is not a mail that git understands.
    :raises GitError: git is missing.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise LintError([f"{path.name}: {error.strerror}"]) from None
    try:
        return replace(_parsed(raw), path=path)
    except LintError as error:
        raise LintError([f"{path.name}: {text}" for text in error.findings]) from None


@functools.lru_cache(maxsize=256)
def _parsed(raw: bytes) -> Patch:
    """Return a patch without its path; a series is read several times in one command."""
    with tempfile.TemporaryDirectory(prefix="sglang-bw-mail-") as scratch:
        folder = Path(scratch)

        def git(*arguments: str, stdin: bytes) -> bytes:
            done = subprocess.run(
                [git_program(), *arguments],
                cwd=folder,
                env=git_environment(folder.parent),
                input=stdin,
                capture_output=True,
                check=False,
            )
            if done.returncode:
                said = done.stderr.decode("utf-8", "replace").strip()
                raise LintError([f"git cannot read it as a mail: {said}"])
            return done.stdout

        headers = git("mailinfo", "-k", "message", "diff", stdin=raw).decode("utf-8", "replace")
        message = (folder / "message").read_bytes()
        diff = (folder / "diff").read_bytes()
        listed = git("interpret-trailers", "--parse", "--no-divider", stdin=b"subject\n\n" + message)
    subject = next((line.partition(":")[2].strip() for line in headers.splitlines() if line.startswith("Subject:")), "")
    body = message.decode("utf-8", "replace").strip()
    trailers = [line.partition(":") for line in listed.decode("utf-8", "replace").splitlines()]
    return Patch(
        path=Path(),
        subject=subject,
        body=body,
        trailers=tuple((key.strip(), value.strip()) for key, _, value in trailers),
        diff=diff,
        sha256=hashlib.sha256(raw).hexdigest(),
    )


def description(patch: Patch) -> str:
    """Return the body without its trailers."""
    paragraphs = patch.body.split("\n\n")
    return "\n\n".join(paragraphs[:-1] if patch.trailers else paragraphs).strip()


def markdown_table(patches: Sequence[Patch]) -> str:
    """Return the patches as a markdown table: what each is for, what it was verified on, where upstream stands."""
    rows = ["| patch | what for | verified on | upstream |", "|---|---|---|---|"]
    for patch in patches:
        topic = patch.name.removesuffix(".patch")
        cells = (f"`{topic}`", patch.trailer("Why"), patch.trailer("Verified-On"), patch.trailer("Upstream-Status"))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)
