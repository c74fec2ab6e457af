"""What a measurement holds for: the GPUs, their driver and how they are connected."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass

import psutil

from sglang_bw.host import nvml
from sglang_bw.host.fabric import fabric
from sglang_bw.host.gpus import GIB
from sglang_bw.host.system import System
from sglang_bw.ledger.record import Host


@dataclass(frozen=True)
class Fingerprint:
    """A machine; equal ones give equal measurements.

    :ivar gpus: names, in the order of the PCI bus; empty on a CPU.
    :ivar links: generation and lanes of each GPU's PCI Express link at its best, ``5x16``.
    :ivar topology: rows of the matrix of ``nvidia-smi topo -m``.
    """

    machine: str
    processor: str
    driver: str
    gpus: tuple[str, ...]
    links: tuple[str, ...]
    topology: tuple[str, ...]

    @property
    def key(self) -> str:
        """Eight characters that name it."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:8]

    @property
    def title(self) -> str:
        """One line for people."""
        names = {name: self.gpus.count(name) for name in self.gpus}
        boards = ", ".join(f"{count}x {name}" for name, count in names.items())
        return f"{boards}, driver {self.driver}" if boards else f"no GPU, {self.processor or self.machine}"


def take(system: System | None = None, library: nvml.Library | None = None) -> Fingerprint:
    """Look at this machine."""
    system = system or System()
    found = nvml.read(library or nvml.load())
    between = fabric(system, found)
    links = tuple(f"{gpu.link.most_generation}x{gpu.link.most_width}" for gpu in found.boards)
    return Fingerprint(
        machine=platform.machine(),
        processor=system.fields("proc/cpuinfo").get("model name", ""),
        driver=found.driver,
        gpus=tuple(gpu.name for gpu in found.boards),
        links=links,
        topology=tuple(" ".join(row) for row in between.matrix()) if found.boards else (),
    )


def look(*, local: bool = True) -> Host:
    """Describe this machine for a record.

    :param local: false when what is measured runs elsewhere.
    """
    found = take()
    return Host(
        fingerprint=found.key,
        cpu=found.processor or found.machine,
        cores=os.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / GIB, 1),
        gpus=found.gpus,
        driver=found.driver if found.gpus else None,
        local=local,
    )
