"""All-reduces of the engine at a recipe's sizes, by `sglang-bw probe allreduce`; and why PCIe-IPC stays off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from record.servers import Record

from sglang_bw.host import probes

from .bench import Bench, ranks

# Not nccl-symm-mem: it turns NVLink multicast on. Not torch-symm-mem without the switch: it needs multicast.
WAYS = ("nccl", "torch-symm-mem-two-shot", "pcie-ipc", "nccl-ll", "nccl-ll128", "nccl-simple", "custom")
LINKS = Path(__file__).parent / "links_rank.py"


def run(bench: Bench) -> None:
    """Probe each hidden size, and ask the engine about PCIe-IPC on these boards."""
    options = bench.options
    bench.record["sizes"] = {}
    bench.record["pcie_ipc"] = _links(bench)
    bench.keep()
    for hidden in options.hidden:
        _probe(bench, hidden)
    if bad := [name for name, found in bench.record["sizes"].items() if not found["latencies"]]:
        raise RuntimeError(f"nothing was measured at hidden {', '.join(bad)}")


def command(hidden: int, out: Path, device: str, tree: Path, rows: str, repetitions: int, ways: list[str]) -> list[str]:
    """Return the probe's command line."""
    chosen = [word for way in ways for word in ("--backend", way)] if device == "cuda" else []
    return [
        *(sys.executable, "-m", "sglang_bw", "probe", "allreduce", "--hidden", str(hidden), "--gpus", "2"),
        *("--rows", rows, "--repetitions", str(repetitions), "--device", device, "--engine-tree", str(tree)),
        *("--timeout", "100", "--out", str(out), "--json", *chosen),
    ]


def _probe(bench: Bench, hidden: int) -> None:
    options = bench.options
    out, log = bench.scratch / f"allreduce-{hidden}.json", bench.scratch / f"allreduce-{hidden}.log"
    words = command(hidden, out, options.device, options.patched, options.rows, options.repetitions, options.ways)
    code = None
    try:
        with log.open("w") as file:
            code = subprocess.run(
                words, stdout=file, stderr=subprocess.STDOUT, check=False, env=dict(os.environ)
            ).returncode
        if not _stored(out):
            raise RuntimeError(f"the probe ended with {code}: {log.read_text(errors='replace')[-1500:]}")
    finally:  # the probe keeps every size that it has measured, and this part may be ended meanwhile
        if file := _stored(out):
            found: Record = json.loads(file.read_text())
            kept = {
                key: found[key] for key in ("latencies", "failures", "versions", "complete", "hidden", "gpus", "taken")
            }
            bench.record["sizes"][str(hidden)] = {"command": words, "exit_code": code} | kept
            bench.keep()


def _stored(out: Path) -> Path | None:
    """Return the file of a probe: one that is not complete is beside its place."""
    return next((path for path in (probes.partial(out), out) if path.exists()), None)


def _links(bench: Bench) -> Record:
    """Return what the engine says of PCIe-IPC on these boards, and what its self-check says."""
    if bench.options.device == "cpu":
        return {"not asked": "no GPU"}
    try:
        return ranks("links", LINKS, bench.options.patched, [], bench.scratch, 120)[0]
    except RuntimeError as error:
        return {"failed": str(error)}


def line(record: Record) -> str:
    """Return what was found in one line."""
    said = []
    for hidden, found in record.get("sizes", {}).items():
        checked = {row["backend"] for row in found["latencies"]}
        bad = [f"{row['backend']} {row['kind']}" for row in found["failures"]]
        said.append(f"hidden {hidden}: equal {', '.join(sorted(checked))}" + (f"; {', '.join(bad)}" if bad else ""))
    links = record.get("pcie_ipc", {})
    if reason := links.get("refusal") or links.get("failed"):
        said.append(f"PCIe-IPC by itself: {reason}; its self-check: {links.get('self_check')}")
    return " | ".join(said)
