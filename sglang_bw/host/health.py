"""Findings about each GPU: memory, power, link, clocks, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

from sglang_bw.host.finding import Finding, Group, listed, numbers
from sglang_bw.host.gpus import GIB, Gpu, Gpus, Process
from sglang_bw.host.link_load import UnderLoad

_GROUP = Group("GPUs")
# The engine itself refuses tensor parallelism when one GPU has less than 0.9 of the free memory of another.
HELD_FRACTION = 0.1


def findings(gpus: Gpus, loaded: Mapping[int, UnderLoad]) -> Iterator[Finding]:
    """Yield what there is to say about each GPU; alike ones share a line.

    :param loaded: links that were seen at work, by GPU index.
    """
    if not gpus.boards:
        yield _GROUP.unseen("GPUs", "no GPU to look at: nor links, topology, peer access, windows")
        return
    for name, boards in _alike(gpus.boards, lambda gpu: (gpu.name, gpu.arch, gpu.memory)):
        memory = boards[0].memory
        size = f", {memory / GIB:.1f} GiB each" if memory else ", memory shared with the processor"
        yield _GROUP.ok("boards", f"{len(boards)}x {name[0]} ({name[1]}{size})")
    if _differ(gpus.boards):
        yield _GROUP.warn(
            "boards",
            "different boards",
            costs="tensor parallelism runs at the pace and with the memory of the smallest",
            fix="choose alike ones with --gpus",
        )
    yield from _memory(gpus.boards)
    yield from _power(gpus.boards)
    for gpu in gpus.boards:
        yield from _faults(gpu)
    yield from _links(gpus.boards, loaded)
    yield from _clocks(gpus.boards)
    yield from _persistence(gpus.boards)


def _differ(boards: tuple[Gpu, ...]) -> bool:
    """Tell whether boards differ in name, or as those of one name do that were given more memory."""
    sizes = [gpu.memory or 0 for gpu in boards]
    return len({gpu.name for gpu in boards}) > 1 or min(sizes) < 0.9 * max(sizes)


def _alike(
    boards: tuple[Gpu, ...], key: Callable[[Gpu], Any], *, only: Callable[[Gpu], bool] = lambda _gpu: True
) -> Iterator[tuple[Any, list[Gpu]]]:
    groups: dict[Any, list[Gpu]] = {}
    for gpu in filter(only, boards):
        groups.setdefault(key(gpu), []).append(gpu)
    yield from groups.items()


def _named(boards: list[Gpu]) -> str:
    return f"GPU {numbers([gpu.index for gpu in boards])}"


def _memory(boards: tuple[Gpu, ...]) -> Iterator[Finding]:
    held = [gpu for gpu in boards if is_held(gpu)]
    for gpu in held:
        yield _GROUP.warn(
            "free memory",
            f"GPU {gpu.index}: {free(gpu)}",
            costs="smaller KV cache, or `Not enough memory` after the load",
            fix=stop(gpu),
        )
    rest = [gpu for gpu in boards if gpu not in held and gpu.memory is not None and gpu.free is not None]
    if rest:
        least = min(gpu.free or 0 for gpu in rest)
        yield _GROUP.ok("free memory", f"{_named(rest)}: at least {least / GIB:.1f} GiB free")


def is_held(gpu: Gpu) -> bool:
    """Tell whether others hold more of a GPU's memory than a launch can do without."""
    return bool(gpu.memory) and (gpu.used or 0) > HELD_FRACTION * (gpu.memory or 0)


def free(gpu: Gpu) -> str:
    """Return how much of a GPU's memory is free, and who holds the rest, with pid, name and GiB."""
    return f"{(gpu.free or 0) / GIB:.1f} of {(gpu.memory or 0) / GIB:.1f} GiB free, {_holders(gpu)}"


def _holders(gpu: Gpu) -> str:
    if not gpu.processes:
        return "held by a process that this one cannot see (another container or user)"
    return "held by " + listed([_holder(process) for process in gpu.processes], 3)


