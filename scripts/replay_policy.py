"""Drive the engine's own speculation policies over measured costs, without an engine or a GPU.

`python scripts/replay_policy.py FILE.csv` takes any file in the form of speculation_cells.csv. Every row gives the cost
of a plain decode step and of a round, and an accept length; on each, the goodput policy runs for 4,000 tokens a request
beside upstream's --speculative-adaptive, a fixed number of steps, and none. Then the synthetic traces, with the file's
steepest row of costs among them. Exit code 69 when a bar is missed: 0.97 of the best fixed choice, 3 % of regret.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import track

from sglang_bw.errors import BwError, PolicyError
from sglang_bw.experiment.policy import engine, measured, traces
from sglang_bw.experiment.policy.compare import LEAST_SHARE, MOST_REGRET, Comparison, compare
from sglang_bw.experiment.policy.trace import Trace
from sglang_bw.launch import engine as engines

console, err = Console(soft_wrap=True, highlight=False), Console(stderr=True, highlight=False)
_SHOWN = 10


def main() -> int:
    """Replay, print, and say whether every bar is held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a table with a row for each measured cell")
    parser.add_argument(
        "--tree", type=Path, help="folder with sglang/ of a patched engine; the installed one if left out"
    )
    parser.add_argument("--tokens", type=int, default=4000, help="tokens a request on each row (4000)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each policy on each row (1; traces get 3)")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    arguments = parser.parse_args()
    try:
        return _replay(arguments)
    except BwError as error:
        err.print(f"error: {error.message}", markup=False)
        if error.hint:
            err.print(f"hint: {error.hint}", markup=False)
        return error.exit_code


def _replay(arguments: argparse.Namespace) -> int:
    rows, left = measured.rows(arguments.file)
    policies = engine.load(arguments.tree or _installed())
    cliff = _cliff(rows)
    if not cliff:
        err.print("No host of the table was measured at four batches: there is no trace with a cost cliff.")
    synthetic = traces.synthetic(cliff)
    jobs: list[tuple[Trace, int]] = [(row.trace(arguments.tokens), arguments.seeds) for row in rows]
    jobs += [(trace, max(3, arguments.seeds)) for trace in synthetic]
    shown = track(jobs, description="replaying", console=err, transient=True, disable=not err.is_terminal)
    found = [compare(policies, trace, seeds) for trace, seeds in shown]
    cells, made = found[: len(rows)], found[len(rows) :]
    if arguments.json:
        report = {
            "rows": [row.as_json() for row in cells],
            "left_out": left,
            "traces": [row.as_json() for row in made],
            "misses": list(_misses(cells, made)),
        }
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    else:
        _print(rows, left, cells, made)
    misses = list(_misses(cells, made))
    if misses:
        first = "; ".join(misses[:3])
        raise PolicyError(f"{len(misses)} bars are missed: {first}", hint="--json has every trace and row.")
    return 0


def _cliff(rows: list[measured.Row]) -> dict[tuple[int, int], float]:
    """Return the steepest costs; of GLM if there are any: from 16 to 32 verified rows it changes its kernels."""
    glm = [row for row in rows if "GLM" in row.host[1]]
    return measured.cliff(glm) or measured.cliff(rows)


def _installed() -> Path:
    found = engines.find().installation
    if found.location is None:
        raise PolicyError("no engine is installed", hint="`sglang-bw install`, or --tree DIR.")
    return found.location


def _misses(cells: list[Comparison], made: list[Comparison]) -> Iterator[str]:
    # A row lasts 4,000 tokens, its beginning included, and is held to the best fixed choice only.
    yield from (
        f"{row.trace.name}: {row.share:.3f} of the best fixed choice" for row in cells if row.share < LEAST_SHARE
    )
    yield from (row.misses for row in made if row.misses)


def _print(rows: list[measured.Row], left: dict[int, str], cells: list[Comparison], made: list[Comparison]) -> None:
    assumed = sum(row.assumed for row in rows)
    console.print(
        f"{len(rows)} rows, {assumed} with an assumed accept length of {measured.ASSUMED_LENGTH}", markup=False
    )
    for number, reason in left.items():
        console.print(f"  row {number} left out: {reason}", markup=False)
    worst = sorted(zip(cells, rows, strict=True), key=lambda pair: pair[0].share)
    console.print(
        f"\n{'row':>5} {'batch':>5} {'R':>6} {'length':>6} {'best':>5} {'ours':>6} {'stock':>6}   worst {_SHOWN}"
    )
    for cell, row in worst[:_SHOWN]:
        console.print(
            f"{row.number:5} {row.batch:5} {row.round / row.plain:6.2f} {row.length:6.2f} {cell.best_fixed:5} "
            f"{cell.share:6.3f} {cell.stock_share:6.3f}"
        )
    ours, stock = min(cell.share for cell in cells), min(cell.stock_share for cell in cells)
    console.print(f"least of the best fixed choice: ours {ours:.3f}, stock {stock:.3f} (bar {LEAST_SHARE})")
    head = f"{'trace':44} {'ours':>7} {'held':>7} {'stock':>7} {'settled':>8} {'switches':>8}"
    console.print(f"\n{head}   regret, bar {MOST_REGRET:.0%} of held")
    for arm in made:
        settled = max(played.settled for played in arm.ours)
        switches = max(len(played.switches) for played in arm.ours)
        console.print(
            f"{arm.trace.name:44} {arm.regret:7.1%} {arm.held:7.1%} {arm.stock_regret:7.1%} {settled:8} {switches:8}",
            markup=False,
        )


if __name__ == "__main__":
    sys.exit(main())
