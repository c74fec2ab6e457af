"""GPUs as their driver describes them, and which of them a user means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from sglang_bw.errors import GpuSelectionError

GIB = 1 << 30
MIB = 1 << 20


class Process(NamedTuple):
    """Somebody who uses a GPU; ``used`` in bytes, ``None`` where the driver does not tell."""

    pid: int
    used: int | None


@dataclass(frozen=True)
class Link:
    """The PCI Express link of a GPU: generations and lanes; the largest are what card and slot can do together.

    :ivar card_generation: what the card alone could do.
    """

    generation: int | None = None
    width: int | None = None
    most_generation: int | None = None
    most_width: int | None = None
    card_generation: int | None = None


@dataclass(frozen=True)
class Gpu:
    """One GPU. Bytes, watts, megahertz, degrees Celsius, percent; ``None`` is what the driver does not tell.

    :ivar index: in the order of the PCI bus, as ``nvidia-smi`` counts.
    :ivar bus: PCI address as sysfs writes it: ``0000:01:00.0``.
    :ivar capability: compute capability.
    :ivar bar1: bytes of device memory that PCI peers can address.
    :ivar slowed_by: reasons for which the clocks are below what was asked for.
    :ivar mig: whether it is split into instances.
    """

    index: int
    uuid: str
    name: str
    bus: str
    capability: tuple[int, int]
    memory: int | None = None
    free: int | None = None
    bar1: int | None = None
    power_limit: float | None = None
    power_default: float | None = None
    power_most: float | None = None
    power_now: float | None = None
    link: Link = Link()
    persistent: bool | None = None
    sm_clock: int | None = None
    sm_clock_most: int | None = None
    memory_clock: int | None = None
    memory_clock_most: int | None = None
    temperature: int | None = None
    busy: int | None = None
    slowed_by: tuple[str, ...] = ()
    ecc_errors: int | None = None
    rows_pending: bool = False
    compute_mode: str = ""
    mig: bool | None = None
    processes: tuple[Process, ...] = ()
    nvlinks: int = 0

    @property
    def arch(self) -> str:
        """``sm120``."""
        return f"sm{self.capability[0]}{self.capability[1]}"

    @property
    def used(self) -> int | None:
        """Bytes that somebody holds."""
        return None if self.memory is None or self.free is None else self.memory - self.free


class Pair(NamedTuple):
    """Two GPUs, by index: how far apart they are and what they may do to each other.

    ``path``: ``NV`` with a count, ``PIX``, ``PXB``, ``PHB``, ``NODE`` or ``SYS`` as in ``nvidia-smi topo -m``.
    ``read``, ``write`` and ``atomics``: ``OK`` or the driver's reason, empty where it does not tell.
    """

    first: int
    second: int
    path: str
    read: str
    write: str
    atomics: str


@dataclass(frozen=True)
class Gpus:
    """All GPUs that the driver shows to this process.

    :ivar driver: version of the driver.
    :ivar cuda: newest CUDA that the driver supports, for example (13, 0).
    :ivar problem: why nothing could be asked, with what is below then empty.
    """

    driver: str = ""
    cuda: tuple[int, int] = (0, 0)
    boards: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    problem: str = ""

    def only(self, wanted: str) -> Gpus:
        """Return the GPUs that a user named, in the order named, with the pairs among them.

        :param wanted: numbers, ranges and UUIDs, such as ``0-3`` or ``0,2`` or ``GPU-8f1c``; empty for all.
        :raises GpuSelectionError: one of them is not here, or is named twice.
        """
        if not wanted.strip():
            return self
        boards = tuple(self._find(part) for part in parts(wanted))
        indices = [board.index for board in boards]
        if twice := {index for index in indices if indices.count(index) > 1}:
            raise GpuSelectionError(f"GPU {min(twice)} is named twice in {wanted!r}", hint="name each GPU once.")
        pairs = tuple(pair for pair in self.pairs if pair.first in indices and pair.second in indices)
        return Gpus(self.driver, self.cuda, boards, pairs, self.problem)

    def _find(self, part: str) -> Gpu:
        if part.isdigit():
            found = [board for board in self.boards if board.index == int(part)]
        else:
            found = [board for board in self.boards if board.uuid.lower().startswith(part.lower())]
        if len(found) == 1:
            return found[0]
        here = f"{len(self.boards)}: 0 to {len(self.boards) - 1}" if self.boards else "none"
        said = self.problem and f" ({self.problem})"
        what = "is the beginning of several UUIDs" if found else "is not on this machine"
        raise GpuSelectionError(
            f"GPU {part} {what}; GPUs here: {here}{said}", hint="`nvidia-smi -L` lists them with their UUIDs."
        )


def parts(wanted: str) -> list[str]:
    """Return each GPU that a text names, by number or UUID: ``0-2,5`` gives 0, 1, 2 and 5.

    :raises GpuSelectionError: it names none, or one twice.
    """
    named: list[str] = []
    for text in wanted.split(","):
        part = text.strip()
        if span := re.fullmatch(r"(\d{1,3})-(\d{1,3})", part):
            first, last = int(span[1]), int(span[2])
            if last < first:
                raise GpuSelectionError(f"the range {part} runs backwards", hint=f"write {last}-{first}.")
            named += [str(index) for index in range(first, last + 1)]
        elif re.fullmatch(r"\d{1,3}|(?i:GPU|MIG)-[0-9a-fA-F/-]+", part):
            named.append(str(int(part)) if part.isdigit() else part)
        else:
            raise GpuSelectionError(
                f"{part or wanted!r} names no GPU",
                hint="numbers, ranges and UUIDs: --gpus 0-3, --gpus 0,2, --gpus GPU-8f1c.",
            )
    alike = [part.lower() for part in named]
    if twice := [part for part in alike if alike.count(part) > 1]:
        raise GpuSelectionError(f"GPU {twice[0]} is named twice in {wanted!r}", hint="name each GPU once.")
    return named
