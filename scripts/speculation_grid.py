"""Measure what to speculate with: accept length x batch, four servers resident on one GPU and driven in turn.

    python scripts/speculation_grid.py --engine DIRECTORY --out record.json

The arms: ``off`` (a server without speculation), ``fixed`` (3 steps), ``stock`` (upstream's --speculative-adaptive with
its default configuration) and ``goodput`` (--speculative-adaptive-policy goodput). Random weights in the shape of an 8B
Llama with a matching one-layer draft; the accept length is simulated and set while the servers run. At each point an
adaptive arm runs blocks that are not counted (the others one, at a new batch size only), then every arm one block a
round, the order reversed in every other round; arms that are far behind drop out. A point's number is goodput over the
best other arm, the median of ratios within a round; it is measured until its 95 % interval is narrow enough.

Every server captures graphs of the sitting's batches only. Two sittings may run side by side, each on a GPU of its own:

    CUDA_VISIBLE_DEVICES=0 python scripts/speculation_grid.py --batches 1 4 --out a.json ... &
    CUDA_VISIBLE_DEVICES=1 python scripts/speculation_grid.py --batches 16 64 --out b.json ...

``--explore`` instead forces each step count of the goodput server and measures it against ``off``.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from gpu_record import _folder, machine
from record import rounds
from record.servers import CHAIN, SHAPES, Record, Server, keep_apart, speed_flags, start_engine, wait_all
from record.speed import PROMPT_TOKENS, block
from rich.console import Console
from rich.table import Table

INJECT = Path(__file__).resolve().parent / "record" / "inject"
SPECULATIVE = ("speculative-draft-model-path", "speculative-algorithm", *CHAIN)
ADAPTIVE: Record = {"speculative-adaptive": None}
ARMS: dict[str, Record] = {
    "off": {},
    "fixed": {},
    "stock": ADAPTIVE,
    "goodput": ADAPTIVE | {"speculative-adaptive-policy": "goodput"},
}
SETTLE_S = 0.1
ROOM_TOKENS = 64
"""What an answer may take beyond its tokens: drafts of the last rounds, and a page."""
console = Console(highlight=False, width=150)


def main() -> int:
    """Run; what was measured is written after every point."""
    options = parse()
    scratch = Path(tempfile.mkdtemp(prefix="speculation-grid-"))
    record: Record = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": sys.argv, **machine()}
    record["engine"] = next(options.engine.glob("sglang-*.dist-info")).name.removesuffix(".dist-info")
    names = ["off", "goodput"] if options.explore else options.arms
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    grid = Grid(options, scratch)
    in_time = True
    try:
        grid.start(names)
        wait_all(list(grid.servers.values()), options.start_limit)
        console.print(f"{len(names)} servers ready after {time.monotonic() - began:.0f} s")
        if options.keep_apart:
            record["cores"] = keep_apart(list(grid.servers.values()))
        record |= {"flags": grid.flags, "points": {}, "blocks": grid.blocks}
        measure = grid.explore if options.explore else grid.point
        for length, batch in options.points:
            if not (in_time := time.monotonic() - began < options.limit):
                console.print("time is up: the other points are not measured")
                break
            record["points"][f"{length}x{batch}"] = measure(length, batch)
            options.out.write_text(json.dumps(record, indent=1) + "\n")
    finally:
        ended = {name for name, server in grid.servers.items() if server.process.poll() is not None}
        for server in grid.servers.values():
            server.process.terminate()
        for server in grid.servers.values():
            server.stop()
        record["servers"] = {name: told(server, died=name in ended) for name, server in grid.servers.items()}
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    report(record)
    return 0 if in_time else 1


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=_folder, required=True, help="unpacked patched wheel")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--explore", action="store_true", help="force the step counts of goodput instead")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal of this script")
    parser.add_argument("--shape", choices=list(SHAPES), default="8b", help="of the random target")
    parser.add_argument("--lengths", type=float, nargs="+", default=[4.0, 3.0, 2.0, 1.5, 1.0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--points", type=_point, nargs="+", metavar="LENGTHxBATCH", help="these instead, in this order")
    parser.add_argument(
        "--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="goodput and one more at least"
    )
    parser.add_argument("--adapt", type=int, default=1, metavar="BLOCKS", help="of goodput before a point (1)")
    parser.add_argument("--rounds", type=int, default=3, help="of all arms, at least (3)")
    parser.add_argument("--most", type=int, default=21, help="rounds of a point (21)")
    parser.add_argument("--within", type=float, default=0.02, help="half-width at which a point ends (0.02)")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of a request")
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 1, 3], help="what --explore forces")
    parser.add_argument("--start-limit", type=float, default=240, metavar="SECONDS")
    parser.add_argument("--limit", type=float, default=1e9, metavar="SECONDS", help="start no point after this")
    parser.add_argument("--keep-apart", action="store_true", help="each server on cores of its own once it is ready")
    parser.add_argument("--rounds-log", action="store_true", help="keep a line a decode round in the record's folder")
    options = parser.parse_args()
    options.points = options.points or [(length, batch) for batch in options.batches for length in options.lengths]
    return options


def _point(word: str) -> tuple[float, int]:
    length, _, batch = word.partition("x")
    return float(length), int(batch)


class Grid:
    """The servers and their control files."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options, self.scratch = options, scratch
        self.vocabulary = SHAPES[options.shape]["vocab"]
        batches = sorted({batch for _, batch in options.points})
        largest = batches[-1]
        self.flags = speed_flags(scratch, options.device, options.shape)
        # EAGLE would set 48. The engine admits a request only where its whole answer has room.
        self.flags |= {"max-running-requests": max(64, largest)}
        self.flags["max-total-tokens"] = max(32768, largest * (PROMPT_TOKENS + options.tokens + ROOM_TOKENS))
        if options.device == "cuda":
            # Graphs take most of a start: prefill is not what is measured, and no other batches are sent.
            self.flags |= {"cuda-graph-max-bs-decode": largest, "disable-prefill-cuda-graph": None}
            self.flags["cuda-graph-bs-decode"] = batches
        self.servers: dict[str, Server] = {}
        self.controls: dict[str, Path] = {}
        self.seed = 0
        self.warm: set[int] = set()
        self.blocks: list[Record] = []

    def start(self, names: list[str]) -> None:
        """Start the servers, one with the policy when the others are ready."""
        options, scratch = self.options, self.scratch
        for name in names:
            flags = {key: value for key, value in self.flags.items() if name != "off" or key not in SPECULATIVE}
            self.controls[name] = scratch / f"{name}.control"
            self.control(name, 3.0)
            environ = {"BW_CONTROL": str(self.controls[name]), "PYTHONPATH": f"{INJECT}:{options.engine}"}
            if options.rounds_log and name == "goodput":
                environ["BW_ROUNDS"] = str(options.out.with_suffix(f".{name}.rounds"))
            if name == "goodput":
                # It times its graphs at the start: nobody else may use the GPU then.
                wait_all(list(self.servers.values()), options.start_limit)
            self.servers[name] = start_engine(name, options.engine, flags | ARMS[name], scratch, environ)

    def control(self, name: str, length: float, steps: int = -1) -> None:
        """Set a server's simulated accept length, and its steps."""
        self.controls[name].write_text(json.dumps({"accept_length": length, "steps": steps}) + "\n")

    def run(self, name: str, batch: int) -> tuple[float, float]:
        """One block: output tokens per second, accept length."""
        self.seed += 1
        began = time.time()
        measured = block(self.servers[name], batch, self.options.tokens, self.vocabulary, self.seed)
        self.blocks.append({"arm": name, "batch": batch, "began": round(began, 3), "seconds": time.time() - began})
        return measured

    def point(self, length: float, batch: int) -> Record:
        """All arms at one accept length and batch."""
        for name in self.servers:
            self.control(name, length)
        time.sleep(SETTLE_S)
        for name in self.servers:
            adapts = {"goodput": self.options.adapt, "stock": 1}
            for _ in range(adapts.get(name, batch not in self.warm)):
                self.run(name, batch)
        self.warm.add(batch)
        options = self.options
        found = rounds.measure(
            lambda name: self.run(name, batch),
            list(self.servers),
            "goodput",
            least=options.rounds,
            most=options.most,
            within=options.within,
        )
        others = [name for name in self.servers if name in ("off", "fixed")]
        result = rounds.judge(found, "goodput", options.within)
        result["stock_ratio"] = rounds.ratio(found, "stock", others) if "stock" in self.servers and others else None
        speeds = ", ".join(f"{name} {arm['tokens_per_second']}" for name, arm in result["arms"].items())
        console.print(
            f"{length} x {batch}: {speeds}; goodput/best {result['ratio']} {result['interval']} ({result['pooled']} "
            f"of all time) in {len(found)} rounds, {result['verdict']}; stock/best {result['stock_ratio']}"
        )
        return result

    def explore(self, length: float, batch: int) -> Record:
        """Every step count by force, and the policy by itself, against off."""
        names = ["off", *(f"goodput {steps}" for steps in [*self.options.steps, -1])]
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for number in range(self.options.rounds + 1):
            for name in names:
                server, _, steps = name.partition(" ")
                if steps:
                    self.control(server, length, int(steps))
                    time.sleep(SETTLE_S)
                measured = self.run(server, batch)
                if number:
                    found[name].append(measured)
        off = statistics.median(speed for speed, _ in found["off"])
        result = {
            name: {
                "blocks": [round(speed, 1) for speed, _ in rows],
                "accept_length": round(statistics.fmean(length for _, length in rows), 2),
                "over_off": round(statistics.median(speed for speed, _ in rows) / off, 4),
            }
            for name, rows in found.items()
        }
        cells = ", ".join(f"{name} {row['over_off']} ({row['accept_length']})" for name, row in result.items())
        console.print(f"{length} x {batch}: off {off:.1f} tok/s; {cells}")
        return result


