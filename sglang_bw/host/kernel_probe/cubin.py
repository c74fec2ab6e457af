"""What a cubin says about a kernel's registers and local memory, read from its ELF sections.

``ptxas -v`` prints the same numbers, but a cubin that comes from Triton's cache has no log.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

# Attributes of a ``.nv.info`` section. Each record: format, attribute, then either a 16-bit value or, for format 4,
# a 16-bit size and that many bytes; for these two they are the index of a symbol and the value.
_FORMAT_SIZED = 0x04
_FRAME_SIZE = 0x11
_REGISTERS = 0x2F


@dataclass(frozen=True)
class Usage:
    """What one thread of a kernel takes.

    :ivar registers: 32-bit registers; at most 255.
    :ivar local_bytes: bytes of local memory, that is, in device memory: spilled registers and arrays that are indexed.
    """

    registers: int
    local_bytes: int


def usage(cubin: bytes) -> Usage:
    """Read a cubin that holds one kernel.

    :raises ValueError: the bytes are not a cubin, or it tells no register count.
    """
    registers: list[int] = []
    frames: list[int] = []
    for name, body in _sections(cubin):
        if name == ".nv.info":
            for attribute, value in _sized_records(body):
                if attribute == _REGISTERS:
                    registers.append(value)
                elif attribute == _FRAME_SIZE:
                    frames.append(value)
    if not registers:
        raise ValueError("no register count in the cubin")
    return Usage(max(registers), max(frames, default=0))


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    try:
        if elf[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a little-endian 64-bit ELF file")
        (table,) = struct.unpack_from("<Q", elf, 0x28)
        size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
        headers = [struct.unpack_from("<IIQQQQ", elf, table + size * index) for index in range(count)]
        strings = headers[names][4]
        for name, _type, _flags, _address, offset, length in headers:
            start = strings + name
            yield elf[start : elf.index(b"\0", start)].decode(), elf[offset : offset + length]
    except (struct.error, IndexError) as error:
        raise ValueError("the ELF file is cut short") from error


def _sized_records(info: bytes) -> Iterator[tuple[int, int]]:
    position = 0
    while position + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, position)
        position += 4
        if form != _FORMAT_SIZED:
            continue
        if size == 8 and position + 8 <= len(info):
            yield attribute, struct.unpack_from("<I", info, position + 4)[0]
        position += size
