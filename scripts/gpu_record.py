"""Measure the series on one GPU: patched against stock, and the bundled pair with CUDA graphs, chain, tree and plain.

    python scripts/gpu_record.py --stock DIRECTORY --patched DIRECTORY --out record.json [--parts speed pair]

Both directories are unpacked wheels (`sglang/` and its `.dist-info`); the interpreter's environment holds what the
engine needs on CUDA. The servers of a part share the one GPU; while one is measured the others are idle.

- speed: stock and patched with the same flags, on random weights in the shape of an 8B Llama with a one-layer EAGLE-3
  draft and a simulated accept length. Short blocks alternate (A B B A ...); a ratio comes from each pair of neighbours,
  the interval from Student's t over their logarithms.
- pair: `sglang-bw serve tiny` as it is, with a tree of eight tokens, and without speculation, in the dtype of the
  recipe. Greedy tokens are compared; at each first difference the gap between the two tokens' logits is given in units
  of bf16's last place at the size of the larger one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from record.pair import pair
from record.servers import SHAPES, TREE, Record, Server, speed_flags, start_engine, start_serve, wait_all
from record.speed import speed
from rich.console import Console
from rich.table import Table

PACKAGES = ["torch", "triton", "nvidia-nccl-cu13", "sglang-kernel", "transformers", "numpy", "nvidia-cutlass-dsl"]
console = Console(highlight=False, width=140)


def main() -> int:
    """Run the parts one after another; one that fails costs no other."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scratch = Path(tempfile.mkdtemp(prefix="gpu-record-", dir=options.scratch))
    record: Record = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": sys.argv, **machine()}
    for name, tree in (("stock", options.stock), ("patched", options.patched)):
        record.setdefault("engines", {})[name] = next(tree.glob("sglang-*.dist-info")).name.removesuffix(".dist-info")
    parts: dict[str, Callable[[argparse.Namespace, Path, dict[str, Server]], Record]] = {
        "speed": run_speed,
        "pair": run_pair,
    }
    for name in options.parts:
        servers: dict[str, Server] = {}
        try:
            record[name] = parts[name](options, scratch, servers)
        except Exception:
            record.setdefault("failed", []).append(traceback.format_exc())
            console.print(traceback.format_exc(), markup=False)
        finally:
            for server in servers.values():
                server.process.terminate()
            for server in servers.values():
                server.stop()
            record.setdefault("servers", {}).update({key: server.told() for key, server in servers.items()})
            options.out.write_text(json.dumps(record, indent=1) + "\n")
    report(record)
    return 1 if "failed" in record else 0


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", type=_folder, required=True, help="unpacked stock wheel")
    parser.add_argument("--patched", type=_folder, required=True, help="unpacked patched wheel")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--parts", nargs="+", choices=["speed", "pair"], default=["speed", "pair"])
    parser.add_argument("--scratch", type=Path, help="where a folder for logs is made (default: the system's)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal of this script")
    parser.add_argument("--shape", choices=list(SHAPES), default="8b", help="of the random target")
    parser.add_argument("--pairs", type=int, default=36, help="pairs of blocks at each batch size")
    parser.add_argument("--tokens", type=int, default=512, help="output tokens of a request of the speed part")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--start-limit", type=float, default=240, metavar="SECONDS", help="wait so long for servers")
    return parser.parse_args()


def _folder(text: str) -> Path:
    path = Path(text).resolve()
    if not (path / "sglang").is_dir():
        raise argparse.ArgumentTypeError(f"no sglang/ in {path}")
    return path


def machine() -> Record:
    """Return GPU, driver and versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpus: list[str] = []
    with contextlib.suppress(OSError):
        gpus = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().splitlines()
    return {"gpus": gpus, "python": sys.version.split()[0], "versions": dict(versions())}


def versions() -> Iterator[tuple[str, str]]:
    """Yield the packages that are there."""
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def run_speed(options: argparse.Namespace, scratch: Path, servers: dict[str, Server]) -> Record:
    """Compare the two engines at each batch size; servers go into ``servers``, for the caller to stop."""
    flags = speed_flags(scratch, options.device, options.shape)
    for name, tree in (("stock", options.stock), ("patched", options.patched)):
        servers[name] = start_engine(name, tree, flags, scratch)
    wait_all(list(servers.values()), options.start_limit)
    result: Record = {"flags": flags, "tokens": options.tokens, "batches": {}}
    vocabulary = SHAPES[options.shape]["vocab"]
    for batch in options.batches:
        found = speed(**servers, batch=batch, pairs=options.pairs, tokens=options.tokens, vocabulary=vocabulary)
        result["batches"][str(batch)] = found
        console.print(f"batch {batch}: {found['ratio']} {found['interval']}")
    return result


def run_pair(options: argparse.Namespace, scratch: Path, servers: dict[str, Server]) -> Record:
    """Compare the bundled pair's tokens."""
    common = ["--engine-tree", str(options.patched), "--device", options.device]
    for name, own, engine_flags in (("plain", ["--no-spec"], []), ("chain", [], []), ("tree", [], TREE)):
        servers[name] = start_serve(name, [*common, *own], engine_flags, scratch)
    wait_all(list(servers.values()), options.start_limit)
    return pair(list(servers.values()))


def report(record: Record) -> None:
    """Print the short tables."""
    console.print(record["gpus"], record["versions"], record["engines"])
    table = Table("batch", "stock tok/s", "patched tok/s", "ratio", "95 % interval", "accept length", box=None)
    for batch, row in record.get("speed", {}).get("batches", {}).items():
        interval = "{} to {}".format(*row["interval"])
        cells = (row["stock"], row["patched"], row["ratio"], interval, row["accept_length"])
        table.add_row(batch, *map(str, cells))
    console.print(table)
    table = Table("pair", "tok/s", "accept length", "prompts that differ", "gaps in ulp (engine, fp32)", box=None)
    for name, row in record.get("pair", {}).items():
        gaps = [(one.get("engine_ulp"), one["fp32_ulp"]) for one in row["first_differences"]]
        table.add_row(name, str(row["tokens_per_second"]), str(row["accept_length"]), str(len(gaps)), str(gaps))
    console.print(table)
    for name, row in record["servers"].items():
        console.print(f"{name}: ready {row['ready_s']} s, decode batches by graph: {row['decode_batches_by_graph']}")


if __name__ == "__main__":
    sys.exit(main())
