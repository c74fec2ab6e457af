"""Shared objects with fat binaries in them, written byte for byte in the form that nvcc and the linker use."""

from __future__ import annotations

import re
import struct
from pathlib import Path

SECTION = struct.Struct("<IIQQQQIIQQ")
_SUFFIXES = {"": 0, "a": 1 << 20, "f": 1 << 21}


def entry(target: str, payload: bytes = b"\0" * 24) -> bytes:
    """An entry for ``sm_120a``, or ``compute_90`` for PTX."""
    match = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", target)
    assert match
    kind, capability, suffix = match.groups()
    header = struct.pack(
        "<HHIQIIIIIIQQQ",
        {"compute": 1, "sm": 2}[kind], 0x101, 64, len(payload), 0, 64, 0x10008, int(capability), 0, 0,
        0x11 | _SUFFIXES[suffix], 0, 0,
    )  # fmt: skip
    assert len(header) == 64
    return header + payload


def container(*targets: str) -> bytes:
    body = b"".join(entry(target) for target in targets)
    return b"\x50\xed\x55\xba" + struct.pack("<HHQ", 1, 16, len(body)) + body


def shared_object(*containers: bytes, needed: tuple[str, ...] = ("libcudart.so.13", "libc.so.6")) -> bytes:
    """An ELF file with a ``.nv_fatbin`` section, a dynamic section and their string tables."""
    names = b"\0.nv_fatbin\0.dynamic\0.dynstr\0.shstrtab\0"
    strings, offsets = b"\0", []
    for library in needed:
        offsets.append(len(strings))
        strings += library.encode() + b"\0"
    dynamic = b"".join(struct.pack("<QQ", 1, offset) for offset in offsets) + struct.pack("<QQ", 0, 0)
    fatbin = b"".join(part + b"\0" * (-len(part) % 8) for part in containers)
    bodies = [(".nv_fatbin", 1, 0, fatbin), (".dynamic", 6, 3, dynamic), (".dynstr", 3, 0, strings)]
    bodies.append((".shstrtab", 3, 0, names))
    data = bytearray(b"\x7fELF\x02\x01\x01".ljust(64, b"\0"))
    table = [SECTION.pack(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)]
    for name, kind, link, body in bodies:
        table.append(SECTION.pack(names.index(name.encode()), kind, 0, 0, len(data), len(body), link, 0, 8, 0))
        data += body
    struct.pack_into("<Q", data, 0x28, len(data))
    struct.pack_into("<HHH", data, 0x3A, SECTION.size, len(table), len(table) - 1)
    return bytes(data) + b"".join(table)


def write(path: Path, *targets: str, needed: tuple[str, ...] = ("libcudart.so.13", "libc.so.6")) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(shared_object(container(*targets), needed=needed))
    return path
