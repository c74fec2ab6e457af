"""`watch` on the real engine: with its metrics, and without."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from tests.engine.conftest import RunningServer

pytestmark = pytest.mark.engine


def looks(server: RunningServer, prompts: list[str]) -> dict[str, object]:
    """Keep a server busy until a look has seen it work."""
    command = [sys.executable, "-m", "sglang_bw", "watch", "--url", server.url, "--json", "--interval", "0.2"]
    seen = threading.Event()

    def ask() -> None:
        while not seen.is_set():
            server.generate_all(prompts[:4], concurrent=4)

    busy = threading.Thread(target=ask)
    busy.start()
    found: dict[str, object] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout
        try:
            for _ in range(300):
                found = json.loads(watching.stdout.readline())
                if found["running"] and found["tok_s"] and found["accept_length"]:
                    return found
        finally:
            seen.set()
            watching.terminate()
            busy.join()
    raise AssertionError(f"never seen at work: {found}")


def test_without_metrics(chain: RunningServer, prompts: list[str]) -> None:
    found = looks(chain, prompts)
    assert found["metrics"] is False
    assert 1 <= int(str(found["running"])) <= 4
    assert 1 < float(str(found["accept_length"])) <= 4
    assert found["steps"] == 3


def test_with_metrics(tree: RunningServer, prompts: list[str]) -> None:
    found = looks(tree, prompts)
    assert found["metrics"] is True
    assert found["accept_is_recent"] is True
    assert 1 < float(str(found["accept_length"])) <= 4
    assert found["steps"] == 3
    assert 0 < float(str(found["kv_use"])) < 1
