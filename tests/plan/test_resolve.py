"""The engine's resolution as another machine: the child, the cache, and what becomes of a child that fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_bw.errors import NotInstalledError, ResolverError
from sglang_bw.fork.environment import Environment
from sglang_bw.host.boards import find
from sglang_bw.plan import resolve as resolver
from sglang_bw.plan.resolution import Resolution, look_up
from sglang_bw.plan.resolve import EngineFiles, EngineTooOldError
from sglang_bw.recipes import configs, lookup
from sglang_bw.recipes import flags as flag_lists
from sglang_bw.recipes.hardware import Hardware

PRO = find("RTX PRO 6000")
FakeEngine = Callable[[str], EngineFiles]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def fake_engine(tmp_path: Path) -> FakeEngine:
    """Return an engine whose interpreter runs a shell script instead of the child."""

    def make(script: str) -> EngineFiles:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        (tmp_path / "site" / "sglang").mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / "sglang" / "a.py").write_text("A = 1\n")
        return EngineFiles(python, tmp_path / "site", "0.5.23")

    return make


def model(tmp_path: Path) -> dict[str, Path]:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama", "auto_map": {"AutoConfig": "evil.Config"}}')
    return {"owner/model": folder}


def ask(engine: EngineFiles, tmp_path: Path, *extra: str, only_cached: bool = False) -> Resolution | None:
    argv = ["--model-path", "owner/model", "--revision", "abc", *extra]
    return resolver.resolve(argv, PRO, 8, model(tmp_path), engine, only_cached=only_cached)


ANSWER = {
    "engine": "0.5.23",
    "outcome": "resolved",
    "asked": {"model_path": "owner/model", "page_size": 16, "cuda_graph_max_bs_decode": 512},
    "effective": {
        "page_size": 64,
        "attention_backend": "triton",
        "random_seed": 7,
        "cuda_graph_config": {"decode": {"max_bs": 48}},
    },
    "rules": {
        "page_size": "handle_attention_backend_compatibility",
        "attention_backend": "handle_attention_backend_compatibility: attention_backend_default",
        "random_seed": "handle_missing_default_values",
        "cuda_graph_config.decode.max_bs": "handle_speculative_max_running_requests",
        "_private": "x",
    },
    "environment": {"NCCL_X": ["1", "handle_environment_variables"], "TRITON_CACHE_DIR": ["/x", "the engine"]},
    "notes": ["reset"],
}


def test_changes_and_the_steps_behind_them(fake_engine: FakeEngine, tmp_path: Path) -> None:
    found = ask(fake_engine(f"cat > {tmp_path}/request; echo '{json.dumps(ANSWER)}'"), tmp_path)
    assert found
    changes = {change.name: change for change in found.changes}
    assert set(changes) == {"page_size", "attention_backend", "cuda_graph_config.decode.max_bs"}
    assert found.changes[-1].name == "attention_backend"  # what was asked for comes first
    assert (changes["page_size"].asked, changes["page_size"].effective, changes["page_size"].explicit) == (16, 64, True)
    assert (changes["cuda_graph_config.decode.max_bs"].asked, changes["cuda_graph_config.decode.max_bs"].effective) == (
        512,
        48,
    )
    assert not changes["attention_backend"].explicit
    assert found.environment == {"NCCL_X": ("1", "handle_environment_variables")}
    request = json.loads((tmp_path / "request").read_text())
    assert request["capability"] == [12, 0]
    assert (request["memory_mib"], request["count"]) == (97887, 8)
    assert "--revision" not in request["argv"]


def test_the_child_gets_no_code_of_the_model(fake_engine: FakeEngine, tmp_path: Path) -> None:
    script = """python3 -c '
import json, sys, pathlib
request = json.load(sys.stdin)
path = pathlib.Path(request["argv"][1])
print(json.dumps({"outcome": "refused", "rule": str(path), "error": (path / "config.json").read_text()}))'"""
    found = ask(fake_engine(script), tmp_path)
    assert found
    assert found.refusal
    assert "auto_map" not in found.refusal.message
    assert found.refusal.rule == "owner/model"  # and the user's name stands for the folder that was staged


def test_answers_are_cached_until_something_changes(fake_engine: FakeEngine, tmp_path: Path) -> None:
    count = tmp_path / "count"
    engine = fake_engine(f"echo x >> {count}; echo '{json.dumps(ANSWER)}'")
    assert ask(engine, tmp_path, only_cached=True) is None
    first, again = ask(engine, tmp_path), ask(engine, tmp_path)
    assert first
    assert again
    assert not first.cached
    assert again.cached
    assert again.changes == first.changes
    assert ask(engine, tmp_path, only_cached=True)
    asked_for = [
        lambda: ask(engine, tmp_path, "--page-size", "16"),
        lambda: (
            (model(tmp_path)["owner/model"] / "config.json").write_text("{}")
            and resolver.resolve(["--model-path", "owner/model"], PRO, 8, {"owner/model": tmp_path / "model"}, engine)
        ),
        lambda: (engine.location / "sglang" / "a.py").write_text("A = 22\n") and ask(engine, tmp_path),
        lambda: resolver.resolve(["--model-path", "x"], find("B200"), 8, {}, engine),
        lambda: resolver.resolve(["--model-path", "x"], find("B200"), 8, {}, engine, env={"SGLANG_X": "1"}),
    ]
    for number, one in enumerate(asked_for, start=2):
        one()
        assert len(count.read_text().splitlines()) == number


