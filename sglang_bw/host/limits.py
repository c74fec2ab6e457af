"""Findings about what the operating system grants: shared memory, locked memory, host memory, processor settings."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_bw.host.finding import Finding, Group
from sglang_bw.host.gpus import GIB, MIB, Gpus
from sglang_bw.host.system import System

_GROUP = Group("Host")
_DOCKER_SHM = 64 * MIB  # what Docker gives a container by default
_SHM_ENOUGH = 8 * GIB
# Reported: loaders of 500 GB checkpoints were killed below it (Kimi-K2.5, MiniMax-M2.5 on 8 and 2 boards).
HUGE_MODEL_HOST = 128 * GIB
_HUGE_MODEL_GPUS = 256 * GIB


def findings(system: System, gpus: Gpus) -> Iterator[Finding]:
    """Yield what there is to say about the operating system."""
    multi = len(gpus.boards) > 1
    yield _shared_memory(system, multi=multi)
    yield _locked_memory(system, multi=multi)
    yield _host_memory(system, gpus)
    yield _huge_pages(system)
    yield from _processor(system, multi=multi)


def _shared_memory(system: System, *, multi: bool) -> Finding:
    size = system.size("dev/shm")
    if size is None:
        return _GROUP.unseen("/dev/shm", "not there")
    says = f"{_size(size[0])}, {_size(size[1])} free"
    fix = "docker: `--ipc=host` or `--shm-size=32g`; else `sudo mount -o remount,size=32g /dev/shm`"
    if size[1] <= _DOCKER_SHM and multi:
        return _GROUP.fail(
            "/dev/shm", says, costs="NCCL cannot make its buffers: `unhandled system error` at start", fix=fix
        )
    if size[1] <= _DOCKER_SHM or (size[1] < _SHM_ENOUGH and multi):
        return _GROUP.warn("/dev/shm", says, costs="NCCL and tokenizer workers may run out of it", fix=fix)
    return _GROUP.ok("/dev/shm", says)


def _size(count: int) -> str:
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{count / MIB:.0f} MiB" if count >= MIB else f"{count / 1024:.0f} KiB"


def _locked_memory(system: System, *, multi: bool) -> Finding:
    limit = system.memlock()
    if limit.soft is None:
        return _GROUP.ok("ulimit -l", "unlimited")
    says = f"{_size(limit.soft)} may be locked"
    if not multi:
        return _GROUP.ok("ulimit -l", f"{says} (matters to several GPUs only)")
    raised = "`ulimit -l unlimited`" if limit.hard is None else "`* - memlock unlimited` in /etc/security/limits.conf"
    return _GROUP.warn(
        "ulimit -l",
        says,
        costs="RDMA and pinned host buffers fail beyond it",
        fix=f"{raised}; docker: `--ulimit memlock=-1`; systemd: `LimitMEMLOCK=infinity`",
    )


def _host_memory(system: System, gpus: Gpus) -> Finding:
    info = system.fields("proc/meminfo")
    total, available = (_kibibytes(info.get(name, "")) for name in ("MemTotal", "MemAvailable"))
    if total is None:
        return _GROUP.unseen("host memory", "/proc/meminfo cannot be read")
    limit = _container_limit(system)
    ours = min(total, limit or total)
    free = min(available or total, ours)
    capped = f", this container may use {limit / GIB:.0f} GiB" if limit and limit < total else ""
    says = f"{total / GIB:.0f} GiB, {free / GIB:.0f} GiB available{capped}"
    boards = sum(gpu.memory or 0 for gpu in gpus.boards)
    if boards > _HUGE_MODEL_GPUS and ours < HUGE_MODEL_HOST:
        return _GROUP.warn(
            "host memory",
            f"{says}; the GPUs have {boards / GIB:.0f} GiB",
            costs="loading a model that fills them: the kernel kills a loader (`Exit code: -9`)",
            fix="128 GiB or more, a higher container limit, or swap while loading",
        )
    return _GROUP.ok("host memory", says)


def _kibibytes(text: str) -> int | None:
    number = text.split(" ")[0]
    return int(number) * 1024 if number.isdigit() else None


def _container_limit(system: System) -> int | None:
    """Return the memory limit of this process's control group (version 2, then 1), in bytes."""
    for path in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if (limit := system.number(path)) is not None:
            return limit
    return None


def _huge_pages(system: System) -> Finding:
    mode = system.text("sys/kernel/mm/transparent_hugepage/enabled")
    info = system.fields("proc/meminfo")
    reserved, size = info.get("HugePages_Total", "0"), _kibibytes(info.get("Hugepagesize", "")) or 0
    chosen = mode.partition("[")[2].partition("]")[0] if mode else "not there"
    held = int(reserved) * size if reserved.isdigit() else 0
    says = f"transparent: {chosen}; reserved: {reserved} of {size / MIB:.0f} MiB"
    if held > 8 * GIB:
        return _GROUP.warn(
            "hugepages",
            f"{says}, {held / GIB:.0f} GiB that the page cache and the loader cannot use",
            costs="host memory, while a checkpoint is read",
            fix="`sudo sysctl vm.nr_hugepages=0` when nothing else needs them",
        )
    return _GROUP.ok("hugepages", says)


def _processor(system: System, *, multi: bool) -> Iterator[Finding]:
    governor = system.text("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor is None:
        yield _GROUP.unseen("CPU governor", "the kernel shows none (a virtual machine, or set by the firmware)")
    elif governor != "performance":
        yield _GROUP.warn(
            "CPU governor",
            governor,
            costs="launching a decode step waits for a slow core: seen as gaps at batch 1",
            fix="`echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor`",
        )
    else:
        yield _GROUP.ok("CPU governor", governor)
    nodes = [name for name in system.names("sys/devices/system/node") if name.removeprefix("node").isdigit()]
    balancing = system.number("proc/sys/kernel/numa_balancing")
    if len(nodes) > 1 and balancing:
        yield _GROUP.warn(
            "NUMA balancing",
            f"on, {len(nodes)} nodes",
            costs="the kernel moves pages of a running server between nodes: stalls",
            fix="`sudo sysctl -w kernel.numa_balancing=0`; and SGLANG_SET_CPU_AFFINITY=1",
        )
    policy = (system.text("sys/module/pcie_aspm/parameters/policy") or "").partition("[")[2].partition("]")[0]
    if multi and policy.startswith("powersave"):
        yield _GROUP.warn(
            "PCIe power saving",
            policy,
            costs="links change speed under a server: latency, and GPUs that fall off the bus",
            fix="`echo performance | sudo tee /sys/module/pcie_aspm/parameters/policy`, or boot with `pcie_aspm=off`",
        )
