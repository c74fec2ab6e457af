"""`probe round` on real servers: two that run already, and those that it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_bw.host import probes
from sglang_bw.plan.speculation.probe import round_cost
from tests.conftest import EngineTrees
from tests.engine.conftest import RunningServer, tool_environment

pytestmark = pytest.mark.engine
COMMAND = [sys.executable, "-m", "sglang_bw", "probe", "round"]


def test_running_servers(chain: RunningServer, baseline: RunningServer, tmp_path: Path) -> None:
    """A real draft, so the accept length is its own; what a round costs is as good."""
    file = tmp_path / "round.json"
    options = ["--url", chain.url, "--url", baseline.url, "--batches", "1,4", "--rounds", "24", "--out", str(file)]
    done = subprocess.run([*COMMAND, *options, "--json"], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["complete"]
    assert [row["batch"] for row in found["plain"]] == [1, 4]
    for row in found["rounds"]:
        assert row["steps"] == 3
        assert row["simulated"] is None
        plain = next(other for other in found["plain"] if other["batch"] == row["batch"])
        assert row["ratio"] == pytest.approx(row["seconds"] / plain["seconds"])
        assert 1 < row["points"][0]["accept_length"] <= 4
    ratio = round_cost(file).ratio(0, 4, 3).ratio
    assert ratio == pytest.approx(found["rounds"][1]["ratio"])


@pytest.mark.slow
def test_servers_of_a_recipe(engine_trees: EngineTrees, tmp_path: Path) -> None:
    file = tmp_path / "round.json"
    options = ["tiny", "--device", "cpu", "--engine-tree", str(engine_trees.patched), "--steps", "0,3"]
    options += ["--accept", "1,4", "--batches", "1,4", "--rounds", "32", "--out", str(file), "--json"]
    environ = tool_environment(engine_trees.patched)
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=580, check=False, env=environ)
    assert done.returncode in (0, 68), done.stderr  # how straight the line is depends on what else runs here
    found: dict[str, Any] = json.loads(done.stdout)
    kept = file if done.returncode == 0 else probes.partial(file)  # who is bent takes no one's place
    assert found == json.loads(kept.read_text()) | {"taken": found["taken"]}
    assert [server["title"].partition(",")[0] for server in found["servers"]] == [
        *("plain decoding", "0 steps", "3 steps", "3 steps")
    ]
    lines = {(row["steps"], row["batch"]): row for row in found["rounds"]}
    assert lines.keys() == {(0, 1), (0, 4), (3, 1), (3, 4)}
    assert all(row["simulated"] for row in lines.values())
    assert [point["accept_length"] for point in lines[3, 4]["points"]] == pytest.approx([1, 4], abs=0.05)
    assert all(lines[key]["residual"] is not None for key in ((3, 1), (3, 4)))
    assert all(line["seconds"] > 0 and line["ratio"] > 0 for line in lines.values())
