"""Findings about how GPUs reach each other: topology, peer access, IOMMU, access control, windows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_bw.host import pci
from sglang_bw.host.finding import Finding, Group, listed, numbers
from sglang_bw.host.gpus import GIB, MIB, Gpu, Gpus, Pair
from sglang_bw.host.system import System

_TOPOLOGY = Group("Topology")
_PEER = Group("Peer access")
_IOMMU = Group("IOMMU and ACS")
_WINDOW = Group("Resizable BAR")
_WORDS = {
    "PIX": "one PCIe switch between them",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
}
_IOMMU_OFF = "kernel option `iommu=off` (AMD: also `amd_iommu=off`); or `iommu=pt` with NCCL_CUMEM_ENABLE=1"
_FORCE_P2P = (
    "`echo 'options nvidia NVreg_RegistryDwords="
    '"ForceP2P=0x11;RMForceP2PType=1;RMPcieP2PType=2;GrdmaPciTopoCheckOverride=1;EnableResizableBar=1"\''
    " | sudo tee /etc/modprobe.d/nvidia-p2p-override.conf`, then reload the driver or reboot"
)


@dataclass(frozen=True)
class Fabric:
    """What lies between GPUs.

    :ivar devices: PCI device of each GPU, by its index; a GPU whose device sysfs does not show is left out.
    :ivar pairs: pairs with the path that the driver tells, else the one that sysfs shows.
    """

    gpus: Gpus
    devices: dict[int, pci.Device]
    pairs: tuple[Pair, ...]

    @property
    def multi(self) -> bool:
        """Whether there is more than one GPU."""
        return len(self.gpus.boards) > 1

    @property
    def switched(self) -> bool:
        """Whether NVLink joins every pair."""
        return bool(self.pairs) and all(pair.path.startswith("NV") for pair in self.pairs)

    def matrix(self) -> list[list[str]]:
        """Return the table of paths: a header, then a row a GPU with its NUMA node."""
        boards = self.gpus.boards
        paths = {(pair.first, pair.second): pair.path for pair in self.pairs}
        rows = [["", *(f"GPU{gpu.index}" for gpu in boards), "NUMA"]]
        for left in boards:
            device = self.devices.get(left.index)
            cells = [
                "X" if left is right else paths.get((min(left.index, right.index), max(left.index, right.index))) or "?"
                for right in boards
            ]
            rows.append(
                [f"GPU{left.index}", *cells, "?" if device is None or device.node is None else str(device.node)]
            )
        return rows


def fabric(system: System, gpus: Gpus) -> Fabric:
    """Join what the driver tells with what sysfs shows."""
    on_bus = {device.address: device for device in pci.gpus(system)}
    devices = {gpu.index: on_bus[gpu.bus] for gpu in gpus.boards if gpu.bus in on_bus}
    pairs = []
    for pair in gpus.pairs:
        left, right = devices.get(pair.first), devices.get(pair.second)
        shown = pci.path(left, right) if left and right and not pair.path else ""
        pairs.append(pair._replace(path=pair.path or shown))
    return Fabric(gpus, devices, tuple(pairs))


def findings(system: System, between: Fabric) -> Iterator[Finding]:
    """Yield what there is to say about the ways between GPUs."""
    if between.multi:
        yield from _topology(system, between)
        yield from _peers(between)
    elif between.gpus.boards:
        yield _TOPOLOGY.ok("topology", "one GPU: nothing between GPUs")
    yield from _windows(between)
    yield _iommu(system, between)
    if between.multi:
        yield _acs(system, between)


def _topology(system: System, between: Fabric) -> Iterator[Finding]:
    counts = Counter(pair.path for pair in between.pairs)
    said = [f"{_counted(count, 'pair')} {path or '?'}{_word(path)}" for path, count in counts.most_common()]
    nodes = Counter(device.node for device in between.devices.values() if device.node is not None)
    numa = ", ".join(f"{_counted(count, 'GPU')} on NUMA node {node}" for node, count in sorted(nodes.items()))
    yield _TOPOLOGY.ok("topology", "; ".join(said) + (f". {numa}" if numa else ""))
    if between.switched:
        return
    if len(nodes) > 1 and len(set(nodes.values())) > 1:
        yield _TOPOLOGY.warn(
            "NUMA balance",
            numa,
            costs="more all-reduce traffic over the link between sockets than an even split has",
            fix="move cards between slots, or choose an even set with --gpus",
        )
    if system.is_virtual:
        yield _TOPOLOGY.unseen("real topology", "a virtual machine: the hypervisor may show another bus than there is")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _word(path: str) -> str:
    if path.startswith("NV"):
        return f" ({path[2:]} NVLinks)"
    return f" ({_WORDS[path]})" if path in _WORDS else ""


def _peers(between: Fabric) -> Iterator[Finding]:
    known = [pair for pair in between.pairs if pair.read and pair.write]
    if not known:
        yield _PEER.unseen("peer-to-peer", "the driver does not tell", fix="`nvidia-smi topo -p2p r`")
        return
    bad = [pair for pair in known if pair.read != "OK" or pair.write != "OK"]
    if bad:
        reasons = Counter(pair.read if pair.read != "OK" else pair.write for pair in bad)
        yield _PEER.warn(
            "peer-to-peer",
            f"{len(bad)} of {len(known)} pairs cannot ({listed([f'{n}x {why}' for why, n in reasons.items()])})",
            costs="all-reduce through host memory (14 us instead of 0.5 us a hop); no custom, no PCIe-IPC all-reduce",
            fix=_peer_fix(between, bad),
        )
    else:
        # Reported more than once: every pair OK, and the first all-reduce hangs (rtx6kpro#15, nccl#1999).
        yield _PEER.ok(
            "peer-to-peer", f"the driver allows it for all {len(known)} pairs (that it works is not proven by this)"
        )
    without = [pair for pair in known if pair.atomics not in ("OK", "")]
    if without and not bad and not between.switched:
        yield _PEER.ok(
            "native atomics",
            f"not between {len(without)} of {len(known)} pairs: usual on PCIe; symmetric memory needs them",
        )


def _peer_fix(between: Fabric, bad: list[Pair]) -> str:
    names = {gpu.name for gpu in between.gpus.boards}
    if any("GeForce" in name for name in names):
        return "none for GeForce boards: NVIDIA's driver does not offer it; start with `--disable-custom-all-reduce`"
    if all(pair.path in ("NODE", "PHB", "SYS") for pair in bad):
        return _FORCE_P2P
    return "BIOS: Above 4G Decoding and Resizable BAR on; IOMMU off; then `nvidia-smi topo -p2p r`"


def _windows(between: Fabric) -> Iterator[Finding]:
    # A board that shares the processor's memory (DGX Spark) has none of its own to show through a window.
    own = [gpu for gpu in between.gpus.boards if gpu.memory]
    small = [gpu for gpu in own if _window(between, gpu) and not _whole(between, gpu)]
    unknown = [gpu for gpu in own if not _window(between, gpu)]
    if small:
        size = min(_window(between, gpu) for gpu in small)
        says = f"GPU {numbers([gpu.index for gpu in small])}: BAR1 is {size / MIB:,.0f} MiB, less than the memory"
        fix = "BIOS: Above 4G Decoding and Resizable BAR on; `nvidia-smi -q | grep -A1 BAR1` shows the result"
        if between.multi and not between.switched:
            yield _WINDOW.fail(
                "BAR1", says, costs="no peer-to-peer over PCIe: every all-reduce through host memory", fix=fix
            )
        else:
            yield _WINDOW.warn("BAR1", says, costs="slower loading", fix=fix)
    if unknown:
        yield _WINDOW.unseen("BAR1", f"GPU {numbers([gpu.index for gpu in unknown])}: neither driver nor sysfs tells")
    whole = [gpu for gpu in between.gpus.boards if _whole(between, gpu)]
    if whole:
        size = min(_window(between, gpu) for gpu in whole)
        yield _WINDOW.ok("BAR1", f"GPU {numbers([gpu.index for gpu in whole])}: {size / GIB:.0f} GiB, the whole memory")


def _window(between: Fabric, gpu: Gpu) -> int:
    device = between.devices.get(gpu.index)
    return gpu.bar1 or (max(device.windows, default=0) if device else 0)


def _whole(between: Fabric, gpu: Gpu) -> bool:
    # Above 90 %: the window is a power of two or exactly the memory, and the driver keeps a part of both for itself.
    return _window(between, gpu) >= 0.9 * (gpu.memory or 0) > 0


def _iommu(system: System, between: Fabric) -> Finding:
    line = system.text("proc/cmdline") or ""
    options = re.findall(r"\b(?:amd_|intel_)?iommu(?:\.\w+)?=\S+", line)
    asked = f" (kernel options: {' '.join(options)})" if options else ""
    modes = {device.iommu for device in between.devices.values()}
    if not modes:
        if system.names("sys/class/iommu"):
            return _IOMMU.unseen("IOMMU", f"on{asked}; no GPU whose group could be looked at")
        return _IOMMU.ok("IOMMU", f"off{asked}")
    if modes == {None}:
        return _IOMMU.ok("IOMMU", f"off, or not for the GPUs{asked}")
    if modes <= {None, "identity"}:
        fix = "NCCL_CUMEM_ENABLE=1 is reported to be needed with it" if between.multi and not between.switched else ""
        return _IOMMU.ok("IOMMU", f"passes through for the GPUs{asked}", fix=fix)
    if "" in modes:
        return _IOMMU.unseen("IOMMU", f"on for the GPUs{asked}; its mode is closed to this user", fix="run as root")
    says = f"translates for the GPUs: {', '.join(sorted(mode for mode in modes if mode))}{asked}"
    if between.switched or system.is_virtual:
        return _IOMMU.ok("IOMMU", says)
    return _IOMMU.warn(
        "IOMMU",
        says,
        costs="peer traffic about 15 % slower; NCCL is reported to hang with 8 GPUs or more",
        fix=_IOMMU_OFF,
    )


def _acs(system: System, between: Fabric) -> Finding:
    bridges = sorted({address for device in between.devices.values() for address in device.bridges})
    if not bridges:
        return _IOMMU.unseen("ACS", "no bridge above a GPU in sysfs")
    read = {address: pci.redirects(system, address) for address in bridges}
    closed = [address for address, bits in read.items() if bits is None]
    redirecting = {address: bits for address, bits in read.items() if bits}
    if redirecting:
        bits = sorted({bit for found in redirecting.values() for bit in found})
        return _IOMMU.warn(
            "ACS",
            f"{', '.join(bits)} on {len(redirecting)} of {len(bridges)} bridges above GPUs:"
            f" {listed(list(redirecting), 3)}",
            costs="peer traffic goes up to the CPU: slower, and the first all-reduce is reported to hang",
            fix=f"`for b in {' '.join(redirecting)}; do sudo setpci -s $b ECAP_ACS+6.w=0000; done` (until reboot)",
        )
    if closed:
        return _IOMMU.unseen(
            "ACS", f"{len(closed)} bridges: their registers are closed to this user", fix="`sudo sglang-bw doctor`"
        )
    return _IOMMU.ok("ACS", f"no redirection on the {len(bridges)} bridges above GPUs")
