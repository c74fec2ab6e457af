"""Runs every patch test of a base on the stock and on the patched engine and tells what came out.

``python -m tests.patches.series_run`` prints the table (patch, stock, patched); exit code 1 when anything is wrong.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from sglang_bw.fork.mail import read_patch
from sglang_bw.fork.patchtests import PatchRun, run_patches
from sglang_bw.fork.series import Series, bases
from tests.conftest import CHECKOUT, PATCHES, engine_trees_of


def run_series(base: str) -> tuple[list[PatchRun], str]:
    """Run all patch tests of ``base`` and return one row a patch and the output of failing runs."""
    trees = engine_trees_of(base)
    series = Series.load(PATCHES, base)
    patches = [read_patch(path) for path in series.files]
    return run_patches(CHECKOUT, base, series.folder, patches, trees.stock, trees.patched)


def main() -> int:
    """Print the table."""
    console = Console()
    table = Table("base", "patch", "stock", "patched", "problems")
    failed = False
    for base in bases(PATCHES):
        rows, output = run_series(base)
        failed = failed or bool(output) or any(row.problems for row in rows)
        for row in rows:
            stock, patched = f"{row.red_on_stock} red as declared", f"{row.green_on_patched} green"
            table.add_row(row.base, row.patch, stock, patched, "\n".join(row.problems))
        if output:
            console.print(output, markup=False)
    console.print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
