"""Writing the archive of a bundle as a stream, whole or cut into numbered parts: the same bytes on every day."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sglang_bw.bundle.manifest import SCRIPT, Part
from sglang_bw.bundle.members import check_name

CHUNK = 1 << 20

# Below this a part would hold little more than the archive's own headers.
SMALLEST_PART = 1 << 16

# More digits than any disk has bytes are no size.
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMG]?I?)B?", re.ASCII)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def parse_size(text: str) -> int:
    """Return the bytes that ``60M`` (10^6), ``60MiB`` (2^20) or a plain number means.

    :raises ValueError: nothing of the kind, or too small for a part.
    """
    found = _SIZE.fullmatch(text.strip().upper())
    if not found or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is no size such as 60M or 1GiB")
    size = int(float(found[1]) * _UNITS[found[2]])
    if size < SMALLEST_PART:
        raise ValueError(f"{text!r} is too small: a part has at least {SMALLEST_PART >> 10} KiB")
    return size


@dataclass(frozen=True)
class Member:
    """A file of the archive, below its folder: on the disk, or (small ones) its bytes."""

    name: str
    source: Path | bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size

    def open(self) -> io.BytesIO | io.BufferedReader:
        """Open it for reading."""
        return io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source.open("rb")

    def sha256(self) -> str:
        """Return its digest."""
        with self.open() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


class PartWriter:
    """A stream that is cut into files: ``NAME``, or ``NAME.000``, ``NAME.001`` with a size to cut at."""

    def __init__(self, folder: Path, name: str, split: int | None) -> None:
        self.parts: list[Part] = []
        self._folder, self._name, self._split = folder, name, split
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._written = 0

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()

    def write(self, data: bytes) -> int:
        """Write everything, over the end of a part into the next."""
        rest = memoryview(data)
        while rest:
            room = len(rest) if self._split is None else self._split - self._written
            piece, rest = rest[:room], rest[room:]
            if self._file is None:
                self._file = (self._folder / self._next_name()).open("wb")
            self._file.write(piece)
            self._hash.update(piece)
            self._written += len(piece)
            if self._written == self._split:
                self.finish()
        return len(data)

    def finish(self) -> None:
        """End the current part, if there is one."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        self.parts.append(Part(self._next_name(), self._written, self._hash.hexdigest()))
        self._hash, self._written = hashlib.sha256(), 0

    def _next_name(self) -> str:
        return self._name if self._split is None else f"{self._name}.{len(self.parts):03}"


def write(
    folder: Path, name: str, members: Iterable[Member], split: int | None, progress: Callable[[str], None]
) -> tuple[Part, ...]:
    """Write ``NAME.tar`` into ``folder``, every member below ``NAME/``, and return its parts.

    :param split: bytes of a part; ``None``: one file.
    :raises BundleUnsafeError: a member's name.
    """
    with PartWriter(folder, f"{name}.tar", split) as stream:
        # A stream that is only written to is all that "w|" asks for.
        with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT, bufsize=CHUNK) as archive:  # type: ignore[call-overload]
            for member in members:
                info = tarfile.TarInfo(check_name(name, f"{name}/{member.name}"))
                info.size = member.size
                info.mode = 0o755 if member.name == SCRIPT else 0o644
                with member.open() as file:
                    archive.addfile(info, file)
                progress(member.name)
        stream.finish()
        return tuple(stream.parts)
