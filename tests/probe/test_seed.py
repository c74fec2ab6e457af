"""A stored result of `probe round` is where the policy of the next launch begins, and what a plan goes by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sglang_bw.cli import planning
from sglang_bw.cli.launch import serve
from sglang_bw.errors import SpeculationInputError
from sglang_bw.host import fingerprint, nvml, probes
from sglang_bw.launch import command as commands
from sglang_bw.launch import engine as engines
from sglang_bw.launch.command import Command
from sglang_bw.launch.probe import seed
from sglang_bw.launch.probe.rounds import Point, Result
from sglang_bw.plan.question import Question
from sglang_bw.recipes import flags, lookup
from sglang_bw.recipes.flags import Flag, Flags
from sglang_bw.recipes.hardware import Device, Hardware
from sglang_bw.recipes.origin import Origin, of_flags
from tests.conftest import EngineTrees
from tests.host.fake_host import NAME, Host

RECIPE = "qwen3-8b-eagle3"
ENGINE = "0.5.23+bw.1"
TINY = ("tiny", "--device", "cpu", "--", "--speculative-adaptive", "--speculative-adaptive-policy", "goodput")


@pytest.fixture(autouse=True)
def _no_data_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def store(
    recipe: str,
    device: Device = "cuda",
    *,
    complete: bool = True,
    seconds: float = 0.025,
    engine: str = ENGINE,
    extra: Flags = (),
) -> Path:
    """Store a result of 3 steps at batch 4 on this host, as `probe round` does."""
    host = fingerprint.take()
    line = commands.build(lookup.find(recipe), Hardware(device=device), {}, extra=extra).flags
    result = Result(host, recipe, engine, device, of_flags(line), complete=complete)
    result.plain[4] = Point(4, 1.0, 0.010, 0.0, False)
    result.rounds[3, 4] = [Point(4, 1.0, 0.025, 0.0, True), Point(4, 4.0, seconds, 0.0, True)]
    place = probes.place("round", host.key, recipe, device)
    probes.write(place, result.as_json())
    return place


def launch(*extra: Flag) -> Command:
    return commands.build(lookup.find(RECIPE), Hardware(), {}, extra=extra)


def here(recipe: str = RECIPE, host: str = "", engine: str = ENGINE) -> Origin:
    return Origin(host or fingerprint.take().key, recipe, engine)


@pytest.mark.engine
def test_the_policy_begins_with_what_was_measured(engine_trees: EngineTrees) -> None:
    place = store(RECIPE)
    found = seed.find(launch(), here())[0]
    assert found is not None
    command = found.give(launch())
    config = Path(flags.value(command.flags, seed.CONFIG_FLAG) or "")
    assert config.parent == place.parent
    written = json.loads(config.read_text())
    assert written["costs"] == [[0, 4, 0.010], [3, 4, pytest.approx(0.025)]]
    assert written["1"]["candidate_steps"] == [0, 1, 3]
    assert seed.find(command, here())[0] is None
    source = (engine_trees.patched / "sglang/srt/speculative/adaptive_spec_params.py").read_text()
    assert '"costs"' in source  # the engine knows the key


def test_a_result_of_another_host_recipe_or_device_is_none_and_half_of_one_too() -> None:
    store(RECIPE)
    assert seed.find(launch(), here(host="another"))[0] is None
    assert seed.find(launch(), here("tiny"))[0] is None
    assert seed.find(replace(launch(), device="cpu"), here())[0] is None
    store(RECIPE, complete=False)
    assert seed.find(launch(), here())[0] is None
    store(RECIPE, seconds=0.05)  # no straight line
    assert seed.find(launch(), here())[0] is None
    store(RECIPE)
    assert seed.find(launch(), here())[0] is not None
    assert seed.find(launch(), here(engine="0.5.22"))[0] is None
    other = (Flag("speculative-draft-model-path", ("another",)), Flag("tp-size", ("4",)))
    for flag in other:
        assert seed.find(launch(flag), here())[0] is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"complete": true, "taken": "x", "table": [[1, 2]]}'])
def test_a_damaged_result_is_none(text: str) -> None:
    store(RECIPE).write_text(text)
    assert seed.find(launch(), here())[0] is None


def test_a_config_of_the_user_and_another_policy_stay() -> None:
    store(RECIPE)
    assert seed.find(launch(Flag(seed.CONFIG_FLAG, ("mine.json",))), here())[0] is None
    assert seed.find(launch(Flag("speculative-adaptive-policy", ("accept-length",))), here())[0] is None


def test_serve_says_and_shows_it() -> None:
    before = CliRunner().invoke(serve, ["--dry-run", *TINY], catch_exceptions=False)
    assert seed.CONFIG_FLAG not in before.stdout
    version = engines.find(None, None).installation.version or ""
    store("tiny", "cpu", engine=version)
    after = CliRunner().invoke(serve, ["--dry-run", *TINY], catch_exceptions=False)
    assert f"--{seed.CONFIG_FLAG}" in after.stdout
    assert "the policy begins with the cost of rounds of 20" in after.stderr
    store("tiny", "cpu", engine="0.5.22")
    other = CliRunner().invoke(serve, ["--dry-run", *TINY], catch_exceptions=False)
    assert seed.CONFIG_FLAG not in other.stdout
    assert "is not used: it was measured with engine 0.5.22" in other.stderr.replace("\n", " ")


@pytest.fixture
def question(monkeypatch: pytest.MonkeyPatch) -> Question:
    """A plan for the GPUs of this machine."""
    monkeypatch.setattr(nvml, "load", Host().nvml)
    asked = planning.question(planning.Wish(RECIPE, gpus=f"1x{NAME}"))
    return replace(asked, engine=replace(asked.engine, version=ENGINE))


def test_a_plan_for_the_gpus_here_goes_by_it(question: Question) -> None:
    assert planning.with_round(question, None) == (question, None)
    place = store(RECIPE)
    noted, found = planning.with_round(question, None)
    assert found == place
    assert noted.notes[-1] == f"cost of a round: measured here, {place}"
    elsewhere = planning.question(planning.Wish(RECIPE, gpus="1xRTX 5090"))
    assert planning.with_round(elsewhere, None)[1] is None
    plain = planning.question(planning.Wish(RECIPE, gpus=f"1x{NAME}", speculate=False))
    assert planning.with_round(plain, None) == (plain, None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param({"complete": False}, "it is not complete", id="half"),
        pytest.param({"seconds": 0.05}, "no straight line", id="bent"),
        pytest.param({"engine": "0.5.22"}, "engine 0.5.22, not 0.5.23", id="engine"),
        pytest.param({"extra": (Flag("tp-size", ("4",)),)}, "--tp-size 4, not unset", id="tensor parallelism"),
    ],
)
def test_a_plan_says_why_it_passes_a_result_over(question: Question, change: dict[str, Any], why: str) -> None:
    place = store(RECIPE, **change)
    noted, found = planning.with_round(question, None)
    assert found is None
    assert f"{place} is not used: " in noted.notes[-1]
    assert why in noted.notes[-1]
    assert "`sglang-bw probe round` measures again" in noted.notes[-1]
    # Who names the file wants it used; what is odd about it is said.
    noted, found = planning.with_round(question, place)
    assert found == place
    assert why in noted.notes[-1]


def test_a_plan_survives_a_stored_result_that_is_none(question: Question, tmp_path: Path) -> None:
    """One without a round, as an interrupted probe once left it."""
    place = store(RECIPE)
    place.write_text(json.dumps({**json.loads(place.read_text()), "rounds": []}))
    noted, found = planning.with_round(question, None)
    assert found is None
    assert "rounds: List should have at least 1 item" in noted.notes[-1]
    with pytest.raises(SpeculationInputError):
        planning.with_round(question, place)
    own = tmp_path / "own.json"  # written by hand, in the form of the docs
    own.write_text('{"plain": [{"batch": 1, "seconds": 0.01}], "rounds": [{"batch": 1, "steps": 3, "seconds": 0.02}]}')
    assert planning.with_round(question, own) == (question, own)
