"""What all tests share: the options of the patch tests and the engine as two unpacked trees over one environment."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_bw.fork import build as builder
from sglang_bw.fork import upstream
from sglang_bw.fork.patchtests import engine_environment as engine_environment
from sglang_bw.fork.series import Series, newest_base

CHECKOUT = Path(__file__).resolve().parent.parent
PATCHES = CHECKOUT / "patches"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("patches", "tests of the patch series")
    group.addoption("--engine", type=Path, help="Unpacked sglang tree that the patch tests import from.")
    group.addoption("--kind", choices=("stock", "patched"), help="What that tree is.")
    group.addoption("--series", type=Path, help="Folder of the patches under test (default: the tests' own base).")
    group.addoption("--patch-report", type=Path, help="Write the outcome of each patch test here, as JSON.")


def pytest_configure() -> None:
    # No test, and no program that a test starts, writes into the ledger of whoever runs the tests, or sees what they
    # have started and trusted.
    scratch = Path(tempfile.mkdtemp(prefix="sglang-bw-tests-"))
    os.environ["SGLANG_BW_LEDGER"] = str(scratch / "ledger.sqlite3")
    os.environ["XDG_STATE_HOME"] = str(scratch / "state")
    # A shell starts background jobs with SIGINT ignored, and children inherit that: tests send it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class EngineTrees:
    """Two directories to put on PYTHONPATH: each holds ``sglang/`` and its ``.dist-info``."""

    base: str
    stock: Path
    patched: Path


def engine_trees_of(base: str) -> EngineTrees:
    """Unpack the stock and the patched wheel of a base below ``.cache/engines``, once for each content.

    Bytecode is written beside the sources at the first import, and stays.
    """
    series = Series.load(PATCHES, base)
    name = upstream.pick_wheel(series.pins, upstream.this_python(), upstream.this_machine())
    engines = CHECKOUT / ".cache" / "engines"
    python = "cp" + upstream.this_python().replace(".", "")
    stock = engines / f"{base}-{python}-stock-{series.pins.wheels[name][:12]}"
    patched = engines / f"{base}-{python}-patched-{series.pins.tree[:12]}"
    if not stock.is_dir():
        _unpack(upstream.fetch(series.pins, name), stock)
    if not patched.is_dir():
        with tempfile.TemporaryDirectory() as out:
            _unpack(builder.build(PATCHES, base, out=Path(out)).path, patched)
    return EngineTrees(base, stock, patched)


def _unpack(wheel: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".unpack-", dir=folder.parent))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch)
    try:
        scratch.rename(folder)
    except OSError:  # another test process was quicker
        shutil.rmtree(scratch)


@pytest.fixture(scope="session")
def engine_trees() -> EngineTrees:
    return engine_trees_of(newest_base(PATCHES))
