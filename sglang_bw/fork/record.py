"""The record a built wheel carries: ``sglang/_bw.json``, and the digest of a wheel's content.

Both are readable without importing sglang, from the wheel file or from an installed distribution.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from sglang_bw.fork.mail import Patch

RECORD_PATH = "sglang/_bw.json"

# Files that installers add to a .dist-info directory; they are no part of the wheel.
_INSTALLER_FILES = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"})


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PatchRecord(_Frozen):
    """One applied patch, as users see it."""

    file: str = Field(description="File name in the series.")
    subject: str
    upstream_status: str = Field(description="The whole Upstream-Status trailer.")
    why: str
    sha256: str = Field(description="Of the patch file.")

    @property
    def topic(self) -> str:
        """The file's name without its number: what stays when a series is renumbered."""
        return re.sub(r"^\d+-", "", self.file.removesuffix(".patch"))

    @classmethod
    def of(cls, patch: Patch) -> PatchRecord:
        """Record a patch file."""
        return cls(
            file=patch.name,
            subject=patch.subject,
            upstream_status=patch.trailer("Upstream-Status"),
            why=patch.trailer("Why"),
            sha256=patch.sha256,
        )


class UpstreamRecord(_Frozen):
    """The wheel that was patched."""

    wheel: str
    sha256: str


class LocalRecord(_Frozen):
    """The user's own patches, which came after the series."""

    series: str = Field(description="Id of the series below them, for example bw.1.")
    series_tree: str = Field(description="Git tree id of python/ with the series alone.")
    patches: tuple[PatchRecord, ...]


class BwRecord(_Frozen):
    """What ``sglang/_bw.json`` says.

    ``files`` maps every file that the series changed, added or that carries the version (wheel path) to the
    sha256 of its final bytes in the built wheel; ``removed`` lists the files that the series deletes.
    """

    schema_version: Literal[1] = 1
    version: str = Field(description="The full version, for example 0.5.23+bw.1.")
    base: str
    series: str = Field(description="Series id, for example bw.1 or bw.1.d0a1b2c3.")
    tree: str = Field(description="Git tree id of the patched python/ directory.")
    upstream: UpstreamRecord
    patches: tuple[PatchRecord, ...]
    files: dict[str, str]
    removed: tuple[str, ...] = ()
    local: LocalRecord | None = None

    def text(self) -> str:
        """Return the file's text; what is not there is left out, so that a plain build says nothing of it."""
        return self.model_dump_json(indent=1, exclude_none=True) + "\n"


def content_digest(record_lines: Iterable[str]) -> str:
    """Return the sha256 of a wheel's content, independent of zip and zlib.

    :param record_lines: lines of a RECORD file, of a wheel or of an installed distribution: what an installer
        adds (bytecode, console scripts, its own files in ``.dist-info``) does not count.
    """
    kept = [f"{row[0]},{row[1]}\n" for row in csv.reader(record_lines) if counts(row)]
    return hashlib.sha256("".join(sorted(kept)).encode()).hexdigest()


def counts(row: Sequence[str]) -> bool:
    """Whether a row of a RECORD (path, digest, size) is of the wheel itself, not of what an installer adds."""
    path, digest, _size = row
    pure = PurePosixPath(path)
    made_by_installer = pure.parent.name.endswith(".dist-info") and pure.name in _INSTALLER_FILES
    return bool(digest) and ".." not in pure.parts and not made_by_installer and pure.suffix != ".pyc"
