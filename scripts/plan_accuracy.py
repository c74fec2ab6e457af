"""Write how right `plan` is into docs/plan.md, from published tables.

`python -m scripts.plan_accuracy DIRECTORY` takes speculation_cells.csv and specbundle.csv from there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from scripts.fit_speculation import Example, examples, fit
from sglang_bw.plan.replay.forms import read
from sglang_bw.plan.replay.result import found
from sglang_bw.plan.speculation.nearest import Curves, Host
from sglang_bw.plan.speculation.tables import Parameters, parameters

PAGE = Path(__file__).resolve().parent.parent / "docs" / "plan.md"
_MARK = "accuracy of speculation, written by scripts/plan_accuracy.py"


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
    """Yield every division of the sources into two halves (of an odd number: both roundings).

    Nothing of a tested source is known while it is predicted but its own plain decode points: the curves that fill
    gaps come from the trained sources, and so do all parameters.
    """
    sources = sorted({row["source"] for row in rows})
    own = {source: [row for row in rows if row["source"] == source] for source in sources}
    for size in sorted({len(sources) // 2, (len(sources) + 1) // 2}):
        for trained in combinations(sources, size):
            train = [row for source in trained for row in own[source]]
            known = _curves(train)
            tested = [cell for source in sources if source not in trained for cell in examples(own[source], known)]
            yield Half(trained, fit(examples(train, {}), parameters()), tuple(tested))


def _curves(rows: Sequence[dict[str, str]]) -> Curves:
    curves: dict[Host, dict[tuple[int, int], float]] = {}
    for example in examples(rows, {}):
        cell = example.cell
        curves.setdefault(cell.host, {})[cell.context, cell.concurrency] = cell.seconds
    return curves


def shares(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the shares of losses found, of wins found, and of decided rows that "it always pays" has right."""
    counts = found(pairs)
    return (
        counts["losses_found"] / max(counts["losses"], 1),
        counts["wins_found"] / max(counts["wins"], 1),
        counts["always_pays"],
    )


def main(directory: Path) -> None:
    cells = read(directory / "speculation_cells.csv").rows
    tested = [pair for half in halves(cells) for pair in half.pairs()]
    losses, wins, always = shares(tested)
    print(f"halves: losses {losses:.3f} wins {wins:.3f} always pays {always:.3f}")
    for half in halves(cells):
        print([s[-14:] for s in half.trained], [round(x, 3) for x in shares(half.pairs())])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
