"""Losslessness with real weights: the bundled pair at tensor parallelism 2, patched and stock."""

from __future__ import annotations

from typing import Any

from record import pair as bundled
from record.servers import TREE, Record, start_serve, wait_all

from .bench import Bench
from .greedy import NEAR_ULP


def run(bench: Bench) -> None:
    """Start the servers beside each other and compare their tokens with those without speculation."""
    options = bench.options
    for name, (own, engine_flags) in arms(options.device).items():
        tree = options.stock if name.startswith("stock") else options.patched
        flags = ["--tp-size", str(options.tp), *engine_flags]
        if options.device == "cuda":
            flags += ["--attention-backend", options.attention_backend]
        words = ["--engine-tree", str(tree), "--device", options.device, *own]
        bench.servers[name] = start_serve(name, words, flags, bench.scratch)
    wait_all(list(bench.servers.values()), options.start_limit)
    bench.record["runs"] = bundled.pair(list(bench.servers.values()))
    if lost := [name for name, found in bench.record["runs"].items() if not lossless(found)]:
        raise RuntimeError(f"tokens differ, and not in a tie: {', '.join(lost)}")


def arms(device: str) -> dict[str, tuple[list[str], list[str]]]:
    """Return the options of `serve` and of the engine for each server, the reference first."""
    found: dict[str, tuple[list[str], list[str]]] = {
        "plain": (["--no-spec"], []),
        "chain": ([], []),
        "tree": ([], TREE),
    }
    if device == "cuda":  # on a CPU stock does not start
        found["stock chain"] = (["--allow-stock"], [])
    return found


def lossless(found: dict[str, Any]) -> bool:
    """Tell whether each first difference is a tie of the engine's own logits, or of fp32's where these are unknown."""
    gaps = [row.get("engine_ulp", row["fp32_ulp"]) for row in found["first_differences"]]
    return all(abs(gap) < NEAR_ULP for gap in gaps)


def line(record: Record) -> str:
    """Return what was found in one line."""
    said = []
    for name, found in record.get("runs", {}).items():
        parted = len(found["first_differences"])
        said.append(f"{name}: {parted} of {bundled.PROMPTS} parted, accept length {found['accept_length']}")
    return "; ".join(said)
