"""Running the tests that a series names in its trailers, on the stock and on the patched engine.

A trailer may name a file in another base's folder: two bases whose patches are the same code share their tests.
The tests run in this interpreter, which needs the engine's dependencies; ``tests/patches/conftest.py`` says how.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sglang_bw.fork.mail import Patch


@dataclass(frozen=True)
class PatchRun:
    """One patch on both engines: counts of tests, and what went wrong."""

    base: str
    patch: str
    red_on_stock: int
    green_on_patched: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class TestRun:
    """What one run of the tests on one tree said: a row a test, and the output when pytest was not content."""

    rows: tuple[dict[str, str], ...]
    output: str


def engine_environment(tree: Path) -> dict[str, str]:
    """Return the environment of a process that imports sglang from ``tree``: bytecode may be written."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")}
    return kept | {
        "PYTHONPATH": str(tree),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")]),
    }


def run_patches(
    checkout: Path, base: str, folder: Path, patches: Sequence[Patch], stock: Path, patched: Path
) -> tuple[list[PatchRun], str]:
    """Run the tests of ``patches`` on both trees and return one row a patch, and the output of failing runs.

    Both trees run at once, each in a process of its own with one thread for torch: they need two cores, and 4 GB.

    :param folder: where the patch files lie; the tests look there for the names that a patch adds itself.
    """
    tests = named_tests(patches)
    with (
        _started(checkout, base, folder, tests, "stock", stock) as red,
        _started(checkout, base, folder, tests, "patched", patched) as green,
    ):
        red_run, green_run = red(), green()
    rows = [_judge(base, patch, red_run.rows, green_run.rows) for patch in patches]
    return rows, red_run.output + green_run.output


def named_tests(patches: Iterable[Patch]) -> list[str]:
    """Return the test files that the trailers name, each once, in the order of their names.

    They share a process, and the first import of the engine is seen by all: the order is the same for every series.
    """
    return sorted({test for patch in patches for test in patch.all("Test")}, key=lambda test: Path(test).name)


def _judge(base: str, patch: Patch, stock: Iterable[dict[str, str]], patched: Iterable[dict[str, str]]) -> PatchRun:
    files = set(patch.all("Test"))
    red = [row for row in stock if row["path"] in files]
    green = [row for row in patched if row["path"] in files]
    problems = [f"stock: {row['test']}" for row in red if row["outcome"] != "passed"]
    problems += [f"patched: {row['test']}: {row['outcome']}" for row in green if row["outcome"] == "failed"]
    if not red:
        problems.append("no test of it is red on stock")
    if {row["test"] for row in red} - {row["test"] for row in green if row["outcome"] == "passed"}:
        problems.append("a test that is red on stock is not green on the patched engine")
    passed = sum(row["outcome"] == "passed" for row in green)
    return PatchRun(base, patch.name, len(red), passed, tuple(problems))


def run_tests(checkout: Path, base: str, folder: Path, tests: Sequence[str], kind: str, tree: Path) -> TestRun:
    """Run test files with sglang from ``tree``.

    :param kind: ``stock``: a test must fail as it declares; ``patched``: it must pass.
    """
    with _started(checkout, base, folder, tests, kind, tree) as result:
        return result()


@contextmanager
def _started(
    checkout: Path, base: str, folder: Path, tests: Sequence[str], kind: str, tree: Path
) -> Iterator[Callable[[], TestRun]]:
    """Start a run and yield what waits for it; a run that nobody waited for is killed."""
    with tempfile.TemporaryDirectory() as scratch:
        report, output = Path(scratch) / "report.json", Path(scratch) / "output"
        command = [sys.executable, "-m", "pytest", *tests, "-q", "-p", "no:cacheprovider"]
        command += ["--engine", str(tree), "--kind", kind, "--patch-report", str(report), "--series", str(folder)]
        environ = {**engine_environment(tree), "OMP_NUM_THREADS": "1"}
        with output.open("w") as out:
            process = subprocess.Popen(command, cwd=checkout, env=environ, stdout=out, stderr=subprocess.STDOUT)

        def result() -> TestRun:
            code = process.wait()
            said = f"--- {base} {kind}, exit code {code}\n{output.read_text(errors='replace')}" if code else ""
            return TestRun(tuple(json.loads(report.read_text())) if report.is_file() else (), said)

        try:
            yield result
        finally:
            process.kill()
            process.wait()
