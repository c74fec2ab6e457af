"""Which machine this is, for records: the same digest for the same processors, GPUs and driver, on any day."""

from __future__ import annotations

import hashlib
import json
import os
import platform

from sglang_bw.host.gpus import GIB, Gpus
from sglang_bw.host.system import System
from sglang_bw.ledger.record import Host

_DIGITS = 12


def see(gpus: Gpus | None = None, system: System | None = None) -> Host:
    """Describe this machine.

    :param gpus: as the driver shows them; ``None`` for a launch that uses none.
    """
    system = system or System()
    cpu = system.fields("proc/cpuinfo").get("model name") or platform.machine()
    cores = os.cpu_count() or 1
    memory = int(system.fields("proc/meminfo").get("MemTotal", "0 kB").split()[0]) * 1024 / GIB
    boards = tuple(gpu.name for gpu in gpus.boards) if gpus else ()
    driver = gpus.driver if gpus and boards else ""
    facts = [platform.machine(), cpu, cores, round(memory), boards, driver]
    return Host(
        fingerprint=hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:_DIGITS],
        cpu=cpu,
        cores=cores,
        memory_gib=round(memory, 1),
        gpus=boards,
        driver=driver or None,
    )
