"""`serve` with the real engine: what it prints, how it stops, what a failed start says.

The tests at the end stop the session's servers, so this file comes last in the directory.
"""

from __future__ import annotations

import ast
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from sglang_bw import models
from sglang_bw.recipes.flags import ALIASES
from tests.conftest import EngineTrees, engine_environment
from tests.engine.conftest import START_S, RunningServer, assert_gone, start_serve
from tests.launch.serving import alive, until

pytestmark = pytest.mark.engine

_PARSER = """
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print([action.option_strings for action in parser._actions])
"""


def test_flag_aliases_are_those_of_the_engine(engine_trees: EngineTrees) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PARSER],
        env=engine_environment(engine_trees.patched),
        capture_output=True,
        text=True,
        check=True,
    )
    known = dict(ALIASES)
    abbreviations = {alias: known.pop(alias) for alias in ("tp", "pp", "dp")}
    actions = [[name.removeprefix("--") for name in names] for names in ast.literal_eval(done.stdout.splitlines()[-1])]
    found = {}
    for names in actions:
        long = [name for name in names if not name.startswith(("-", "no-"))]
        main = next((name for name in long if name in ALIASES.values()), None)
        if len(long) > 1:
            assert main, f"{long} have no entry"
            found |= {alias: main for alias in long if alias != main}
    found.pop("h", None)
    assert found == known
    every = [name for names in actions for name in names]
    for short, full in abbreviations.items():
        assert full in every
        assert short not in every


def test_warm_up_numbers(chain: RunningServer) -> None:
    report = chain.events["warm-up"]
    assert report["accept_length"] >= 2.0
    assert report["tokens_per_second"] > 0
    assert report["warnings"] == []


def test_phases(chain: RunningServer) -> None:
    seconds = chain.events["ready"]["seconds"]
    assert {"starting", "loading", "warm-up"} <= set(seconds)
    assert all(value >= 0 for value in seconds.values())


def test_the_token_pool_is_small(chain: RunningServer) -> None:
    info = httpx.get(f"{chain.url}/server_info", timeout=30, trust_env=False).json()
    assert info["max_total_num_tokens"] == 16384
    rss = sum(psutil.Process(pid).memory_info().rss for pid in chain.family())
    assert rss < 6 << 30


def test_a_draft_that_does_not_fit(engine_trees: EngineTrees, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(models.TINY_DRAFT, draft)
    config = json.loads((draft / "config.json").read_text())
    config["hidden_size"] //= 2
    (draft / "config.json").write_text(json.dumps(config))
    process, _, log = start_serve(engine_trees.patched, tmp_path, "--draft", str(draft))
    assert process.wait(START_S) == 34
    told = (tmp_path / "err.txt").read_text()
    assert "error: the engine died while loading" in told
    assert "Attempted to load weight" in told
    assert f"Full log: {log}" in told
    assert "Traceback" not in told
    assert "Traceback" in log.read_text()


def test_killed_while_loading_leaves_nothing(engine_trees: EngineTrees, tmp_path: Path) -> None:
    process, _, log = start_serve(engine_trees.patched, tmp_path)
    until(lambda: log.exists() and "Load weight begin" in log.read_text(), START_S, "the engine loads")
    family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(family) >= 4  # keeper, engine, scheduler, detokenizer
    process.kill()
    process.wait()
    assert_gone(family)


@pytest.mark.last
def test_killed_while_serving_leaves_nothing(tree: RunningServer) -> None:
    family = tree.family()
    assert len(family) >= 5
    tree.stop(signal.SIGKILL)
    assert_gone(family)


@pytest.mark.last
def test_sigterm_stops_cleanly(chain: RunningServer) -> None:
    family = chain.family()
    assert len(family) >= 5
    assert chain.stop(signal.SIGTERM) == 0
    assert not any(map(alive, family))
    assert "Finished server process" in chain.log.read_text()


def test_stock_engine_is_refused(engine_trees: EngineTrees, tmp_path: Path) -> None:
    process, _, _ = start_serve(engine_trees.stock, tmp_path)
    assert process.wait(60) == 21
    told = (tmp_path / "err.txt").read_text()
    assert "is upstream's, without the series" in told
    assert "sglang-bw install" in told
