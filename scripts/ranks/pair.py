"""The bundled pair at tensor parallelism 2, real weights: losslessness, patched and stock; the draft after a rest."""

from __future__ import annotations

import csv
import json
import os
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from record import pair as bundled
from record.servers import TREE, Record, start_serve, wait_all

from .bench import INJECT, Bench
from .greedy import NEAR_ULP

REST = "rests"
"""The server with the goodput policy, whose step counts are prescribed: it drafts between rounds without drafting."""
STEPS = [*[0] * 5, *[3] * 4, *[0] * 16, *[3] * 4, *[0] * 37, *[3] * 4]
"""Rests below, at and above the sixteen tokens after which the draft catches up."""
LEAST = 0.9
"""Of the accept length of rounds after a round of drafting, in the first round after a rest."""


def run(bench: Bench) -> None:
    """Start the servers beside each other and compare their tokens with those without speculation."""
    options = bench.options
    for name, (own, engine_flags) in arms(options.device).items():
        tree = options.stock if name.startswith("stock") else options.patched
        flags = ["--tp-size", str(options.tp), *engine_flags]
        if options.device == "cuda":
            flags += ["--attention-backend", options.attention_backend]
        words = ["--engine-tree", str(tree), "--device", options.device, *own]
        environ = resting(bench.scratch) if name == REST else {}
        bench.servers[name] = start_serve(name, words, flags, bench.scratch, environ)
    wait_all(list(bench.servers.values()), options.start_limit)
    runs = bench.record["runs"] = bundled.pair(list(bench.servers.values()))
    found = bench.record["rests"] = rested(rounds_file(bench.scratch))
    if lost := [name for name, one in runs.items() if not lossless(one)]:
        raise RuntimeError(f"tokens differ, and not in a tie: {', '.join(lost)}")
    if found["after_a_rest"] < LEAST * found["drafting"]:
        raise RuntimeError(f"the draft is worse after rounds without drafting: {found}")


def arms(device: str) -> dict[str, tuple[list[str], list[str]]]:
    """Return the options of `serve` and of the engine for each server, the reference first."""
    found: dict[str, tuple[list[str], list[str]]] = {
        "plain": (["--no-spec"], []),
        "chain": ([], []),
        "tree": ([], TREE),
        REST: ([], ["--speculative-adaptive", "--speculative-adaptive-policy", "goodput"]),
    }
    if device == "cuda":  # on a CPU stock does not start
        found["stock chain"] = (["--allow-stock"], [])
    return found


def resting(scratch: Path) -> dict[str, str]:
    """Prescribe the step counts of a server; return its environment."""
    control = scratch / "rests.control"
    control.write_text(json.dumps({"accept_length": -1.0, "steps": STEPS}) + "\n")
    path = os.pathsep.join(filter(None, (str(INJECT), os.environ.get("PYTHONPATH", ""))))
    return {"BW_CONTROL": str(control), "BW_ROUNDS": str(rounds_file(scratch)), "PYTHONPATH": path}


def rounds_file(scratch: Path) -> Path:
    """Return where that server keeps its rounds."""
    return scratch / "rests.rounds"


def rested(path: Path) -> Record:
    """Return the accept length of first rounds after a rest, by its length, and of rounds after one that drafted."""
    after: dict[int, list[float]] = {}
    drafting: list[float] = []
    rest = 0
    with path.open(newline="") as file:
        rows = [(int(steps), int(batch), 1 + float(mean)) for _, steps, batch, mean, _ in csv.reader(file)]
    for (before, old, _), (steps, batch, accepted) in pairwise(rows):
        rest = 0 if before or old != batch else rest + 1  # a request that has just come has rested less
        if steps and rest:
            after.setdefault(rest, []).append(accepted)
        elif steps and before == steps and old == batch:
            drafting.append(accepted)
    every = [accepted for found in after.values() for accepted in found]
    return {
        "rounds": len(rows),
        "after_a_rest": round(statistics.fmean(every), 3),
        "drafting": round(statistics.fmean(drafting), 3),
        "by_rest": {rest: [len(found), round(statistics.fmean(found), 3)] for rest, found in sorted(after.items())},
    }


def lossless(found: dict[str, Any]) -> bool:
    """Tell whether each first difference is a tie of the engine's own logits, or of fp32's where these are unknown."""
    gaps = [row.get("engine_ulp", row["fp32_ulp"]) for row in found["first_differences"]]
    return all(abs(gap) <= NEAR_ULP for gap in gaps)


def line(record: Record) -> str:
    """Return what was found in one line."""
    said = []
    for name, found in record.get("runs", {}).items():
        parted = len(found["first_differences"])
        said.append(f"{name}: {parted} of {bundled.PROMPTS} parted, accept length {found['accept_length']}")
    if rests := record.get("rests"):
        said.append(f"first round after a rest {rests['after_a_rest']}, while drafting {rests['drafting']}")
    return "; ".join(said)
