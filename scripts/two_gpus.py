"""Measure the series on two GPUs of one host: all-reduces, a lost sum, tensor and expert parallelism, the policy.

    python scripts/two_gpus.py --stock DIR --patched DIR --stock-old DIR --patched-old DIR --output record.json

The directories are unpacked wheels (`sglang/` and its `.dist-info`) of 0.5.23 and, the old ones, of 0.5.9; the
interpreter's environment holds what the engine needs on CUDA. Each part has a time limit and processes of its own: one
that fails or hangs is recorded with its reason, ended, and the next goes on. NVLink multicast is off throughout.

- allreduce: every way of `sglang-bw probe allreduce` that needs no multicast, sums compared inside and outside of CUDA
  graphs; and what the engine says of PCIe-IPC on these boards.
- faults: an in-place all-reduce by torch symmetric memory, on two real ranks, by 0.5.9 and 0.5.23, stock and patched.
- moe: expert parallelism of a tiny Kimi-K2.5 in bf16 and INT4 and of a tiny GLM-4.x, with EPLB and an
  EAGLE-3 draft.
- pair: the bundled pair, whose weights are real: greedy tokens of chain and tree against no speculation, and the draft
  after rounds without drafting.
- tp2: patched against stock, greedy tokens and tokens per second.
- policy: the goodput policy's grid, and the ranks' decisions compared, also with one rank slowed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import os
import shlex
import signal
import sys
import tarfile
import tempfile
import time
import traceback
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_record import _folder, machine
from ranks.allreduce import WAYS
from ranks.bench import WITHOUT_MULTICAST, Bench, environment, last_words, read_part
from ranks.control import Control, Group
from record.servers import SHAPES, Record
from rich.console import Console
from rich.table import Table

# Seconds that a part is expected to take on two H200 with the defaults, and after which it is ended.
EXPECTED = {"allreduce": 330, "faults": 40, "moe": 450, "pair": 120, "tp2": 230, "policy": 320}
LIMITS = {"allreduce": 420, "faults": 150, "moe": 720, "pair": 330, "tp2": 330, "policy": 480}
GROUPS = (
    Group(["allreduce"]),
    Group(["faults"], alone=False),
    Group(["pair"], alone=False),
    Group(["moe"], alone=False),
    Group(["tp2", "policy"]),
)
_LOG_TAIL = 200_000
console = Console(highlight=False, width=160)


def main() -> int:
    """Run the parts and print one table."""
    options = parse()
    os.environ.update(environment(options.device))
    if options.worker:
        return work(options)
    groups = [
        Group(parts, group.alone) for group in GROUPS if (parts := [p for p in group.parts if p in options.parts])
    ]
    if options.dry_run:
        return plan(options, groups)
    if options.device == "cuda" and (reason := multicast_cannot_be_off()):
        console.print(reason, style="red")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scratch = Path(tempfile.mkdtemp(prefix="two-gpus-", dir=options.scratch))
    record: Record = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": sys.argv, **machine()}
    record |= {"engines": engines(options), "environment": environment(options.device), "scratch": str(scratch)}
    console.print(f"parts: {', '.join(options.parts)}; logs and parts in {scratch}")

    def tell(part: str, found: Record) -> None:
        record[part] = found
        write(options.output, record)
        console.print(
            f"{part}: {found['state']} after {found['seconds']:.0f} s; {found.get('reason', said(part, found))}"
        )

    limits = {part: options.limits.get(part, LIMITS[part]) for part in LIMITS}
    control = Control(scratch, lambda parts: command(scratch, parts), limits, time.time() + options.limit, tell)
    try:
        control.run(groups)
    finally:
        for part in options.parts:
            if part not in record:  # this was interrupted
                record[part] = read_part(scratch, part) | {"state": "failed", "reason": "interrupted"}
        write(options.output, record)
        pack(scratch, options.output.with_suffix(".logs.tar.gz"))
    report(record, options.parts)
    return 0 if all(record[part]["state"] == "done" for part in options.parts) else 1


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--stock", type=_folder, required=True, help="unpacked stock wheel")
    add("--patched", type=_folder, required=True, help="unpacked patched wheel")
    add("--stock-old", type=_folder, help="unpacked stock 0.5.9, for the part faults")
    add("--patched-old", type=_folder, help="unpacked patched 0.5.9")
    add("--output", type=Path, required=True, help="JSON file to write; the logs go beside it")
    add("--parts", nargs="+", choices=list(LIMITS), default=list(LIMITS))
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal of this script")
    add("--scratch", type=Path, help="where a folder for logs and models is made (default: the system's)")
    add(
        "--limits", type=_limit, nargs="+", default={}, action=_Limits, metavar="PART=SECONDS", help="other time limits"
    )
    add("--limit", type=float, default=3600, metavar="SECONDS", help="of all parts together")
    add("--start-limit", type=float, default=240, metavar="SECONDS", help="wait so long for servers")
    add("--attention-backend", default="triton", help="of all servers on CUDA")
    add("--shape", choices=list(SHAPES), default="8b", help="of the random target of tp2 and policy")
    add("--tp", type=int, default=2, help="ranks of a server")
    add("--dry-run", action="store_true", help="print what would run and how long it takes, start nothing")
    add("--worker", type=Path, help=argparse.SUPPRESS)
    part = parser.add_argument_group("allreduce").add_argument
    part("--hidden", type=int, nargs="+", default=[7168, 4096])
    part("--rows", default="1,4,64,256")
    part("--repetitions", type=int, default=10_000, help="sums compared at each size, eagerly and again from a graph")
    part("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    part = parser.add_argument_group("tp2").add_argument
    part("--pairs", type=int, default=16, help="pairs of blocks at each batch size")
    part("--batches", type=int, nargs="+", default=[1, 8])
    part("--tokens", type=int, default=512, help="output tokens of a request")
    part("--prompts", type=int, default=8, help="compared for losslessness, also in moe")
    part("--answer", type=int, default=64, help="tokens of such an answer")
    part = parser.add_argument_group("moe").add_argument
    part("--models", nargs="+", choices=["bf16", "int4", "glm"], default=["bf16", "int4", "glm"])
    part(
        "--only", metavar="WORDS", help="the plain server and those whose name holds this, such as 'patched bf16 eplb'"
    )
    part("--iterations", type=int, default=40, help="forward passes between two rebalances")
    part = parser.add_argument_group("policy").add_argument
    part("--lengths", type=float, nargs="*", default=[3.0, 1.5], help="simulated; none: compare decisions only")
    part("--policy-batches", type=int, nargs="+", default=[1, 8, 32])
    part("--policy-tokens", type=int, default=256)
    part("--adapt", type=int, default=4, metavar="BLOCKS", help="of the policy before a point is measured")
    part("--rounds", type=int, default=3, help="of all arms at a point, at least")
    part("--most", type=int, default=15, help="rounds of a point")
    part("--within", type=float, default=0.02, help="half-width of its interval at which a point ends")
    part("--seconds", type=float, default=60, help="of the run whose decisions are compared; 0 and 0: no such run")
    part("--slow-seconds", type=float, default=30, help="of the run with one rank slowed")
    part("--slow-ms", type=float, default=2.0, help="how long that rank sleeps before each decode launch")
    return parser.parse_args(words)


def _limit(word: str) -> tuple[str, float]:
    part, _, seconds = word.partition("=")
    if part not in LIMITS:
        raise argparse.ArgumentTypeError(f"no part is called {part!r}")
    return part, float(seconds)


class _Limits(argparse.Action):
    def __call__(self, _parser: Any, namespace: argparse.Namespace, values: Any, _option: Any = None) -> None:
        setattr(namespace, self.dest, dict(values))


def command(scratch: Path, parts: Any) -> list[str]:
    """Return the command line of a process that runs some of the parts."""
    return [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--worker", str(scratch), "--parts", *parts]


def work(options: argparse.Namespace) -> int:
    """Run parts in this process, one after another."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    bench = Bench(options, options.worker)
    try:
        for name in options.parts:
            bench.begin(name)
            try:
                importlib.import_module(f"ranks.{name}").run(bench)
                bench.record["state"] = "done"
            except Exception as error:
                traceback.print_exc()
                logs = {key: last_words(server.log) for key, server in bench.servers.items()}
                bench.record |= {"state": "failed", "reason": f"{type(error).__name__}: {error}"[:2000], "logs": logs}
            bench.keep()
    finally:
        bench.stop()
    return 0


