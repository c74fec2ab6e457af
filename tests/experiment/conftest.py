"""Mock servers, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.experiment.mock_server import Behaviour, arguments

MOCK = Path(__file__).parent / "mock_server.py"
StartMock = Callable[..., str]


@pytest.fixture
def mock() -> Iterator[StartMock]:
    """Start a server that behaves as told; returns its URL."""
    processes: list[subprocess.Popen[str]] = []

    def start(**how: object) -> str:
        command = [sys.executable, str(MOCK), arguments(Behaviour(**how))]  # type: ignore[arg-type]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout
        return f"http://127.0.0.1:{process.stdout.readline().strip()}"

    yield start
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


class Silent:
    """A watcher that shows nothing."""

    def block(self, name: str, round_number: int, concurrency: int, total: int) -> None: ...

    def answered(self, count: int) -> None: ...

    def round_over(self, rounds: int, ratios: Any) -> None: ...