def test_what_the_engine_reads_of_this_shell_counts_where_the_launch_has_it(
    fake_engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "said"
    engine = fake_engine(f"echo \"$SGLANG_X $NCCL_ALGO $OTHER\" >> {said}; echo '{json.dumps(ANSWER)}'")
    for name in ("SGLANG_X", "NCCL_ALGO", "OTHER"):
        monkeypatch.setenv(name, name.lower())
    for env in ({}, {"SGLANG_X": "launch"}):
        resolver.resolve(["--model-path", "x"], find("B200"), 8, {}, engine, env=env)
    assert said.read_text().splitlines() == ["  other", "launch  other"]


def test_a_damaged_cache_is_asked_again(fake_engine: FakeEngine, tmp_path: Path) -> None:
    engine = fake_engine(f"echo '{json.dumps(ANSWER)}'")
    ask(engine, tmp_path)
    (kept,) = (tmp_path / "cache" / "sglang-bw" / "resolved").glob("*.json")
    kept.write_text("{")
    found = ask(engine, tmp_path)
    assert found
    assert not found.cached


@pytest.mark.parametrize(
    ("script", "kind", "says"),
    [
        pytest.param("echo 'ImportError: libx.so' >&2; exit 1", ResolverError, "libx.so", id="it dies"),
        pytest.param("exit 3", ResolverError, "exit code 3 without a word", id="silent"),
        pytest.param("kill -9 $$", ResolverError, "exit code -9", id="killed"),
        pytest.param("echo nonsense", ResolverError, "failed", id="no answer"),
        pytest.param(
            "echo \"ModuleNotFoundError: No module named 'sglang'\" >&2; exit 1",
            NotInstalledError,
            "no sglang",
            id="none",
        ),
        pytest.param("""echo '{"outcome": "too old", "error": "x"}'""", EngineTooOldError, "x", id="too old"),
    ],
)
def test_a_child_that_fails(
    fake_engine: FakeEngine, tmp_path: Path, script: str, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        ask(fake_engine(script), tmp_path)


def test_a_child_that_hangs(fake_engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "TIMEOUT_S", 0.2)
    with pytest.raises(ResolverError, match="did not end within"):
        ask(fake_engine("exec sleep 30"), tmp_path)


def test_a_part_that_is_not_there() -> None:
    assert look_up({"a": {"b": 1}}, "a.b") == 1
    assert look_up({"a": 1}, "a.b.c") is None


# The real engine.


@pytest.fixture(scope="module")
def installed() -> EngineFiles:
    from sglang_bw.fork.verify import inspect_environment

    there = inspect_environment(Environment.probe())
    if there.location is None:
        pytest.skip("no engine is installed")
    return EngineFiles(Path(sys.executable), there.location, there.version)


def of_recipe(name: str, machine: Hardware, engine: EngineFiles, *extra: str) -> Resolution:
    from sglang_bw.launch import command as commands

    recipe = lookup.find(name)
    built = commands.build(recipe, machine, {}, version=engine.version, extra=flag_lists.parse(extra))
    folders = {}
    for weights in (recipe.target, recipe.draft):
        if weights and weights.id:
            found = configs.find(weights)
            assert found
            folders[weights.id] = found.path
    argv = flag_lists.tokens(built.flags)
    answer = resolver.resolve(argv, find(machine.board), machine.count, folders, engine, env=built.env)
    assert answer
    return answer


@pytest.mark.engine
def test_kimi_on_sm120(installed: EngineFiles) -> None:
    found = of_recipe("kimi-k2.5-int4-eagle3", Hardware("cuda", "sm120", "RTX PRO 6000", "pcie", 8), installed)
    assert found.refusal is None
    assert found.effective["mem_fraction_static"] == 0.9
    assert look_up(found.effective, "cuda_graph_config.decode.max_bs") == 16
    assert look_up(found.effective, "cuda_graph_config.prefill.backend") == "breakable"  # what CUDA gets, not a CPU
    rules = {change.name: change.rule for change in found.changes}
    assert rules["sampling_backend"] == "sampling_backend_default"
    assert "attention_backend" not in rules  # asked for, and kept
    assert found.asked["tp_size"] == 8
    assert found.effective["model_path"] == "moonshotai/Kimi-K2.5"


@pytest.mark.engine
def test_the_engine_refuses_what_has_no_kernels(installed: EngineFiles) -> None:
    machine = Hardware("cuda", "sm120", "RTX PRO 6000", "pcie", 8)
    found = of_recipe("kimi-k2.5-int4-eagle3", machine, installed, "--attention-backend", "fa3")
    assert found.refusal
    assert "fa3" in found.refusal.message
    assert found.refusal.rule.startswith("handle_attention")


@pytest.mark.engine
def test_sm100_resolves_otherwise(installed: EngineFiles) -> None:
    machine = Hardware("cuda", "sm100", "B200", "nvlink", 8)
    found = of_recipe("kimi-k2.5-int4-eagle3", machine, installed)
    assert found.effective["attention_backend"] == "trtllm_mla"
    assert found.effective["page_size"] == 64
