"""PCI devices as sysfs shows them: the bridges above a GPU, its window, its NUMA node, and access control.

Configuration space beyond the first 64 bytes is closed to all but root; what lies there is then unknown, not absent.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from sglang_bw.host.system import System

_DEVICES = "sys/bus/pci/devices"
_NVIDIA = 0x10DE
_DISPLAY = 0x03  # base class: VGA and 3D controllers
_EXTENDED_START = 0x100
_ACS = 0x000D
_ACS_CONTROL = 6
# PCI Express Base Specification, "ACS Control Register": the bits that send peer traffic up to the root.
_REDIRECTS = {0x04: "ReqRedir", 0x08: "CmpltRedir"}


@dataclass(frozen=True)
class Device:
    """One PCI device of a machine.

    :ivar address: ``0000:01:00.0``.
    :ivar bridges: addresses of the bridges above it, the root port first.
    :ivar node: NUMA node, ``None`` where the kernel knows none.
    """

    system: System
    address: str
    bridges: tuple[str, ...]
    node: int | None

    @property
    def _path(self) -> str:
        return f"{_DEVICES}/{self.address}"

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Bytes of each memory window (BAR), 0 for one that is not there."""
        sizes = []
        for line in (self.system.text(f"{self._path}/resource") or "").splitlines()[:6]:
            start, _, rest = line.partition(" ")
            try:
                first, last = int(start, 16), int(rest.split()[0], 16)
            except (ValueError, IndexError):
                break
            sizes.append(last - first + 1 if last else 0)
        return tuple(sizes)

    @cached_property
    def iommu(self) -> str | None:
        """How the IOMMU treats it: ``identity``, ``DMA`` or ``DMA-FQ``; empty when unknown, ``None`` without IOMMU."""
        group = self.system.real(f"{self._path}/iommu_group").rpartition("/")[2]
        if not group.isdigit():
            return None
        return self.system.text(f"sys/kernel/iommu_groups/{group}/type") or ""


def gpus(system: System) -> list[Device]:
    """Return NVIDIA's GPUs on the bus, whether or not a driver has them."""
    return [
        _device(system, address)
        for address in system.names(_DEVICES)
        if system.number(f"{_DEVICES}/{address}/vendor") == _NVIDIA
        and (system.number(f"{_DEVICES}/{address}/class") or 0) >> 16 == _DISPLAY
    ]


def _device(system: System, address: str) -> Device:
    # devices/pci0000:00/0000:00:01.1/0000:01:00.0: every part but the first and the last is a bridge.
    parts = system.real(f"{_DEVICES}/{address}").split("/")
    bridges = tuple(part for part in parts[:-1] if part.count(":") == 2)
    node = system.number(f"{_DEVICES}/{address}/numa_node")
    return Device(system, address, bridges, node if node is not None and node >= 0 else None)


def redirects(system: System, address: str) -> tuple[str, ...] | None:
    """Return which access-control bits of a bridge send peer traffic to the root; ``None`` when closed to us."""
    config = system.bytes(f"{_DEVICES}/{address}/config")
    if config is None or len(config) <= _EXTENDED_START:
        return None
    for identity, at in _extended(config):
        if identity == _ACS and at + _ACS_CONTROL + 2 <= len(config):
            (control,) = struct.unpack_from("<H", config, at + _ACS_CONTROL)
            return tuple(name for bit, name in _REDIRECTS.items() if control & bit)
    return ()


def _extended(config: bytes) -> Iterator[tuple[int, int]]:
    """Yield identity and offset of the extended capabilities; a broken or circular list ends."""
    at, seen = _EXTENDED_START, set[int]()
    while at >= _EXTENDED_START and at + 4 <= len(config) and at not in seen:
        seen.add(at)
        (header,) = struct.unpack_from("<I", config, at)
        if header in (0, 0xFFFFFFFF):
            return
        yield header & 0xFFFF, at
        at = header >> 20


def path(first: Device, second: Device) -> str:
    """Return how far apart two devices are, in the words of ``nvidia-smi topo``; empty when the bus does not tell."""
    if not first.bridges or not second.bridges:
        return ""
    common = sum(1 for a, b in zip(first.bridges, second.bridges, strict=False) if a == b)
    if common:
        # Below one switch: an upstream port and two downstream ports; more bridges mean more than one switch.
        beyond = max(len(first.bridges), len(second.bridges)) - common
        return "PIX" if beyond <= 1 else "PXB"
    if first.node is None or second.node is None:
        return ""
    if first.node != second.node:
        return "SYS"
    return "NODE"
