"""The goodput policy on a real server: no token changes whatever it decides, and it takes the costs it is given."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conftest import EngineTrees
from tests.engine.conftest import Answer, RunningServer, _serving

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BATCHES = (1, 2, 4, 8, 16)
# What nobody would measure: that a round of drafting costs six plain steps.
CONFIG = {"1": {"candidate_steps": [0, 1, 3]}, "costs": [[0, 1, 0.005], [1, 1, 0.03], [3, 1, 0.03]]}


@pytest.fixture(scope="module")
def goodput(engine_trees: EngineTrees, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    scratch = tmp_path_factory.mktemp("goodput")
    config = scratch / "adaptive.json"
    config.write_text(json.dumps(CONFIG))
    flags = ["--speculative-adaptive", "--speculative-adaptive-policy", "goodput", "--max-running-requests", "16"]
    flags += ["--speculative-adaptive-config", str(config), "--decode-log-interval", "4"]
    yield from _serving(engine_trees.patched, scratch, "--", *flags)


@pytest.fixture(scope="module")
def expected(baseline: RunningServer, prompts: list[str]) -> list[list[int]]:
    return [answer["output_ids"] for answer in baseline.generate_all(prompts, concurrent=1)]


def belief(server: RunningServer) -> dict[str, Any]:
    info = httpx.get(f"{server.url}/server_info", timeout=30, trust_env=False).json()
    found: dict[str, Any] = info["internal_states"][0]["spec_adaptive"]
    return found


def drafts(answers: list[Answer]) -> int:
    return sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)


@pytest.mark.parametrize("at_once", BATCHES)
def test_no_token_changes(goodput: RunningServer, prompts: list[str], expected: list[list[int]], at_once: int) -> None:
    answers = goodput.generate_all(prompts, concurrent=at_once)
    assert [answer["output_ids"] for answer in answers] == expected
    if at_once > 1:
        assert drafts(answers) > 0
        assert goodput.most_at_once() >= at_once // 2


def test_it_begins_with_the_costs_it_is_given_and_learns_better(goodput: RunningServer, prompts: list[str]) -> None:
    """Alone, drafting is left at once for the costs of the config; it is cheaper than they say, and that is seen."""
    goodput.generate_all(prompts[:4], concurrent=1)
    left = re.search(r"steps 3 -> 0 for batches from 1 to 1: .* round ([0-9.]+) of a plain", goodput.log.read_text())
    assert left
    assert float(left[1]) == pytest.approx(6, abs=0.5)
    found = belief(goodput)
    assert found["switches"] >= 1
    assert found["round_ratio"] < 5
