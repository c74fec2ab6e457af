"""`tune` on the real engine with the tiny pair: a better and a worse setting, one that cannot start, and resuming."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_bw.ledger.query import Query
from sglang_bw.ledger.store import PATH_VARIABLE, Ledger
from sglang_bw.recipes import lookup
from tests.conftest import EngineTrees
from tests.engine.conftest import tool_environment

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]
SEARCH = [
    "--space", "steps=off,1", "--space", "max-total-tokens=1", "--prompts", "tiny", "--count", "6",
    "--max-tokens", "64", "--within", "0.08", "--trial-budget", "3m", "--device", "cpu", "--json",
]  # fmt: skip


def test_tunes_the_tiny_pair_and_goes_on(engine_trees: EngineTrees, tmp_path: Path) -> None:
    environ = {
        **tool_environment(engine_trees.patched),
        PATH_VARIABLE: str(tmp_path / "ledger.sqlite3"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }

    def tune(*more: str) -> tuple[dict[str, Any], str]:
        command = [sys.executable, "-m", "sglang_bw", "tune", "tiny", "--engine-tree", str(engine_trees.patched)]
        command += ["-o", str(tmp_path / "tiny-tuned.yaml")]
        done = subprocess.run([*command, *SEARCH, *more], capture_output=True, text=True, env=environ)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout), done.stderr

    first, _ = tune("--trials", "1")
    assert [one["choice"]["steps"] for one in first["tried"]] == ["off"]
    again, said = tune("--trials", "3")
    assert again["study"] == first["study"]
    assert said.count("steps off:") == 0  # known from the first run, not measured again
    results = {json.dumps(one["choice"]): one for one in again["tried"]}
    assert len(results) == 3
    plain = next(one for one in again["tried"] if one["choice"] == {"steps": "off", "max-total-tokens": "as is"})
    assert plain["result"] == "slower"  # speculation pays on this pair, so the search must not choose to go without
    assert plain["score"]["high"] < 1
    broken = next(one for one in again["tried"] if one["choice"] == {"steps": "as is", "max-total-tokens": "1"})
    assert broken["result"] == "failed"
    with Ledger(tmp_path / "ledger.sqlite3") as ledger:
        entries = ledger.select(Query(study=again["study"]))
        assert len(entries) == 3
        assert ledger.run(ledger.find(plain["entry"])) is not None
    if again["best"]:
        written = lookup.read(tmp_path / "tiny-tuned.yaml")
        assert written.evidence[-1].numbers["ratio"] > 1
