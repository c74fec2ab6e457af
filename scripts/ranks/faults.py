"""A lost all-reduce (in place, by torch symmetric memory) on two real ranks: stock and patched, of 0.5.9 and 0.5.23."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from record.servers import Record

from .bench import Bench, ranks

PROGRAM = Path(__file__).parent / "fault_rank.py"
SECONDS = 120.0
# Only the old release loses results; the newer stock one has the same correction by upstream.
EXPECTED = {"0.5.9 stock": False, "0.5.9 patched": True, "0.5.23 stock": True, "0.5.23 patched": True}


def run(bench: Bench) -> None:
    """Ask the four engines beside each other."""
    options = bench.options
    trees = {
        "0.5.9 stock": options.stock_old,
        "0.5.9 patched": options.patched_old,
        "0.5.23 stock": options.stock,
        "0.5.23 patched": options.patched,
    }
    present = {name: tree for name, tree in trees.items() if tree}
    with ThreadPoolExecutor(len(present)) as pool:
        asked = {name: pool.submit(_ask, bench, name, tree) for name, tree in present.items()}
        bench.record["engines"] = {name: one.result() for name, one in asked.items()}
    bench.keep()
    if other := [name for name, found in bench.record["engines"].items() if found["right"] is not EXPECTED[name]]:
        raise RuntimeError(f"not as expected: {', '.join(other)}")


def _ask(bench: Bench, name: str, tree: Path) -> Record:
    label = "fault-" + name.replace(" ", "-")
    device = bench.options.device
    package = "stand-in" if device == "cpu" or name.startswith("0.5.9") else "real"
    try:
        found = ranks(label, PROGRAM, tree, [device, package], bench.scratch, SECONDS)
    except RuntimeError as error:
        return {"right": None, "reason": str(error)}
    return judge(found)


def judge(found: list[dict[str, Any]]) -> Record:
    """Return which cases were right on every rank, and whether those in place were.

    A case of a rank has its sum and torch.distributed's, or an error.
    """
    cases = {}
    for case in found[0]["cases"]:
        told = [one["cases"][case] for one in found]
        cases[case] = {"right": all(one.get("equal", False) for one in told), "ranks": told}
    wrong = [name for name, case in cases.items() if not case["right"]]
    facts = {key: value for key, value in found[0].items() if key != "cases"}
    in_place = [name for name in wrong if name.endswith("in place")]
    return {"right": not in_place, "wrong": wrong, "cases": cases} | facts


def line(record: Record) -> str:
    """Return what was found in one line."""
    said = []
    for name, found in record.get("engines", {}).items():
        wrong = ", ".join(found.get("wrong", []))
        verdict = {True: "right", False: f"wrong ({wrong})", None: "not run"}[found["right"]]
        said.append(f"{name} {verdict}")
    return "; ".join(said)
