"""Whether decode batches ran as CUDA graphs, read from the engine's log."""

from __future__ import annotations

import re
from pathlib import Path

_BATCH = re.compile(rb"Decode batch.*(?:cuda|cpu) graph: (True|False)")


def graph_share(log: Path, offset: int = 0) -> float | None:
    """Return the share of the logged decode batches that ran as a graph, from a byte on; ``None`` without any."""
    with log.open("rb") as file:
        file.seek(offset)
        said = _BATCH.findall(file.read())
    return said.count(b"True") / len(said) if said else None
