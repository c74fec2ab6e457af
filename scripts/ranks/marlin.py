"""The kernels of INT4 experts, compiled before a server asks for them.

    cd scripts; python -m ranks.marlin ENGINE LOGS

A layer multiplies twice, each time by another variant of Marlin's MoE kernel. A server compiles one after the other on
one core, some five minutes each on a fast one; here both are compiled at once. What is compiled lies in the engine's
cache of kernels, and any server of the same release finds it there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from record.servers import spawn

# Expert parallel, without bias; what differs is whether rows of no expert are set to zero.
_PROGRAM = """
import sys, torch
from sglang.kernels.ops.moe.moe_wna16_marlin import _jit_moe_wna16_marlin_module as module
module(torch.bfloat16, True, False, zero_inactive_output=sys.argv[1] == "down")
print("compiled", sys.argv[1])
"""


def compile_variants(engine: Path, logs: Path) -> list[subprocess.Popen[bytes]]:
    """Start compiling both variants; a server that wants one meanwhile waits for it."""
    environ = dict(os.environ) | {"PYTHONPATH": str(engine)}
    started = []
    for variant in ("up", "down"):
        log = logs / f"marlin-{variant}.log"
        started.append(spawn([sys.executable, "-c", _PROGRAM, variant], environ, log, log))
    return started


if __name__ == "__main__":
    sys.exit(max(process.wait() for process in compile_variants(Path(sys.argv[1]), Path(sys.argv[2]))))