def plan(options: argparse.Namespace, groups: list[Group]) -> int:
    """Say what would run."""
    table = Table("process", "expected s", "limit s", "beside others", box=None)
    for group in groups:
        limits = [options.limits.get(part, LIMITS[part]) for part in group.parts]
        expected = sum(EXPECTED[part] for part in group.parts)
        table.add_row(", ".join(group.parts), str(expected), f"{sum(limits):.0f}", "no" if group.alone else "yes")
    console.print(table)
    console.print(shlex.join(command(Path("SCRATCH"), options.parts)), markup=False, soft_wrap=True)
    return 0


def multicast_cannot_be_off() -> str:
    """Return why NVLink multicast could be used all the same, or nothing: torch must know the variable."""
    spec = find_spec("torch")
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    assert WITHOUT_MULTICAST[name] == "1"
    libraries = sorted(Path(str(spec.origin)).parent.glob("lib/libtorch_cuda.so")) if spec else []
    for path in libraries:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data.find(name.encode()) >= 0:
                return ""
    return f"this torch does not know {name}: it could use NVLink multicast, so nothing was started"


def engines(options: argparse.Namespace) -> dict[str, str]:
    """Return the engines' versions."""
    trees = {name: getattr(options, name) for name in ("stock", "patched", "stock_old", "patched_old")}
    found = {name: next(tree.glob("sglang-*.dist-info"), None) for name, tree in trees.items() if tree}
    return {name: path.name.removesuffix(".dist-info") if path else "unknown" for name, path in found.items()}


def said(part: str, found: Record) -> str:
    """Return a part's line."""
    line: str = importlib.import_module(f"ranks.{part}").line(found)
    return line


def write(path: Path, record: Record) -> None:
    """Write the record."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(record, indent=1) + "\n")
    new.replace(path)


def pack(scratch: Path, path: Path) -> None:
    """Keep the end of every log."""
    with tarfile.open(path, "w:gz") as archive:
        for log in sorted(scratch.glob("*.log")):
            short = scratch / f"{log.name}.tail"
            short.write_bytes(log.read_bytes()[-_LOG_TAIL:])
            archive.add(short, log.name)


def report(record: Record, parts: list[str]) -> None:
    """Print the table."""
    console.print(
        f"{record['date']}; {', '.join(record['gpus']) or 'no GPU'}; {record['versions']}; {record['engines']}"
    )
    table = Table("part", "state", "s", "what was found", box=None)
    for part in parts:
        found = record[part]
        text = "; ".join(filter(None, (found.get("reason", "")[:300], said(part, found))))
        table.add_row(part, found["state"], f"{found.get('seconds', 0):.0f}", text)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
