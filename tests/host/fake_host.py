"""A host with 8 RTX PRO 6000 on two sockets, as its kernel and its driver show it; every fault can be put in.

Values as reported for such hosts: 97,887 MiB of memory, a window of 128 GiB, PCIe 5.0 x16 that falls to Gen1 at idle,
600 W, host bridges of four GPUs a socket, AMD IOMMU off.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_bw.host.system import Limit, System

MIB, GIB = 1 << 20, 1 << 30
NAME = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
REDIRECTS = 0x0C  # ReqRedir and CmpltRedir
NOT_SUPPORTED = "Not Supported"


@dataclass
class Board:
    """One GPU of the fake; the units are NVML's own."""

    name: str = NAME
    capability: tuple[int, int] = (12, 0)
    memory: int = 97887 * MIB
    used: int = 600 * MIB
    bar1: int = 131072 * MIB
    limit: int = 600_000
    default: int = 600_000
    generation: int = 5
    width: int = 16
    most_generation: int = 5
    card_generation: int = 5
    persistent: int = 1
    busy: int = 0
    reasons: int = 0x1  # idle
    ecc: int = 0
    pending: int = 0
    mode: int = 0
    mig: tuple[int, int] = (0, 0)
    processes: list[Any] = field(default_factory=list)
    node: int = 0
    nvlinks: int = 0


