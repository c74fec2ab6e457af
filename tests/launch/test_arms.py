"""What `ab` and `tune` ask before a load, and what a launch that fails there leaves, on a fake engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_bw.ledger.entry import Entry
from tests.launch.serving import free_port, write_model, write_recipe, write_tree

REPEATED = "exactly this launch has failed on this host"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(fake_tree: Path, model: Path, tmp_path: Path) -> Run:
    """Run a command on the recipe my.yaml, whose id is `mine`, with the fake engine."""
    write_recipe(tmp_path / "my.yaml", model)

    def call(
        *words: str, engine: bool = True, mode: str = "fails", tree: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        options = ("--device", "cpu", "--engine-tree", str(tree or fake_tree)) if engine else ()
        environ = {**os.environ, "FAKE_MODE": mode, "FAKE_PIDS": str(tmp_path / "pids.txt")}
        return subprocess.run(
            [sys.executable, "-m", "sglang_bw", *words, *options],
            capture_output=True, text=True, timeout=120, env=environ, cwd=tmp_path,
        )  # fmt: skip

    return call


def test_a_failed_arm_is_found_by_ab_serve_and_why(run: Run, entries: Callable[[], list[Entry]]) -> None:
    compare = ("ab", "my.yaml", "--set", "page-size=4", "--one-at-a-time", "--port", str(free_port()))
    first = run(*compare)
    assert first.returncode == 34, first.stderr
    assert REPEATED not in first.stderr
    (failed,) = entries()
    assert (failed.kind, failed.result, failed.failure, failed.recipe) == ("ab", "failed", "other", "mine")
    assert "--page-size" not in failed.argv  # it was A that failed
    again = run(*compare)
    assert f"{REPEATED} once" in again.stderr
    assert failed.id in again.stderr.split("record:")[0]  # before anything is started
    assert f"{REPEATED} 2 times" in run("serve", "my.yaml", "--port", str(free_port())).stderr
    why = run("ledger", "why", "my.yaml", engine=False)
    assert why.stdout.count("the draft does not fit the target") == 2, why.stdout + why.stderr  # of ab, and of serve
    other = run("ab", "my.yaml", "--no-spec", "--one-at-a-time", "--port", str(free_port()))
    assert f"{REPEATED} 3 times" in other.stderr  # B is that launch


def test_ab_refuses_what_the_plan_refuses_before_any_load(
    run: Run, entries: Callable[[], list[Entry]], tmp_path: Path
) -> None:
    refused = run("ab", "my.yaml", "--set", "no-such-flag=1", "--one-at-a-time")
    assert refused.returncode == 51, refused.stderr
    assert "arm B (mine with no-such-flag=1): the engine does not take these flags" in refused.stderr
    assert not (tmp_path / "pids.txt").exists()
    assert entries() == []
    forced = run("ab", "my.yaml", "--set", "no-such-flag=1", "--force", "--one-at-a-time", "--port", str(free_port()))
    assert forced.returncode == 34, forced.stderr
    (tmp_path / "pids.txt").unlink()
    (tmp_path / "bad.yaml").write_text((tmp_path / "my.yaml").read_text().replace("max-running", "no-such"))
    tuned = run("tune", "bad.yaml", "--space", "page-size=1,2")
    assert tuned.returncode == 78, tuned.stderr
    assert "the plan refuses the recipe as it is" in tuned.stderr
    assert not (tmp_path / "pids.txt").exists()


@pytest.mark.parametrize("words", [("ab", "--no-spec"), ("tune", "--space", "page-size=1,2")], ids=["ab", "tune"])
def test_a_check_of_this_host_refuses_before_any_load(
    words: tuple[str, ...],
    run: Run,
    entries: Callable[[], list[Entry]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    text = (tmp_path / "my.yaml").read_text()
    (tmp_path / "hub.yaml").write_text(re.sub("target: .*", "target: {id: owner/target}", text))
    refused = run(words[0], "hub.yaml", *words[1:])
    assert "the target owner/target is not in" in refused.stderr
    assert refused.returncode == run("serve", "hub.yaml").returncode
    assert not (tmp_path / "pids.txt").exists()
    assert entries() == []  # it is held against no choice
    assert "(--force)" in run(words[0], "hub.yaml", *words[1:], "--force").stderr


def test_another_search_has_another_name(
    run: Run, entries: Callable[[], list[Entry]], model: Path, tmp_path: Path
) -> None:
    recipe, prompts = tmp_path / "my.yaml", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n')
    draft = write_model(tmp_path / "draft")

    said = []

    def study(*more: str, tree: Path | None = None) -> str:
        done = run("tune", "my.yaml", "--space", "page-size=1,2", "--prompts", str(prompts), *more, tree=tree)
        assert done.returncode == 78, done.stderr  # the engine does not start
        said.append(done.stderr)
        return re.findall(r"study (\S+):", done.stderr)[0]

    first = study()
    assert study() == first
    assert first.startswith("mine-")
    found = {first, study("--draft", str(draft)), study(tree=write_tree(tmp_path / "other", without="goodput-policy"))}
    prompts.write_text('{"prompt": "two"}\n')
    found.add(study())
    write_recipe(recipe, model, requests=8)
    found.add(study())
    assert len(found) == 5
    assert REPEATED not in said[0]
    assert f"{REPEATED} once" in said[1]  # the recipe as it is has failed, and of no study
    assert {(one.kind, one.result, one.recipe, one.study) for one in entries()} == {("trial", "failed", "mine", None)}