def _holder(process: Process) -> str:
    size = f", {process.used / GIB:.1f} GiB" if process.used else ""
    return f"pid {process.pid} ({_process_name(process.pid)}{size})"


def _process_name(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        # The engine calls its processes sglang::scheduler_TP0; interpreters say more by their arguments.
        return process.name() if not process.name().startswith("python") else " ".join(process.cmdline()[:4])[:60]
    except psutil.Error:
        return "in another container, or another user's"


def stop(gpu: Gpu) -> str:
    """Return the command that frees a GPU."""
    pids = " ".join(str(process.pid) for process in gpu.processes)
    return f"`kill {pids}` when it is yours" if pids else "`sudo fuser -v /dev/nvidia*` names the process"


def _power(boards: tuple[Gpu, ...]) -> Iterator[Finding]:
    def values(gpu: Gpu) -> tuple[float | None, ...]:
        return gpu.power_limit, gpu.power_default, gpu.power_most

    for (limit, default, most), alike in _alike(boards, values):
        if limit is None:
            yield _GROUP.unseen("power limit", f"{_named(alike)}: the driver does not tell")
        elif default is not None and limit < default:
            yield _GROUP.warn(
                "power limit",
                f"{_named(alike)}: {limit:.0f} W, board default {default:.0f} W",
                costs="little for one user (reported: 4 % at 300 of 600 W), about 30 % at high concurrency",
                fix=f"when it is not on purpose: `sudo nvidia-smi -i {_list(alike)} -pl {default:.0f}`",
            )
        else:
            yield _GROUP.ok("power limit", f"{_named(alike)}: {limit:.0f} W of at most {most or limit:.0f} W")


def _list(boards: list[Gpu]) -> str:
    return ",".join(str(gpu.index) for gpu in boards)


def _faults(gpu: Gpu) -> Iterator[Finding]:
    if gpu.ecc_errors:
        yield _GROUP.fail(
            "memory errors",
            f"GPU {gpu.index}: {gpu.ecc_errors} uncorrectable ECC errors since boot",
            costs="processes on it are killed (Xid 48, 94), results may be wrong",
            fix=f"`sudo nvidia-smi -r -i {gpu.index}`, then `dcgmi diag -r 3`; replace the board when they come back",
        )
    if gpu.rows_pending:
        yield _GROUP.fail(
            "memory errors",
            f"GPU {gpu.index}: memory rows wait to be remapped, or could not be",
            costs="the faulty memory stays in use until a reset",
            fix=f"`sudo nvidia-smi -r -i {gpu.index}` with no process on it",
        )
    if gpu.compute_mode == "prohibited":
        yield _GROUP.fail(
            "compute mode",
            f"GPU {gpu.index}: prohibited",
            costs="no process may use it",
            fix=f"`sudo nvidia-smi -i {gpu.index} -c DEFAULT`",
        )
    elif gpu.compute_mode:
        yield _GROUP.warn(
            "compute mode",
            f"GPU {gpu.index}: {gpu.compute_mode}",
            costs="one process a GPU: a second engine, or a profiler, fails",
            fix=f"`sudo nvidia-smi -i {gpu.index} -c DEFAULT`",
        )
    if gpu.mig:
        yield _GROUP.warn(
            "MIG",
            f"GPU {gpu.index} is split into instances",
            costs="an instance has a part of the memory, and no peer-to-peer",
            fix=f"`sudo nvidia-smi -i {gpu.index} -mig 0`",
        )


def _links(boards: tuple[Gpu, ...], loaded: Mapping[int, UnderLoad]) -> Iterator[Finding]:
    def key(gpu: Gpu) -> tuple[Any, ...]:
        under = loaded.get(gpu.index)
        return gpu.link, bool(gpu.busy), under and (under.generation, under.width, under.problem)

    for (link, busy, _), alike in _alike(boards, key):
        unders = [loaded[gpu.index] for gpu in alike if gpu.index in loaded]
        if link.generation is None or link.most_generation is None:
            yield _GROUP.unseen("PCIe link", f"{_named(alike)}: the driver does not tell")
        else:
            yield _link(alike, busy=busy, unders=unders)


def _link(alike: list[Gpu], *, busy: bool, unders: list[UnderLoad]) -> Finding:
    link = alike[0].link
    seen = [under for under in unders if not under.problem]
    generation, width = (seen[0].generation, seen[0].width) if seen else (link.generation or 0, link.width or 0)
    able = f"Gen{link.most_generation} x{link.most_width}"
    rate = f", {min(under.gigabytes_per_second for under in seen):.0f} GB/s to the device" if seen else ""
    when = "under load" if seen or busy else "idle"
    says = f"{_named(alike)}: Gen{generation} x{width} {when}, able to do {able}{rate}"
    if width < (link.most_width or 0):
        return _GROUP.warn(
            "PCIe link",
            says,
            costs="all-reduce and loading over fewer lanes",
            fix="reseat card and riser, look at the slot's bifurcation in the BIOS; the width does not drop at idle",
        )
    if generation < (link.most_generation or 0):
        if not (seen or busy):
            why = f" ({unders[0].problem})" if unders else ""
            return _GROUP.unseen(
                "PCIe link",
                f"{says}; a link slows down when nothing moves{why}",
                fix="`sglang-bw doctor` again without --no-load and with no process on the GPU, or while a server runs",
            )
        return _GROUP.warn(
            "PCIe link",
            says,
            costs="half of the bandwidth, or less, for every all-reduce between GPUs",
            fix="kernel options `pcie_aspm=off pcie_port_pm=off`; PCIe generation of the slot in the BIOS; reseat",
        )
    if (link.card_generation or 0) > (link.most_generation or 0):
        return _GROUP.warn(
            "PCIe link",
            f"{says}; the card could do Gen{link.card_generation}",
            costs="half of the bandwidth for every all-reduce between GPUs",
            fix="a slot of that generation, and its setting in the BIOS",
        )
    return _GROUP.ok("PCIe link", says)


def _clocks(boards: tuple[Gpu, ...]) -> Iterator[Finding]:
    for reasons, alike in _alike(boards, lambda gpu: gpu.slowed_by):
        hottest = max((gpu.temperature or 0 for gpu in alike), default=0)
        says = f"{_named(alike)}: {_clock_range(alike)}, up to {hottest} C"
        if not reasons:
            yield _GROUP.ok("clocks", f"{says}, nothing slows them")
        elif reasons == ("power cap",):
            yield _GROUP.ok("clocks", f"{says}, at the power limit (normal under load)")
        else:
            yield _GROUP.warn(
                "clocks",
                f"{says}, slowed by: {', '.join(reasons)}",
                costs="every step takes longer, and measurements drift",
                fix=_cooler(reasons),
            )


def _clock_range(boards: list[Gpu]) -> str:
    lowest = min(gpu.sm_clock or 0 for gpu in boards)
    most = max(gpu.sm_clock_most or 0 for gpu in boards)
    memory = min(gpu.memory_clock or 0 for gpu in boards)
    memory_most = max(gpu.memory_clock_most or 0 for gpu in boards)
    return f"{lowest} of {most} MHz, memory {memory} of {memory_most} MHz"


def _cooler(reasons: tuple[str, ...]) -> str:
    if any("thermal" in reason for reason in reasons):
        return "more air (a Server Edition needs the chassis' fans), or a lower limit: `sudo nvidia-smi -pl 500`"
    return "power cables and supplies (brake signal); the limit of the chassis"


def _persistence(boards: tuple[Gpu, ...]) -> Iterator[Finding]:
    off = [gpu for gpu in boards if gpu.persistent is False]
    if off:
        yield _GROUP.warn(
            "persistence",
            f"{_named(off)}: off",
            costs="seconds at each first use, and settings are lost when no process is left",
            fix="`sudo nvidia-smi -pm 1`, or the service nvidia-persistenced",
        )
    elif any(gpu.persistent for gpu in boards):
        yield _GROUP.ok("persistence", "on")