@dataclass
class Host:
    """The machine: what a test changes is changed here, before :meth:`system` and :meth:`nvml` are asked."""

    boards: list[Board] = field(default_factory=lambda: [Board(node=index // 4) for index in range(8)])
    driver: str = "595.58.03"
    cuda: int = 13020
    p2p: int = 0
    atomics: int = 5
    level: Callable[[int, int], int] | None = None
    refused: frozenset[str] = frozenset()
    fails_to_start: str = ""
    cmdline: str = "BOOT_IMAGE=/vmlinuz root=/dev/sda1 iommu=off amd_iommu=off"
    iommu: str | None = None
    acs: int = 0
    config_bytes: int = 4096
    governor: str = "performance"
    balancing: int = 0
    aspm: str = "[default] performance powersave powersupersave"
    mem_total: int = 1024 * GIB
    cgroup: int | None = None
    hugepages: int = 0
    container: bool = False
    virtual: bool = False
    shm: int = 512 * GIB
    memlock: int | None = None
    environ: dict[str, str] = field(default_factory=dict)

    def address(self, index: int) -> str:
        return f"0000:{index + 1:02x}:00.0"

    def bridge(self, index: int) -> str:
        return f"0000:{index:02x}:01.1"

    def write(self, root: Path) -> None:
        """Write ``/proc``, ``/sys`` and ``/dev`` below ``root``."""
        put(root, "proc/cmdline", self.cmdline)
        put(root, "proc/cpuinfo", f"processor : 0\nflags : fpu sse{' hypervisor' if self.virtual else ''}\n")
        total = self.mem_total // 1024
        put(
            root,
            "proc/meminfo",
            f"MemTotal: {total} kB\nMemAvailable: {total * 9 // 10} kB\nHugePages_Total: {self.hugepages}\n"
            "Hugepagesize: 2048 kB\n",
        )
        put(root, "proc/sys/kernel/numa_balancing", str(self.balancing))
        put(root, "proc/1/cgroup", "0::/init.scope")
        put(root, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
        put(root, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", self.governor)
        put(root, "sys/module/pcie_aspm/parameters/policy", self.aspm)
        for node in (0, 1):
            put(root, f"sys/devices/system/node/node{node}/cpulist", f"{node * 64}-{node * 64 + 63}")
        if self.cgroup is not None:
            put(root, "sys/fs/cgroup/memory.max", str(self.cgroup))
        if self.container:
            put(root, ".dockerenv", "")
        (root / "sys/bus/pci/devices").mkdir(parents=True)
        for index, board in enumerate(self.boards):
            self._write_board(root, index, board)

    def _write_board(self, root: Path, index: int, board: Board) -> None:
        bridge = root / f"sys/devices/pci0000:{index:02x}" / self.bridge(index)
        gpu = bridge / self.address(index)
        put(gpu, "vendor", "0x10de")
        put(gpu, "class", "0x030200")
        put(gpu, "numa_node", str(board.node))
        put(gpu, "resource", f"0x00000000f0000000 0x00000000f3ffffff 0x40200\n0x0 {board.bar1 - 1:#x} 0x14220c\n")
        put(bridge, "vendor", "0x1022")
        put(bridge, "class", "0x060400")
        (bridge / "config").write_bytes(config_space(self.acs)[: self.config_bytes])
        if self.iommu is not None:
            group = root / f"sys/kernel/iommu_groups/{index}"
            put(group, "type", self.iommu)
            (gpu / "iommu_group").symlink_to(group)
        for address, path in ((self.bridge(index), bridge), (self.address(index), gpu)):
            (root / "sys/bus/pci/devices" / address).symlink_to(path)
        if not self.container:
            put(root, f"dev/nvidia{index}", "")

    def system(self, root: Path) -> System:
        self.write(root)
        return FakeSystem(root, {"PATH": "/usr/bin", **self.environ}, self)

    def nvml(self) -> FakeNvml:
        return FakeNvml(self)


class FakeSystem(System):
    """The tree for files; size of ``/dev/shm`` and limits are not files, so the fake says them."""

    def __init__(self, root: Path, environ: dict[str, str], host: Host) -> None:
        super().__init__(root, environ)
        object.__setattr__(self, "host", host)

    def size(self, path: str) -> tuple[int, int] | None:
        host: Host = self.host  # type: ignore[attr-defined]
        return (host.shm, host.shm) if path == "dev/shm" else super().size(path)

    def memlock(self) -> Limit:
        host: Host = self.host  # type: ignore[attr-defined]
        return Limit(host.memlock, host.memlock)


def put(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def config_space(acs: int) -> bytes:
    """A bridge's configuration: extended capabilities AER at 0x100, then ACS at 0x148."""
    config = bytearray(4096)
    struct.pack_into("<I", config, 0x100, 0x0001 | 2 << 16 | 0x148 << 20)
    struct.pack_into("<IHH", config, 0x148, 0x000D | 1 << 16, 0x5F, 0x0011 | acs)
    return bytes(config)


class NVMLError(Exception):
    pass


class FakeNvml:
    """Answers NVML's questions by its own function names, from a :class:`Host`."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 1, 0, 1

    def __init__(self, host: Host) -> None:
        self.host = host
        self.connected = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "host").refused:

            def refuse(*_arguments: Any) -> Any:
                raise NVMLError(NOT_SUPPORTED)

            return refuse
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        if self.host.fails_to_start:
            raise NVMLError(self.host.fails_to_start)
        self.connected += 1

    def nvmlShutdown(self) -> None:
        self.connected -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.host.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.host.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.host.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return [self.nvmlDeviceGetUUID(handle) for handle in range(len(self.host.boards))].index(uuid)

    def nvmlDeviceGetPcieThroughput(self, handle: int, counter: int) -> int:
        return 1_000_000 * (handle + 1)  # KiB a second

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle:08x}-1111-2222-3333-444455556666"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.host.boards[handle].name

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"0000{self.host.address(handle)}".upper())

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> list[int]:
        return list(self.host.boards[handle].capability)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        board = self.host.boards[handle]
        return SimpleNamespace(total=board.memory, used=board.used, free=board.memory - board.used)

    def nvmlDeviceGetBAR1MemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(bar1Total=self.host.boards[handle].bar1)

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:
        return self.host.boards[handle].limit

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: int) -> int:
        return self.host.boards[handle].default

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: int) -> list[int]:
        return [300_000, 600_000]

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 35_000

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return self.host.boards[handle].generation

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return self.host.boards[handle].width

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return self.host.boards[handle].most_generation

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetGpuMaxPcieLinkGeneration(self, handle: int) -> int:
        return self.host.boards[handle].card_generation

    def nvmlDeviceGetPersistenceMode(self, handle: int) -> int:
        return self.host.boards[handle].persistent

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return {1: 2430, 2: 12481}[kind]

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        return {1: 2430, 2: 12481}[kind]

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=self.host.boards[handle].busy)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return self.host.boards[handle].reasons

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return self.host.boards[handle].ecc

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        return (0, 0, self.host.boards[handle].pending, 0)

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:
        return self.host.boards[handle].mode

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        return list(self.host.boards[handle].mig)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return self.host.boards[handle].processes

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= self.host.boards[handle].nvlinks:
            raise NVMLError(NOT_SUPPORTED)
        return 1

    def nvmlDeviceGetTopologyCommonAncestor(self, left: int, right: int) -> int:
        if self.host.level:
            return self.host.level(left, right)
        return 40 if self.host.boards[left].node == self.host.boards[right].node else 50

    def nvmlDeviceGetP2PStatus(self, left: int, right: int, what: int) -> int:
        if what == 2:
            return 0 if self.host.boards[left].nvlinks else 5
        return self.host.atomics if what == 3 else self.host.p2p


def all_boards(**changes: Any) -> Callable[[Host], None]:
    """A fault of every board."""

    def change(host: Host) -> None:
        host.boards = [replace(board, **changes) for board in host.boards]

    return change


def process(pid: int, used: int | None) -> Any:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)
