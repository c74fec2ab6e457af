"""The tensor-parallel servers on random weights that `tp2` and `policy` share."""

from __future__ import annotations

import json
import time
from pathlib import Path

from record.servers import CHAIN, SHAPES, Record, speed_flags

from .bench import Bench

SETTLE_S = 0.2
REAL = -1.0
"""Accept length of a control file that means: what the draft really gets accepted."""
_SPECULATIVE = ("speculative-draft-model-path", "speculative-algorithm", *CHAIN)
GOODPUT: Record = {"speculative-adaptive": None, "speculative-adaptive-policy": "goodput"}
# Servers with the policy, and what their environment has more.
ADAPTIVE: dict[str, dict[str, str]] = {"goodput": {}, "checked": {"SGLANG_SPEC_CHECK_RANKS": "1"}}


def start(bench: Bench, *names: str) -> None:
    """Start those of ``stock``, ``patched``, ``off``, ``goodput`` and ``checked`` that do not run yet; wait for them.

    ``off`` is the patched engine without speculation; ``checked`` is ``goodput`` with accepted drafts compared across
    the ranks, which costs a CPU collective in every round. Both time their graphs at the start, so nobody else may.
    """
    missing = [name for name in names if name not in bench.servers]
    for name in missing:
        tree = bench.options.stock if name == "stock" else bench.options.patched
        environ = {"BW_CONTROL": str(control_file(bench, name))}
        if name in ADAPTIVE:
            bench.wait(*bench.servers)
            environ |= {"BW_DECISIONS": str(decisions(bench, name))} | ADAPTIVE[name]
            decisions(bench, name).mkdir(exist_ok=True)
        control(bench, [name], REAL, settle=False)
        bench.start(name, tree, flags(bench, name), environ)
    bench.wait(*missing)


def flags(bench: Bench, name: str) -> Record:
    """Return the flags of a server; stock and patched have the same."""
    options = bench.options
    found = speed_flags(bench.scratch, options.device, options.shape)
    found |= {"max-running-requests": 32, "tp-size": options.tp}
    if options.device == "cuda":
        # Prefill is not what is measured, and its graphs take most of a start.
        found["disable-prefill-cuda-graph"] = None
        found["attention-backend"] = options.attention_backend
    if name == "off":
        return {key: value for key, value in found.items() if key not in _SPECULATIVE}
    return found | (GOODPUT if name in ADAPTIVE else {})


def control(
    bench: Bench, names: list[str], length: float, *, slow_ms: float = 0.0, slow_rank: int = 1, settle: bool = True
) -> None:
    """Set the simulated accept length of idle servers and the sleep of one rank, and let every rank see it.

    The last round of a batch may still run when its answer is there; ranks must not learn the new length in it.
    """
    if settle:
        time.sleep(SETTLE_S)
    for name in names:
        wanted = {"accept_length": length, "steps": -1, "slow_ms": slow_ms, "slow_rank": slow_rank}
        path = control_file(bench, name)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(wanted) + "\n")
        new.replace(path)
    if settle:
        time.sleep(SETTLE_S)


def control_file(bench: Bench, name: str) -> Path:
    """Return the file that a server's processes follow."""
    return bench.scratch / f"{name}.control"


def decisions(bench: Bench, name: str) -> Path:
    """Return the folder where the ranks of a server with the policy write what they decide."""
    return bench.scratch / f"decisions-{name}"


def vocabulary(bench: Bench) -> int:
    """Return the number of tokens."""
    found: int = SHAPES[bench.options.shape]["vocab"]
    return found
