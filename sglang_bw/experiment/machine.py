"""The machine of a run, and a fingerprint by which runs of the same kind of machine are found."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import psutil

from sglang_bw.ledger.record import Host


def look(*, local: bool = True) -> Host:
    """Return what this machine is.

    :param local: false when what is measured runs elsewhere.
    """
    gpus, driver = _gpus()
    cpu, cores = _cpu(), os.cpu_count() or 1
    memory = round(psutil.virtual_memory().total / 2**30, 1)
    content = "\n".join([cpu, str(cores), str(round(memory)), *gpus, driver or ""])
    fingerprint = hashlib.sha256(content.encode()).hexdigest()[:12]
    return Host(fingerprint=fingerprint, cpu=cpu, cores=cores, memory_gib=memory, gpus=gpus, driver=driver, local=local)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _gpus() -> tuple[tuple[str, ...], str | None]:
    try:
        import pynvml

        pynvml.nvmlInit()
        boards = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        return tuple(_text(pynvml.nvmlDeviceGetName(board)) for board in boards), _text(
            pynvml.nvmlSystemGetDriverVersion()
        )
    except Exception:
        return (), None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
