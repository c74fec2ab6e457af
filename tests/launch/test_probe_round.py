"""`probe round` as a process, on a fake engine: what ends it, what it leaves, and what it refuses before a load."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_bw.ledger.entry import Entry
from tests.launch.serving import alive, until, write_recipe

Started = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(fake_tree: Path, model: Path, tmp_path: Path) -> Started:
    """Start the command on the recipe my.yaml, whose servers decode 8 requests at once."""
    write_recipe(tmp_path / "my.yaml", model, requests=8)

    def popen(*words: str, mode: str = "", **env: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "FAKE_MODE": mode, "FAKE_PIDS": str(tmp_path / "pids.txt"), **env}
        options = ("--device", "cpu", "--engine-tree", str(fake_tree), "--rounds", "8", "--repeats", "2")
        options = (*options, "--out", "out.json")
        return subprocess.Popen(
            [sys.executable, "-m", "sglang_bw", "probe", "round", "my.yaml", *options, *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, cwd=tmp_path,
        )  # fmt: skip

    return popen


@pytest.fixture
def run(start: Started) -> Callable[..., tuple[int, str, str]]:
    """Start it and wait for its end."""

    def call(*words: str, **more: Any) -> tuple[int, str, str]:
        process = start(*words, **more)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    return call


Run = Callable[..., tuple[int, str, str]]


def pids(tmp_path: Path) -> list[int]:
    file = tmp_path / "pids.txt"
    return [int(line) for line in file.read_text().split()] if file.is_file() else []


def test_a_table_of_what_rounds_cost(run: Run, tmp_path: Path, entries: Callable[[], list[Entry]]) -> None:
    code, out, err = run("--steps", "1,3", "--accept", "1,4", "--batches", "1,8")
    assert code in (0, 68), err  # how straight a line is depends on what else runs here
    found = json.loads((tmp_path / "out.json" if code == 0 else tmp_path / "out.partial.json").read_text())
    assert found["complete"]
    # One step cannot reach a length of 4: it is measured at 1.
    assert [server["title"].partition(" (")[0] for server in found["servers"]] == [
        *("plain decoding", "1 steps, accept length 1", "3 steps, accept length 1", "3 steps, accept length 4")
    ]
    assert found["launch"]["speculative-draft-model-path"] == found["launch"]["model-path"]
    assert "spread" in out
    assert entries()[0].artefacts
    assert not [pid for pid in pids(tmp_path) if alive(pid)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_its_engine(
    start: Started, tmp_path: Path, entries: Callable[[], list[Entry]], number: signal.Signals
) -> None:
    (tmp_path / "out.json").write_text("an earlier result")
    process = start("--steps", "3", "--accept", "1", "--batches", "1", mode="never-answers")
    log = tmp_path / "state" / "sglang-bw" / "logs"
    until(lambda: "ready to roll" in "".join(path.read_text() for path in log.glob("*")))
    process.send_signal(number)
    _out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    until(lambda: not any(alive(pid) for pid in pids(tmp_path)), what="the engine ends")
    assert [entry.result for entry in entries()] == ["interrupted"]
    assert (tmp_path / "out.json").read_text() == "an earlier result"


def test_what_was_measured_survives_the_death_of_an_engine(
    run: Run, tmp_path: Path, entries: Callable[[], list[Entry]]
) -> None:
    """It says why the engine died, and where the batches are that were measured before."""
    code, _, err = run("--steps", "3", "--accept", "1", "--batches", "1,2", mode="crashes-at-2")
    assert code == 66, err
    assert "plain decoding: the engine died while it was measured: " in err
    assert "an illegal memory access" in err
    assert "Full log: " in err
    assert "what was measured: out.partial.json" in err
    assert [row["batch"] for row in json.loads((tmp_path / "out.partial.json").read_text())["plain"]] == [1]
    assert not (tmp_path / "out.json").exists()
    (entry,) = entries()
    assert entry.artefacts == (str(tmp_path / "out.partial.json"),)


@pytest.mark.parametrize(
    ("words", "env", "code", "says"),
    [
        pytest.param(("--batches", "32"), {}, 66, "at most 8 requests at once, not 32", id="flag"),
        pytest.param(("--batches", "8"), {"FAKE_MOST": "4"}, 66, "at most 4 requests at once, not 8", id="server"),
        pytest.param(("--draft", "./nodraft"), {}, 32, "nodraft does not exist", id="draft"),
        pytest.param(("--accept", "5"), {}, 66, "an accept length of 5 is impossible with 3", id="length"),
        pytest.param(("--accept", "nan"), {}, 66, "an accept length of nan is impossible", id="no length"),
    ],
)
def test_what_cannot_be_measured_is_said_first(
    run: Run, tmp_path: Path, words: tuple[str, ...], env: dict[str, str], code: int, says: str
) -> None:
    ended, _, err = run(*words, **env)
    assert ended == code, err
    assert says in err.replace("\n", " ")
    assert bool(pids(tmp_path)) is bool(env)  # nothing was started that need not be


def test_an_engine_that_ignores_the_simulation_is_found_out(run: Run) -> None:
    code, _, err = run("--steps", "3", "--accept", "4", "--batches", "1", mode="ignores-simulation")
    assert code == 66, err
    assert "3 steps at batch 1 emitted 1.00 tokens a round, not the 4" in err.replace("\n", " ")


def test_a_dry_run_writes_nothing(start: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    process = start("--dry-run", "--json")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert len(json.loads(out)["servers"]) == 5
    assert not (tmp_path / "data").exists()
    assert not pids(tmp_path)


def test_a_place_that_cannot_be_written_is_said_before_a_load(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = run("--batches", "1", "--out", "file/out.json")
    assert code == 17, err
    assert "cannot write file/" in err
    assert not pids(tmp_path)
