"""Shared objects without loading them: their sections and the libraries they need.

Reads through a memory map, so that a gigabyte of kernels costs a few pages. 64-bit little-endian ELF, the only kind
that CUDA's platforms have (System V ABI, "Object Files").
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_HEADER_BYTES = 64
_SECTION = struct.Struct("<IIQQQQIIQQ")
_MOST_SECTIONS = 4096
_DYNAMIC = 6  # section type
_NO_BITS = 8  # section type of .bss: a length, and no bytes in the file
_NEEDED = 1  # tag of a dynamic entry


class BadElfError(ValueError):
    """Not a 64-bit little-endian ELF file, or cut short."""


@dataclass(frozen=True)
class Section:
    """A section; ``start`` and ``end`` are offsets in the file, within it."""

    name: str
    kind: int
    link: int
    start: int
    end: int


@dataclass(frozen=True)
class SharedObject:
    """An open shared object."""

    data: mmap.mmap
    sections: tuple[Section, ...]

    def needed(self) -> list[str]:
        """Return the file names of the libraries that the loader brings with it.

        :raises BadElfError: the dynamic section is broken.
        """
        names = []
        for section in self.sections:
            if section.kind == _DYNAMIC:
                if section.link >= len(self.sections):
                    raise BadElfError("the dynamic section names no string table")
                strings = self.sections[section.link]
                for at in range(section.start, section.end - 15, 16):
                    tag, value = struct.unpack_from("<QQ", self.data, at)
                    if tag == _NEEDED:
                        names.append(_string(self.data, strings.start + value, strings.end))
        return names


@contextmanager
def opened(path: Path) -> Iterator[SharedObject]:
    """Open a shared object.

    :raises OSError: it cannot be read.
    :raises BadElfError: it is no ELF file of that kind, or it is cut short.
    """
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise BadElfError("the file is empty") from None
        with data:
            yield SharedObject(data, tuple(_sections(data)))


def _sections(data: mmap.mmap) -> Iterator[Section]:
    if len(data) < _HEADER_BYTES or data[:6] != b"\x7fELF\x02\x01":
        raise BadElfError("no 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    if count > _MOST_SECTIONS or size < _SECTION.size or table + size * count > len(data):
        raise BadElfError("the file is cut short: its section table is not there")
    rows = [_SECTION.unpack_from(data, table + size * index) for index in range(count)]
    if names >= len(rows):
        raise BadElfError("the section names are not there")
    strings, strings_end = rows[names][4], rows[names][4] + rows[names][5]
    for name, kind, _flags, _address, start, length, link, _info, _align, _entry in rows:
        if kind == _NO_BITS:
            start = length = 0
        if start + length > len(data):
            raise BadElfError("the file is cut short: a section reaches beyond its end")
        yield Section(_string(data, strings + name, strings_end), kind, link, start, start + length)


def _string(data: mmap.mmap, start: int, limit: int) -> str:
    limit = min(limit, len(data))
    end = data.find(b"\0", start, limit) if start < limit else -1
    if end < 0:
        raise BadElfError("a name is cut short")
    return data[start:end].decode(errors="replace")
