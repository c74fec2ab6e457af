"""Compare a server with its twin, again and again: nothing is to be found, so nearly every interval has to contain 1.

    python scripts/null_experiments.py --out DIRECTORY [--experiments 20] [--seconds 230] [--url A --url B]

Starts `sglang-bw serve tiny` twice, or takes two servers that run, and gives them to `sglang-bw ab --url A --url B`.
Every experiment leaves its record in the directory; one that is there is not made again, so a run that was ended, or
that stopped after `--seconds`, goes on where it was. The bar: 17 of 20 intervals contain 1, and their median half-width
is at most 5 %. Exit code 69 when all are made and the bar is missed. Servers that were started end with this program,
however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from record.servers import start_serve, wait_all
from rich.console import Console
from rich.table import Table

from sglang_bw.errors import UnreadableRunError
from sglang_bw.ledger.record import Ratio
from sglang_bw.ledger.runfile import read

LEAST_SHARE = 17 / 20
MOST_HALF_WIDTH = 0.05
MISSED = 69
_START_S = 300.0
_INVALID = 74
console, err = Console(width=120, highlight=False), Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Null:
    """One experiment.

    :ivar ratio: speed of the twin over the server's.
    :ivar valid: false when a guard spoke, a drift of the machine for one; it counts all the same.
    """

    number: int
    ratio: float
    low: float
    high: float
    half_width: float
    rounds: int
    valid: bool

    @property
    def contains_one(self) -> bool:
        """Tell whether it finds nothing, which is right."""
        return self.low <= 1 <= self.high


def main() -> int:
    """Make what is missing, then judge."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out.mkdir(parents=True, exist_ok=True)
    records = [options.out / f"{number:02}.jsonl" for number in range(1, options.experiments + 1)]
    missing = [record for record in records if null(record) is None]
    if missing:
        with servers(options) as urls:
            make(missing, urls, options)
    found = [one for record in records if (one := null(record))]
    verdict = judge(found, len(records))
    report(found, verdict, as_json=options.json)
    return 0 if verdict["held"] is not False else MISSED


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the records")
    parser.add_argument("--experiments", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after so many")
    parser.add_argument("--url", action="append", help="twice: servers that run already")
    parser.add_argument("--engine-tree", help="an unpacked engine in place of the installed one")
    parser.add_argument("--load", default="--count 8 --max-tokens 48 --within 4% --budget 27s", help="options of `ab`")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    options = parser.parse_args()
    if options.url and len(options.url) != 2:
        parser.error("--url is given twice")
    return options


@contextlib.contextmanager
def servers(options: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the addresses of two servers with the same configuration; those started here are stopped."""
    if options.url:
        yield options.url
        return
    tree = ["--engine-tree", options.engine_tree] if options.engine_tree else []
    with tempfile.TemporaryDirectory(prefix="null-experiments-") as scratch:
        started = [start_serve(name, [*tree, "--device", "cpu"], [], Path(scratch)) for name in ("server", "twin")]
        try:
            with err.status("starting two servers"):
                wait_all(started, _START_S)
            yield [f"http://127.0.0.1:{server.port}" for server in started]
        finally:
            for server in started:
                server.stop()


def make(missing: list[Path], urls: list[str], options: argparse.Namespace) -> None:
    """Run experiments until all are there or the time is over."""
    began = time.monotonic()
    for record in missing:
        if time.monotonic() - began > options.seconds:
            err.print(f"stopped before {record.name}; the same command goes on", markup=False)
            return
        record.unlink(missing_ok=True)  # of a run that was ended from outside
        command = [sys.executable, "-m", "sglang_bw", "ab", *(word for url in urls for word in ("--url", url))]
        command += ["--prompts", "tiny", *options.load.split(), "--record", str(record)]
        # A ledger of its own: these runs are of no use in the user's.
        own = {**os.environ, "SGLANG_BW_LEDGER": str(options.out / "ledger.sqlite3")}
        done = subprocess.run(command, capture_output=True, text=True, env=own)
        one = null(record)
        if done.returncode not in (0, _INVALID) or one is None:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        said = f"{record.stem}: {one.ratio:.3f} [{one.low:.3f}, {one.high:.3f}], {one.rounds} rounds"
        err.print(f"{said}, {time.monotonic() - began:.0f} s", markup=False)


def null(record: Path) -> Null | None:
    """Read a record; ``None`` when it is not there, or not whole."""
    try:
        outcome = read(record).outcome
    except UnreadableRunError:
        return None
    if outcome is None or outcome.failure or not outcome.ratios:
        return None
    one: Ratio = outcome.ratios[0]
    return Null(int(record.stem), one.value, one.low, one.high, one.half_width, one.rounds, outcome.valid)


def judge(found: list[Null], wanted: int) -> dict[str, float | int | bool | None]:
    """Hold the experiments against the bar; ``held`` is ``None`` while some are missing."""
    hits = sum(one.contains_one for one in found)
    half = statistics.median(one.half_width for one in found) if found else float("nan")
    held = hits >= LEAST_SHARE * wanted and half <= MOST_HALF_WIDTH
    return {
        "experiments": len(found),
        "contain_one": hits,
        "median_half_width": half,
        "held": held if len(found) == wanted else None,
    }


def report(found: list[Null], verdict: dict[str, float | int | bool | None], *, as_json: bool) -> None:
    """Print the table and the verdict."""
    if as_json:
        print(json.dumps({"experiments": [asdict(one) for one in found], "verdict": verdict}, indent=1))
        return
    table = Table("experiment", "B / A", "95 % interval", "half-width", "rounds", "contains 1", "valid", box=None)
    for one in found:
        ends = f"{one.low:.3f} to {one.high:.3f}"
        words = ("yes" if flag else "NO" for flag in (one.contains_one, one.valid))
        table.add_row(str(one.number), f"{one.ratio:.3f}", ends, f"{one.half_width:.1%}", str(one.rounds), *words)
    console.print(table)
    held = {None: "not all are made", True: "the bar is held", False: "the bar is MISSED"}[verdict["held"]]  # type: ignore[index]
    hits, half = verdict["contain_one"], verdict["median_half_width"]
    console.print(f"{hits} of {len(found)} intervals contain 1, median half-width {half:.1%}: {held}")


if __name__ == "__main__":
    sys.exit(main())
