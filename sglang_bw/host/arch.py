"""GPU architectures and what one block of threads may use on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SOURCE = "CUDA C++ Programming Guide, technical specifications per compute capability, shared memory per thread block"


@dataclass(frozen=True)
class Arch:
    """An architecture, with a board that has it.

    :ivar name: ``sm120``.
    :ivar capability: compute capability.
    :ivar shared_memory: bytes of shared memory one block may use, from ``SOURCE``: 227 KB or 99 KB.
    :ivar multiprocessors: of the board.
    :ivar memory: bytes of device memory of the board.
    """

    name: str
    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int
    memory: int

    def board(self, name: str) -> dict[str, Any]:
        """Return the facts that the engine is told, the fields of ``kernel_probe.board.Board``."""
        return {
            "capability": self.capability,
            "shared_memory": self.shared_memory,
            "multiprocessors": self.multiprocessors,
            "memory": self.memory,
            "name": name,
        }


_LARGE = 227 * 1024
_SMALL = 99 * 1024
_GIB = 1 << 30

ARCHS = {
    arch.name: arch
    for arch in (
        Arch("sm90", (9, 0), _LARGE, 132, 141 * _GIB),
        Arch("sm100", (10, 0), _LARGE, 148, 180 * _GIB),
        Arch("sm120", (12, 0), _SMALL, 188, 95 * _GIB),
        Arch("sm121", (12, 1), _SMALL, 48, 119 * _GIB),
    )
}


def capability(name: str) -> tuple[int, int]:
    """Return the compute capability of ``sm120`` or ``sm90``.

    :raises ValueError: not the name of an architecture.
    """
    digits = name.removeprefix("sm")
    if not (name.startswith("sm") and digits.isdigit() and len(digits) in (2, 3)):
        raise ValueError(f"{name!r} is no architecture such as sm120")
    return int(digits[:-1]), int(digits[-1])
