"""The driver's own account of the GPUs, through NVIDIA's binding of NVML.

Every question may go unanswered: boards, driver releases, containers and virtual machines each refuse some. An answer
that is refused is ``None`` in what is returned, never an error.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from sglang_bw.host.gpus import Gpu, Gpus, Link, Pair, Process

_PATHS = {0: "INT", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_P2P = ("OK", "chipset", "GPU", "topology", "turned off by a registry key", "not supported", "unknown")
_READ, _WRITE, _NVLINK, _ATOMICS = 0, 1, 2, 3
# Bits of the reasons for which clocks are low; idle and what the user has set are none of ours.
_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake (hardware)",
}
_COMPUTE_MODES = ("", "exclusive thread", "prohibited", "exclusive process")
_MOST_NVLINKS = 18
_SM, _MEMORY = 1, 2
_UNCORRECTED, _SINCE_BOOT = 1, 0


class Library(Protocol):
    """The part of ``pynvml`` that is asked here, by its own names; a handle is whatever it returns."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None:  # noqa: N802
        """Connect to the driver."""

    def nvmlShutdown(self) -> None:  # noqa: N802
        """Disconnect."""

    def __getattr__(self, name: str) -> Callable[..., Any]: ...


def load() -> Library | None:
    """Return NVIDIA's binding, or ``None`` when it is not installed."""
    try:
        library: Library = importlib.import_module("pynvml")
    except ImportError:
        return None
    return library


def read(library: Library | None) -> Gpus:
    """Ask the driver about every GPU that this process may see."""
    if library is None:
        return Gpus(problem="the package nvidia-ml-py is not installed")
    with connected(library) as problem:
        return Gpus(problem=problem) if problem else _Reader(library).gpus()


@contextlib.contextmanager
def connected(library: Library) -> Iterator[str]:
    """Connect to the driver; gives why that failed, or an empty string."""
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        yield _why(error)
        return
    except AttributeError as error:  # a binding of somebody else's by the same name
        yield f"the installed pynvml is not NVIDIA's: {error}"
        return
    try:
        yield ""
    finally:
        with contextlib.suppress(library.NVMLError):
            library.nvmlShutdown()


def _why(error: Exception) -> str:
    text = str(error)
    if "Library Not Found" in text or "Shared Library" in text:
        return "no NVIDIA driver library (libnvidia-ml.so.1)"
    if "Driver Not Loaded" in text:
        return "the NVIDIA kernel module is not loaded"
    return f"NVML: {text}"


