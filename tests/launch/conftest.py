from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_bw.ledger.entry import Entry
from sglang_bw.ledger.store import PATH_VARIABLE, Ledger
from tests.launch.serving import Serve, write_model, write_tree


@pytest.fixture(autouse=True)
def _nothing_trusted_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees, or leaves, what whoever runs the tests has trusted and started."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Entry]]:
    """Give the commands a ledger of their own, and return what reads it."""
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "ledger.sqlite3"))

    def read() -> list[Entry]:
        with Ledger(tmp_path / "ledger.sqlite3") as ledger:
            return ledger.select()

    return read


@pytest.fixture(scope="session")
def fake_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("engine") / "tree")


@pytest.fixture(scope="session")
def fake_stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("engine") / "stock", patched=False)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def serve(fake_tree: Path, model: Path, tmp_path: Path) -> Iterator[Serve]:
    server = Serve(fake_tree, model, tmp_path)
    yield server
    server.clean_up()
