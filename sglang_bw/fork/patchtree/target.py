"""Which patches are written, what is remembered of their tree, and what an export did."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from sglang_bw.fork.series import ORDER_FILE, Series, local_option, read_order, root_option

NUMBER = re.compile(r"(\d{4})-(.+)\.patch")
_SHOWN = 5


class TreeState(BaseModel):
    """What is remembered of a scratch tree.

    ``start``: the commit after which patches are exported; ``head``: the last exported one; ``below`` and ``files``:
    sha256 of the patch files under it and of its own, as they were then; ``writing``: what an export was writing
    when it was killed; ``topic``: what the next commit is for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    start: str
    head: str
    below: dict[str, str]
    files: dict[str, str]
    writing: dict[str, str] = {}
    topic: str = ""


@dataclass(frozen=True)
class Target:
    """Which patches are written: a base's own, or with ``local`` those of that folder, on top of the base's."""

    series: Series
    local: Path | None = None

    @property
    def folder(self) -> Path:
        """Where the patch files are."""
        return self.local or self.series.folder

    @property
    def name(self) -> str:
        """The scratch repository's name: one for each folder and base."""
        place = hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:8]
        return f"patches-{self.series.base}-{place}"

    @property
    def options(self) -> str:
        """The options that name this target on a command line."""
        return f" --base {self.series.base}{local_option(self.local)}{root_option(self.series.folder.parent)}"

    def below(self) -> tuple[Path, ...]:
        """Return the patch files that come first and are not written."""
        return self.series.files if self.local else ()

    def files(self) -> tuple[Path, ...]:
        """Return the patch files on disk, in order; none for a local series that does not exist yet."""
        if self.local is None:
            return self.series.files
        order = self.local / ORDER_FILE
        return tuple(self.local / name for name in read_order(order)) if order.is_file() else ()


@dataclass(frozen=True)
class Export:
    """What an export did: files written and removed, and what is still to be filled in, a line each."""

    tree: Path
    order: tuple[str, ...]
    written: tuple[str, ...]
    removed: tuple[str, ...]
    unfilled: tuple[str, ...]


def digests(files: Iterable[Path]) -> dict[str, str]:
    """Return file name -> sha256 of those files that exist."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}


def topic_of(name: str) -> str:
    """Return the topic in a patch's file name, or an empty string."""
    match = NUMBER.fullmatch(name)
    return match[2] if match else ""


def some(names: Sequence[str]) -> str:
    """Return a few of the names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