class _Reader:
    """Asks one question after the other; what is not answered is ``None``."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def ask(self, name: str, *arguments: Any) -> Any:
        # A binding older or newer than the driver lacks a function on one side: no answer either.
        with contextlib.suppress(self.library.NVMLError, AttributeError, TypeError, ValueError, UnicodeDecodeError):
            return getattr(self.library, name)(*arguments)
        return None

    def text(self, name: str, *arguments: Any) -> str:
        answer = self.ask(name, *arguments)
        return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer or "")

    def gpus(self) -> Gpus:
        count = self.ask("nvmlDeviceGetCount") or 0
        handles = {index: self.ask("nvmlDeviceGetHandleByIndex", index) for index in range(count)}
        handles = {index: handle for index, handle in handles.items() if handle is not None}
        version = self.ask("nvmlSystemGetCudaDriverVersion_v2") or self.ask("nvmlSystemGetCudaDriverVersion") or 0
        boards = tuple(self.gpu(index, handle) for index, handle in handles.items())
        lost = count - len(boards)
        return Gpus(
            driver=self.text("nvmlSystemGetDriverVersion"),
            cuda=(version // 1000, version % 1000 // 10),
            boards=boards,
            pairs=tuple(self.pairs(handles, boards)),
            problem=f"{lost} of {count} GPUs do not answer" if lost else "",
        )

    def gpu(self, index: int, handle: Any) -> Gpu:
        memory = self.ask("nvmlDeviceGetMemoryInfo", handle)
        bar1 = self.ask("nvmlDeviceGetBAR1MemoryInfo", handle)
        limits = self.ask("nvmlDeviceGetPowerManagementLimitConstraints", handle)
        busy = self.ask("nvmlDeviceGetUtilizationRates", handle)
        rows = self.ask("nvmlDeviceGetRemappedRows", handle)
        mig = self.ask("nvmlDeviceGetMigMode", handle)
        persistent = self.ask("nvmlDeviceGetPersistenceMode", handle)
        mode = self.ask("nvmlDeviceGetComputeMode", handle) or 0
        return Gpu(
            index=index,
            uuid=self.text("nvmlDeviceGetUUID", handle),
            name=self.text("nvmlDeviceGetName", handle),
            bus=bus_address(self.ask("nvmlDeviceGetPciInfo", handle)),
            capability=tuple(self.ask("nvmlDeviceGetCudaComputeCapability", handle) or (0, 0)),
            memory=memory.total if memory else None,
            free=memory.free if memory else None,
            bar1=bar1.bar1Total if bar1 else None,
            power_limit=self.watts("nvmlDeviceGetPowerManagementLimit", handle),
            power_default=self.watts("nvmlDeviceGetPowerManagementDefaultLimit", handle),
            power_most=limits[1] / 1000 if limits else None,
            power_now=self.watts("nvmlDeviceGetPowerUsage", handle),
            link=self.link(handle),
            persistent=None if persistent is None else bool(persistent),
            sm_clock=self.ask("nvmlDeviceGetClockInfo", handle, _SM),
            sm_clock_most=self.ask("nvmlDeviceGetMaxClockInfo", handle, _SM),
            memory_clock=self.ask("nvmlDeviceGetClockInfo", handle, _MEMORY),
            memory_clock_most=self.ask("nvmlDeviceGetMaxClockInfo", handle, _MEMORY),
            temperature=self.ask("nvmlDeviceGetTemperature", handle, 0),
            busy=busy.gpu if busy else None,
            slowed_by=self.slowed_by(handle),
            ecc_errors=self.ask("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_BOOT),
            rows_pending=bool(rows and (rows[2] or rows[3])),
            compute_mode=_COMPUTE_MODES[mode] if mode < len(_COMPUTE_MODES) else f"mode {mode}",
            mig=None if mig is None else bool(mig[0]),
            processes=tuple(self.processes(handle)),
            nvlinks=sum(self.ask("nvmlDeviceGetNvLinkState", handle, n) == 1 for n in range(_MOST_NVLINKS)),
        )

    def watts(self, name: str, handle: Any) -> float | None:
        milliwatts = self.ask(name, handle)
        return None if milliwatts is None else milliwatts / 1000

    def link(self, handle: Any) -> Link:
        return Link(
            generation=self.ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            width=self.ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            most_generation=self.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            most_width=self.ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            card_generation=self.ask("nvmlDeviceGetGpuMaxPcieLinkGeneration", handle),
        )

    def slowed_by(self, handle: Any) -> tuple[str, ...]:
        bits = self.ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if bits is None:  # drivers before 535 know the older name only
            bits = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        return tuple(reason for bit, reason in _REASONS.items() if bits & bit)

    def processes(self, handle: Any) -> Iterator[Process]:
        seen: set[int] = set()
        for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            for process in self.ask(name, handle) or ():
                if process.pid not in seen:
                    seen.add(process.pid)
                    yield Process(process.pid, process.usedGpuMemory)

    def pairs(self, handles: dict[int, Any], boards: tuple[Gpu, ...]) -> Iterator[Pair]:
        links = {board.index: board.nvlinks for board in boards}
        for first, left in handles.items():
            for second, right in handles.items():
                if first >= second:
                    continue
                level = self.ask("nvmlDeviceGetTopologyCommonAncestor", left, right)
                path = _PATHS.get(level, "") if level is not None else ""
                if links[first] and self.p2p(left, right, _NVLINK) == "OK":
                    path = f"NV{min(links[first], links[second])}"
                read, write, atomics = (self.p2p(left, right, what) for what in (_READ, _WRITE, _ATOMICS))
                yield Pair(first, second, path, read, write, atomics)

    def p2p(self, left: Any, right: Any, what: int) -> str:
        status = self.ask("nvmlDeviceGetP2PStatus", left, right, what)
        if status is None:
            return ""
        return _P2P[status] if 0 <= status < len(_P2P) else f"status {status}"


def bus_address(info: Any) -> str:
    """Return the address of NVML's PCI record as sysfs writes it: four digits of domain, lower case."""
    if info is None:
        return ""
    raw = info.busId.decode() if isinstance(info.busId, bytes) else str(info.busId)
    domain, _, rest = raw.lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}"
