"""Classes of failure, and the one that an engine's own words belong to."""

from __future__ import annotations

import re
from enum import StrEnum


class FailureClass(StrEnum):
    """Why an attempt failed: what a user would change next depends on it."""

    MEMORY_LOAD = "out-of-memory-load"  # weights do not fit
    MEMORY_KV = "out-of-memory-kv"  # weights fit, and nothing is left for the KV pool
    MEMORY_GRAPHS = "out-of-memory-graphs"  # the capture of CUDA graphs takes the rest
    MEMORY_SERVING = "out-of-memory-serving"  # it started, and a request took more than was left
    MEMORY_HOST = "out-of-memory-host"  # the kernel of the host killed a process
    ARCHITECTURE = "unsupported-architecture"
    KERNEL = "missing-kernel"
    FLAG = "removed-flag"  # or one that never existed, or a value it does not take
    ASSERTION = "assertion"
    HANG = "hang"
    NUMERICS = "numerics"  # NaN, garbage, one token repeated, a draft that guesses nothing
    NETWORK = "network"  # NCCL, sockets, the bus between the GPUs
    FILES = "model-files"
    SLOW = "slow"  # it runs, at a speed that nobody wants
    REFUSED = "refused-by-plan"  # never started
    OTHER = "other"


_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|CUDA calloc|CUBLAS_STATUS_(?:NOT_INITIALIZED|ALLOC_FAILED)|std::bad_alloc",
    re.IGNORECASE,
)
# SGLang explains "-9 (SIGKILL)" beside any other exit code, too.
_KILLED = re.compile(r"(?<!is -9 \()SIGKILL|exit code:? -9|^Killed$", re.IGNORECASE)
# In this order: the first that matches counts. A device-side assert is how NaN shows in a sampler, so numerics come
# before assertions; a missing flag is reported by argparse in words that fit nothing else.
_RULES: tuple[tuple[FailureClass, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (
            FailureClass.FLAG,
            r"unrecognized arguments|invalid choice|ambiguous option|error: argument |is removed|no longer",
        ),
        (FailureClass.MEMORY_KV, r"not enough memory|no GPU memory for KV|maximum allowed length"),
        (
            FailureClass.KERNEL,
            (
                r"OutOfResources|out of resource|no compiled |no kernel image|no execution plans|no supported CUDA"
                r"|not compiled|NotImplementedError|no implementation|error occurred when running GEMM|PTX"
            ),
        ),
        (
            FailureClass.ARCHITECTURE,
            (
                r"unsupported architecture|capability \(?1[02]|KeyError: 1[02]$|requires (?:sm|compute|hopper)"
                r"|only supported on|not supported on (?:sm|this)|device_props|TllmGenFmhaRunner"
            ),
        ),
        (FailureClass.NUMERICS, r"\bnan\b|inf, nan|probability tensor|logits? (?:is|are) "),
        (FailureClass.HANG, r"was not ready after|watchdog|timed? ?out"),
        (
            FailureClass.NETWORK,
            (
                r"NCCL|gloo|all_?reduce.*invalid argument"
                r"|Connection(?:Refused|Reset|Error)|ECONN|address already in use|unreachable"
            ),
        ),
        (
            FailureClass.FILES,
            (
                r"safetensors|checkpoint|must match the size of tensor|Config' object has no attribute|_weight'?$"
                r"|HFValidationError|size mismatch|\.size\(\)|k_scale|FileNotFound"
            ),
        ),
        (FailureClass.ASSERTION, r"assert"),
    )
)


def classify(text: str, *, phase: str = "") -> FailureClass:
    """Return the class of a failure from the line that says why.

    :param phase: what the engine was at: ``loading``, ``graphs``, ``ready``...; tells running out of memory apart.
    """
    if _KILLED.search(text):
        return FailureClass.MEMORY_HOST
    if _OUT_OF_MEMORY.search(text):
        by_phase = {"graphs": FailureClass.MEMORY_GRAPHS, "ready": FailureClass.MEMORY_SERVING}
        return by_phase.get(phase, FailureClass.MEMORY_LOAD)
    return next((kind for kind, pattern in _RULES if pattern.search(text)), FailureClass.OTHER)
