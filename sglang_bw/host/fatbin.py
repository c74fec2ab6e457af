"""The GPU architectures that a shared object has kernels for, read from its fat binaries.

nvcc puts all device code of a translation unit into one container: a 16-byte header, then one entry for each
architecture, its payload compressed or not. The layout is not documented by NVIDIA; it was read off the output of
nvcc 13.0 for known architectures; tests do the same wherever there is an nvcc.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_bw.host import elf

MAGIC = b"\x50\xed\x55\xba"
SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_CONTAINER = struct.Struct("<4sHHQ")  # magic, version, size of this header, bytes that follow
# Kind, version, size of this header, bytes of payload, four sizes and numbers not needed here, architecture.
_ENTRY = struct.Struct("<HHIQIIII")
_FLAGS_AT = 40
_KINDS = {1: "ptx", 2: "sass"}
_ONLY_THIS = 1 << 20  # compiled for sm_120a
_FAMILY = 1 << 21  # compiled for sm_120f


@dataclass(frozen=True, order=True)
class Target:
    """What one entry was compiled for.

    :ivar capability: 10 times major plus minor, as in ``sm_120``.
    :ivar kind: ``sass`` (machine code) or ``ptx`` (compiled by the driver when it is loaded).
    :ivar suffix: ``a`` runs on this architecture only, ``f`` on its family, empty on later ones too.
    """

    capability: int
    kind: str
    suffix: str = ""

    def __str__(self) -> str:
        return f"{'sm' if self.kind == 'sass' else 'compute'}_{self.capability}{self.suffix}"

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Tell whether a GPU of this compute capability can run it.

        Machine code runs on the same major and an equal or higher minor; PTX on anything later; ``a`` on nothing else
        and ``f`` within the major (CUDA C++ Programming Guide, "Compute Capability and Feature Availability").
        """
        gpu = 10 * capability[0] + capability[1]
        if self.suffix == "a":
            return gpu == self.capability
        if self.kind == "ptx" and not self.suffix:
            return gpu >= self.capability
        return gpu // 10 == self.capability // 10 and gpu >= self.capability


@dataclass(frozen=True)
class Entry:
    """Code for one target.

    :ivar start: of its payload, bytes from the beginning of the file.
    :ivar size: of its payload, as it is stored.
    """

    target: Target
    start: int
    size: int


def targets(path: Path) -> frozenset[Target]:
    """Return what a shared object has kernels for; nothing when it has no device code.

    :raises OSError: it cannot be read.
    :raises BadElfError: it is no shared object, or it or a fat binary in it is cut short.
    """
    with elf.opened(path) as opened:
        return frozenset(entry.target for found in of(opened) for entry in found)


def of(opened: elf.SharedObject) -> Iterator[list[Entry]]:
    """Yield the entries of every container of a shared object.

    :raises BadElfError: a fat binary is cut short.
    """
    for section in opened.sections:
        if section.name in SECTIONS:
            yield from containers(opened.data, section.start, section.end)


def containers(data: mmap.mmap | bytes, start: int, end: int) -> Iterator[list[Entry]]:
    """Yield the entries of every container between two offsets.

    :raises BadElfError: a container or an entry reaches beyond ``end`` or is of no known form.
    """
    end = min(end, len(data))
    # Containers are padded to 8 bytes; between them nothing but zeros.
    while (at := data.find(MAGIC, start, end)) >= 0:
        if at + _CONTAINER.size > end:
            raise elf.BadElfError("a fat binary is cut short")
        _magic, version, header, length = _CONTAINER.unpack_from(data, at)
        body = at + header
        if version != 1 or header < _CONTAINER.size or body + length > end:
            raise elf.BadElfError("a fat binary is cut short, or of a form that is not known")
        yield list(_entries(data, body, body + length))
        start = body + length


def _entries(data: mmap.mmap | bytes, at: int, end: int) -> Iterator[Entry]:
    while at + _ENTRY.size <= end:
        kind, _version, header, payload, _packed, _options, _number, capability = _ENTRY.unpack_from(data, at)
        if header < _FLAGS_AT + 8 or at + header + payload > end:
            raise elf.BadElfError("an entry of a fat binary is cut short")
        (flags,) = struct.unpack_from("<Q", data, at + _FLAGS_AT)
        if kind in _KINDS:
            suffix = "a" if flags & _ONLY_THIS else "f" if flags & _FAMILY else ""
            yield Entry(Target(capability, _KINDS[kind], suffix), at + header, payload)
        at += header + payload
