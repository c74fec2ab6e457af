"""A stored result of `probe round` is where the policy of the next launch begins, and what a plan goes by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from sglang_bw.cli import planning
from sglang_bw.cli.launch import serve
from sglang_bw.host import fingerprint, nvml, probes
from sglang_bw.launch import command as commands
from sglang_bw.launch.command import Command
from sglang_bw.launch.probe import seed
from sglang_bw.launch.probe.rounds import Point, Result
from sglang_bw.recipes import flags, lookup
from sglang_bw.recipes.flags import Flag
from sglang_bw.recipes.hardware import Hardware
from tests.conftest import EngineTrees
from tests.host.fake_host import NAME, Host

RECIPE = "qwen3-8b-eagle3"
TINY = ("tiny", "--device", "cpu", "--", "--speculative-adaptive", "--speculative-adaptive-policy", "goodput")


@pytest.fixture(autouse=True)
def _no_data_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def store(recipe: str, device: str = "cuda", *, complete: bool = True, seconds: float = 0.025) -> Path:
    """Store a result of 3 steps at batch 4 on this host, as `probe round` does."""
    host = fingerprint.take()
    result = Result(host, recipe, "0.5.23", device, complete=complete)
    result.plain[4] = Point(4, 1.0, 0.010, 0.0, False)
    result.rounds[3, 4] = [Point(4, 1.0, 0.025, 0.0, True), Point(4, 4.0, seconds, 0.0, True)]
    place = probes.place("round", host.key, recipe, device)
    probes.write(place, result.as_json())
    return place


def launch(*extra: Flag) -> Command:
    return commands.build(lookup.find(RECIPE), Hardware(), {}, extra=extra)


def key() -> str:
    return fingerprint.take().key


@pytest.mark.engine
def test_the_policy_begins_with_what_was_measured(engine_trees: EngineTrees) -> None:
    place = store(RECIPE)
    found = seed.find(launch(), key(), RECIPE)
    assert found is not None
    command = found.give(launch())
    config = Path(flags.value(command.flags, seed.CONFIG_FLAG) or "")
    assert config.parent == place.parent
    written = json.loads(config.read_text())
    assert written["costs"] == [[0, 4, 0.010], [3, 4, pytest.approx(0.025)]]
    assert written["1"]["candidate_steps"] == [0, 1, 3]
    assert seed.find(command, key(), RECIPE) is None
    source = (engine_trees.patched / "sglang/srt/speculative/adaptive_spec_params.py").read_text()
    assert '"costs"' in source  # the engine knows the key


def test_a_result_of_another_host_recipe_or_device_is_none_and_half_of_one_too() -> None:
    store(RECIPE)
    assert seed.find(launch(), "another", RECIPE) is None
    assert seed.find(launch(), key(), "tiny") is None
    assert seed.find(replace(launch(), device="cpu"), key(), RECIPE) is None
    store(RECIPE, complete=False)
    assert seed.find(launch(), key(), RECIPE) is None
    store(RECIPE, seconds=0.05)  # no straight line
    assert seed.find(launch(), key(), RECIPE) is None
    store(RECIPE)
    assert seed.find(launch(), key(), RECIPE) is not None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"complete": true, "taken": "x", "table": [[1, 2]]}'])
def test_a_damaged_result_is_none(text: str) -> None:
    store(RECIPE).write_text(text)
    assert seed.find(launch(), key(), RECIPE) is None


def test_a_config_of_the_user_and_another_policy_stay() -> None:
    store(RECIPE)
    assert seed.find(launch(Flag(seed.CONFIG_FLAG, ("mine.json",))), key(), RECIPE) is None
    assert seed.find(launch(Flag("speculative-adaptive-policy", ("accept-length",))), key(), RECIPE) is None


def test_serve_says_and_shows_it() -> None:
    before = CliRunner().invoke(serve, ["--dry-run", *TINY], catch_exceptions=False)
    assert seed.CONFIG_FLAG not in before.stdout
    store("tiny", "cpu")
    after = CliRunner().invoke(serve, ["--dry-run", *TINY], catch_exceptions=False)
    assert f"--{seed.CONFIG_FLAG}" in after.stdout
    assert "the policy begins with the cost of rounds of 20" in after.stderr


def test_a_plan_for_the_gpus_here_goes_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "load", Host().nvml)
    question = planning.question(planning.Wish(RECIPE, gpus=f"1x{NAME}"))
    assert planning.with_stored_round(question) == (question, None)
    place = store(RECIPE)
    noted, found = planning.with_stored_round(question)
    assert found == place
    assert str(place) in noted.notes[-1]
    elsewhere = planning.question(planning.Wish(RECIPE, gpus="1xRTX 5090"))
    assert planning.with_stored_round(elsewhere)[1] is None
