"""Clock, power and PCIe traffic of the GPUs, from NVML, while something else runs."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from typing import Any

from sglang_bw.experiment import looks
from sglang_bw.host import nvml
from sglang_bw.ledger.record import GpuUse


class GpuSampler:
    """Samples in a thread between enter and exit; where there is no NVML, it does nothing."""

    def __init__(self, uuids: Sequence[str] | None = None, *, local: bool) -> None:
        """Look for NVML.

        :param uuids: of the GPUs that the measured server has; ``None`` when nobody knows: then all of them are read.
        :param local: false when the measured server runs elsewhere: this machine's GPUs say nothing then.
        """
        self._nvml: Any = None
        self._boards: list[Any] = []
        self._samples: list[list[tuple[float, ...]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        if local:
            self._open(uuids)

    def _open(self, uuids: Sequence[str] | None) -> None:
        library = nvml.load()
        if library is None:
            return
        try:
            library.nvmlInit()
            if uuids is None:
                self._boards = [library.nvmlDeviceGetHandleByIndex(n) for n in range(library.nvmlDeviceGetCount())]
            else:
                self._boards = [library.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
            self._nvml = library
        except Exception:  # no driver, or a package of the same name that is not NVIDIA's
            self._boards = []

    def __enter__(self) -> GpuSampler:
        if self._boards:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def use(self) -> GpuUse | None:
        """Return medians, one a GPU; ``None`` without a sample."""
        if not self._samples:
            return None
        boards = [
            [statistics.median(column) for column in zip(*rows, strict=True)]
            for rows in zip(*self._samples, strict=True)
        ]
        clock, power, receive, send = (tuple(column) for column in zip(*boards, strict=True))
        return GpuUse(clock_mhz=clock, power_w=power, pcie_rx_mb_s=receive, pcie_tx_mb_s=send)

    def _run(self) -> None:
        for pause in looks.pauses():
            if self._over.wait(pause):
                return
            try:
                self._samples.append([self._sample(board) for board in self._boards])
            except self._nvml.NVMLError:  # a counter that this board does not have
                return

    def _sample(self, board: Any) -> tuple[float, ...]:
        library = self._nvml
        kib = 1024 / 1e6  # NVML counts KiB a second
        return (
            float(library.nvmlDeviceGetClockInfo(board, library.NVML_CLOCK_SM)),
            library.nvmlDeviceGetPowerUsage(board) / 1000,
            library.nvmlDeviceGetPcieThroughput(board, library.NVML_PCIE_UTIL_RX_BYTES) * kib,
            library.nvmlDeviceGetPcieThroughput(board, library.NVML_PCIE_UTIL_TX_BYTES) * kib,
        )