def told(server: Server, *, died: bool) -> Record:
    """Return what a server said about its start and its policy, and its last words where it ended by itself."""
    words = ("Goodput policy", "Timed ", "Built adaptive", "Adaptive spec params")
    log = server.log.read_text(errors="replace").splitlines()
    lines = [line for line in log if any(word in line for word in words)]
    found = server.told() | {"policy": [line[:300] for line in lines[:60]], "policy_lines": len(lines)}
    return found | {"end_of_log": log[-40:]} if died or not server.ready_s else found


def report(record: Record) -> None:
    """Print the table of a grid."""
    points = record["points"]
    if not points or "arms" not in next(iter(points.values())):
        return
    arms = list(next(iter(points.values()))["arms"])
    heads = ("goodput/best", "95 % interval", "of all time", "rounds", "verdict", "stock/best of off, fixed")
    table = Table("accept length x batch", *arms, "best", *heads, box=None)
    for name, row in points.items():
        speeds = [str(row["arms"][arm]["tokens_per_second"]) for arm in arms]
        number = len(row["arms"]["goodput"]["blocks"])
        said = (row["best"], row["ratio"], row["interval"], row["pooled"], number, row["verdict"], row["stock_ratio"])
        table.add_row(name, *speeds, *map(str, said))
    console.print(table)
    stock = [row["stock_ratio"] for row in points.values() if row["stock_ratio"] is not None]
    decided = [row["ratio"] for row in points.values() if row["verdict"] != "undecided"]
    console.print(
        f"{len(decided)} of {len(points)} points decided; minimum of those: goodput {min(decided, default='none')}; "
        f"minimum of all: stock {min(stock, default='not run')}"
    )


if __name__ == "__main__":
    sys.exit(main())
