"""How patch tests run: in a process of their own, once on the stock and once on the patched engine.

``pytest tests/patches/<base> --engine TREE --kind stock|patched`` imports sglang from TREE. A test marked
``stock_failure(type, regex)`` runs on both: on the patched tree it must pass, on stock it must fail with exactly that
type and text. Other tests run on the patched tree only. Without ``--engine`` none of them is collected; the driver
is ``tests/patches/test_series.py``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
_outcomes: list[dict[str, str]] = []


def pytest_configure(config: pytest.Config) -> None:
    tree = config.getoption("--engine")
    if tree is None:
        return
    tree = tree.resolve()
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = False
    os.environ["PYTHONPATH"] = str(tree)
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_patch_test = collection_path.parent.parent == HERE and collection_path.name.startswith("test_")
    return True if is_patch_test and config.getoption("--engine") is None else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # What the engine binds at its first import on a CPU is what these files look at: nobody may import it before them.
    items.sort(key=lambda item: not item.path.name.startswith("test_cpu_"))
    if config.getoption("--kind") != "stock":
        return
    kept = [item for item in items if item.get_closest_marker("stock_failure")]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    marker = item.get_closest_marker("stock_failure")
    if marker and report.when == "call" and item.config.getoption("--kind") == "stock":
        problem = _judge(marker, call, _added_names(item))
        report.outcome = "failed" if problem else "passed"
        report.longrepr = problem or None
    if report.when == "call" or report.failed:
        _outcomes.append(
            {
                "path": item.path.relative_to(HERE.parent.parent).as_posix(),
                "test": item.name,
                "outcome": report.outcome,
                "declared": "yes" if marker else "no",
            }
        )
    return report


def _judge(marker: pytest.Mark, call: pytest.CallInfo[Any], added: set[str]) -> str:
    """Return why a run on stock is not the declared failure, or an empty string."""
    wanted, text = marker.args
    if call.excinfo is None:
        return "passes on the stock engine: it does not show the fault"
    failure = call.excinfo.value
    said = f"{type(failure).__name__}: {failure}"
    if type(failure) is not wanted or not re.search(text, str(failure)):
        return f"fails on stock for another reason.\ndeclared: {wanted.__name__}: {text}\nfound:    {said}"
    if isinstance(failure, ImportError | AttributeError):
        own = sorted(name for name in added if re.search(rb"\b" + re.escape(name.encode()) + rb"\b", said.encode()))
        if own:
            return f"fails on stock because of {own[0]}, which the patch itself adds: {said}"
    return ""


def _added_names(item: pytest.Item) -> set[str]:
    """Return names of modules, functions and classes that the patch under test adds."""
    names: set[str] = set()
    folder = item.config.getoption("--series") or HERE.parent.parent / "patches" / item.path.parent.name
    for patch in folder.glob("*.patch"):
        text = patch.read_text(encoding="utf-8", errors="replace")
        if item.path.name in text:
            names |= set(re.findall(r"^\+\s*(?:async )?(?:def|class) (\w+)", text, re.MULTILINE))
            names |= {Path(path).stem for path in re.findall(r"^--- /dev/null\n\+\+\+ b/(\S+)", text, re.MULTILINE)}
    return names


def pytest_sessionfinish(session: pytest.Session) -> None:
    if path := session.config.getoption("--patch-report"):
        path.write_text(json.dumps(_outcomes))
