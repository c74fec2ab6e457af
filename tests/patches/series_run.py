"""Runs every patch test of a base on the stock and on the patched engine and tells what came out.

``python -m tests.patches.series_run`` prints the table (patch, stock, patched); exit code 1 when anything is wrong.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_bw.fork.mail import read_patch
from sglang_bw.fork.series import Series, bases
from tests.conftest import CHECKOUT, PATCHES, engine_environment, engine_trees_of


@dataclass(frozen=True)
class PatchRun:
    """One patch on both engines: counts of tests, and what went wrong."""

    base: str
    patch: str
    red_on_stock: int
    green_on_patched: int
    problems: tuple[str, ...]


def run_series(base: str) -> tuple[list[PatchRun], str]:
    """Run all patch tests of ``base`` and return one row a patch and the output of failing runs."""
    trees = engine_trees_of(base)
    stock, stock_output = _run(base, "stock", trees.stock)
    patched, patched_output = _run(base, "patched", trees.patched)
    rows = []
    for path in Series.load(PATCHES, base).files:
        files = {Path(test).name for test in read_patch(path).all("Test")}
        red = [row for row in stock if row["file"] in files]
        green = [row for row in patched if row["file"] in files]
        problems = [f"stock: {row['test']}" for row in red if row["outcome"] != "passed"]
        problems += [f"patched: {row['test']}: {row['outcome']}" for row in green if row["outcome"] == "failed"]
        if not red:
            problems.append("no test of it is red on stock")
        if {row["test"] for row in red} - {row["test"] for row in green if row["outcome"] == "passed"}:
            problems.append("a test that is red on stock is not green on the patched engine")
        passed = sum(row["outcome"] == "passed" for row in green)
        rows.append(PatchRun(base, path.name, len(red), passed, tuple(problems)))
    return rows, stock_output + patched_output


def _run(base: str, kind: str, tree: Path) -> tuple[list[dict[str, str]], str]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pytest", f"tests/patches/{base}", "-q", "-p", "no:cacheprovider"]
        command += ["--engine", str(tree), "--kind", kind, "--patch-report", str(report)]
        done = subprocess.run(
            command, cwd=CHECKOUT, env=engine_environment(tree), capture_output=True, text=True, check=False
        )
        output = (
            f"--- {base} {kind}, exit code {done.returncode}\n{done.stdout}{done.stderr}" if done.returncode else ""
        )
        return (json.loads(report.read_text()) if report.is_file() else []), output


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
