"""Which machine this is, for records: the same digest for the same processors, GPUs and driver, on any day."""

from __future__ import annotations

import hashlib
import json
import os
import platform

import psutil

from sglang_bw.host import nvml
from sglang_bw.host.gpus import GIB
from sglang_bw.host.system import System
from sglang_bw.ledger.record import Host

_DIGITS = 12


def look(*, local: bool = True) -> Host:
    """Describe this machine.

    :param local: false when what is measured runs elsewhere.
    """
    system, gpus = System(), nvml.read(nvml.load())
    cpu = system.fields("proc/cpuinfo").get("model name") or platform.machine()
    cores = os.cpu_count() or 1
    memory = psutil.virtual_memory().total / GIB
    boards = tuple(gpu.name for gpu in gpus.boards)
    driver = gpus.driver if boards else ""
    facts = [platform.machine(), cpu, cores, round(memory), boards, driver]
    return Host(
        fingerprint=hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:_DIGITS],
        cpu=cpu,
        cores=cores,
        memory_gib=round(memory, 1),
        gpus=boards,
        driver=driver or None,
        local=local,
    )
