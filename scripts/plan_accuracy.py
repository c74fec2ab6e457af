"""Write how right `plan` is into docs/plan.md, from published tables.

`python -m scripts.plan_accuracy DIRECTORY` takes speculation_cells.csv, specbundle.csv and, when they are there,
memory_points.csv and memory_logs.csv.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from scripts.fit_speculation import Example, held_out, left_out_errors
from sglang_bw.plan.replay import bundle, replay
from sglang_bw.plan.replay.forms import read
from sglang_bw.plan.replay.result import found, spread
from sglang_bw.plan.speculation.tables import Parameters

PAGE = Path(__file__).resolve().parent.parent / "docs" / "plan.md"
_MARK = "accuracy, written by scripts/plan_accuracy.py"


@dataclass(frozen=True)
class Half:
    """One division of the sources: fitted on ``trained``, tested on the rest."""

    trained: tuple[str, ...]
    fitted: Parameters
    tested: tuple[Example, ...]

    def pairs(self) -> list[tuple[float, float]]:
        """Return (predicted, observed) speedups of the sources that were not trained on."""
        return [(cell.predicted(self.fitted), cell.speedup) for cell in self.tested]


def halves(rows: Sequence[dict[str, str]]) -> Iterator[Half]:
    """Yield every division of the sources into two halves (of an odd number: both roundings)."""
    sources = sorted({row["source"] for row in rows})
    for size in sorted({len(sources) // 2, (len(sources) + 1) // 2}):
        for trained in combinations(sources, size):
            fitted, tested = held_out(rows, trained)
            yield Half(trained, fitted, tuple(tested))


def shares(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the shares of losses found, of wins found, and of decided rows that "it always pays" has right."""
    counts = found(pairs)
    return (
        counts["losses_found"] / max(counts["losses"], 1),
        counts["wins_found"] / max(counts["wins"], 1),
        counts["always_pays"],
    )


def page(text: str, directory: Path) -> str:
    """Return docs/plan.md with its table brought up to date from the CSV files of ``directory``."""
    begin, end = f"<!-- {_MARK} -->\n", "<!-- end -->"
    return re.sub(
        f"(?<={re.escape(begin)}).*?(?={end})", lambda _: "\n".join(_table(directory)) + "\n", text, flags=re.DOTALL
    )


def _table(directory: Path) -> Iterator[str]:
    yield '| table | how | rows | median error | 90th percentile | losses found | wins found | "it always pays" |'
    yield "|---|---|---|---|---|---|---|---|"
    yield from _cells(directory / "speculation_cells.csv")
    yield from _bundle(directory / "specbundle.csv")
    for name in ("memory_points", "memory_logs"):
        if (path := directory / f"{name}.csv").exists():
            summary = replay(path).summary()
            yield _line(
                name, "KV tokens, given the memory free before and after the load", summary["compared"], summary
            )


def _cells(path: Path) -> Iterator[str]:
    rows = read(path).rows
    parts = list(halves(rows))
    pairs = [pair for half in parts for pair in half.pairs()]
    sources = len({row["source"] for row in rows})
    how = f"all {len(parts)} ways to fit on half of the {sources} sources and test on the rest"
    yield _line("speculation_cells", how, len(pairs), {**_errors(pairs), **found(pairs)})
    yield _line("speculation_cells", "shipped parameters (fitted on these rows)", len(rows), replay(path).summary())


def _bundle(path: Path) -> Iterator[str]:
    errors = left_out_errors(bundle.shipped())
    pairs = [(math.exp(error), 1.0) for error in errors]
    how = "leave one data set out: R from the others, tau as measured"
    yield _line("specbundle", how, len(pairs), _errors(pairs))
    summary = replay(path).summary()
    yield _line("specbundle", "as `--replay` does: tau of the row not read either", summary["compared"], summary)


def _errors(pairs: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    return spread([abs(predicted / observed - 1) for predicted, observed in pairs])


def _line(name: str, how: str, rows: int, summary: dict[str, Any]) -> str:
    shown = [f"{summary['median']:.1%}", f"{summary['p90']:.1%}", "", "", ""]
    if summary.get("losses") and name != "specbundle":
        losses, wins = summary["losses_found"] / summary["losses"], summary["wins_found"] / summary["wins"]
        shown[2:] = [f"{losses:.1%}", f"{wins:.1%}", f"{summary['always_pays']:.1%} right, no loss found"]
    return f"| {name} | {how} | {rows:,} | {' | '.join(shown)} |"


def main(directory: Path) -> None:
    text = page(PAGE.read_text(encoding="utf-8"), directory)
    PAGE.write_text(text, encoding="utf-8")
    print(text.split(f"<!-- {_MARK} -->\n")[1].split("<!-- end -->")[0], end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
