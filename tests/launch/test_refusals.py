"""What `serve` refuses before the load: the plan's rules and memory, on the GPUs that the driver shows."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sglang_bw.cli import cli, host_checks, planning, refusals
from sglang_bw.cli.launch import serve
from sglang_bw.cli.refusals import Launch
from sglang_bw.cli.typed import Typed
from sglang_bw.errors import BwError, OtherEngineError, PlanDoesNotFitError, PlanRefusedError
from sglang_bw.host import boards, nvml
from sglang_bw.host.gpus import Gpus
from sglang_bw.launch import command as commands
from sglang_bw.launch import engine as engines
from sglang_bw.recipes import flags, lookup
from sglang_bw.recipes.hardware import Hardware
from sglang_bw.recipes.schema import Recipe
from tests.host.fake_host import Board, Host
from tests.launch.serving import free_port, write_tree

READ = nvml.read


@pytest.fixture(autouse=True)
def _no_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "tree")


def gpus(count: int = 8, **facts: object) -> Gpus:
    return nvml.read(Host(boards=[Board(**facts) for _ in range(count)]).nvml())  # type: ignore[arg-type]


def launch(name: str, here: Gpus, tree: Path, *extra: str, recipe: Recipe | None = None) -> Launch:
    recipe = recipe or lookup.find(name)
    engine = engines.find(tree=tree)
    machine = planning.machine(recipe, "cuda", here)
    command = commands.build(recipe, machine, {}, extra=flags.parse(extra), version=engine.installation.version)
    return Launch(recipe, command, planning.planned(engine), planning.seen(here))


def test_the_machine_that_the_driver_shows() -> None:
    machine, board = planning.seen(gpus(4)) or (None, None)
    assert machine
    assert board
    assert (machine.arch, machine.count, machine.fabric) == ("sm120", 4, "pcie")
    assert board.memory_mib == 97887
    two = planning.seen(gpus(4), "0-1")
    assert two
    assert two[0].count == 2
    unknown = planning.seen(gpus(1, name="NVIDIA RTX 9999", memory=50000 << 20))
    assert unknown
    assert (unknown[1].name, unknown[1].memory_mib) == ("NVIDIA RTX 9999", 50000)
    assert planning.seen(Gpus(problem="no driver")) is None
    assert planning.seen(gpus(4), "") is None  # CUDA_VISIBLE_DEVICES, set and empty


def test_a_recipe_on_its_machine_passes(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = refusals.check(launch("kimi-k2.5-int4-eagle3", gpus(), tree), force=False)
    assert made
    assert made.ledger.verdict == "fits"
    assert "warning" not in capsys.readouterr().err


def test_what_does_not_fit_is_refused(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = launch("kimi-k2.5-int4-eagle3", gpus(), tree, "--mem-fraction-static", "0.70")
    with pytest.raises(PlanDoesNotFitError, match="keeps 28"):
        refusals.check(wrong, force=False)
    assert refusals.check(wrong, force=True)
    assert "(--force)" in capsys.readouterr().err


def test_a_backend_without_kernels_is_refused(tree: Path) -> None:
    wrong = launch("kimi-k2.5-int4-eagle3", gpus(), tree, "--moe-runner-backend", "flashinfer_trtllm")
    with pytest.raises(PlanRefusedError, match="trtllm-gen") as error:
        refusals.check(wrong, force=False)
    assert "sglang-bw plan" in error.value.hint


def test_warnings_are_told(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refusals.check(launch("kimi-k2.5-int4-eagle3", gpus(), tree, "--kv-cache-dtype", "fp8_e4m3"), force=False)
    told = capsys.readouterr().err
    assert "kimi-int4-fp8-kv" in told


def test_two_arms_that_share_a_warning_have_it_told_once(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: set[str] = set()
    for more in ((), ("--mem-fraction-static", "0.9")):
        arm = launch("kimi-k2.5-int4-eagle3", gpus(), tree, "--kv-cache-dtype", "fp8_e4m3", *more)
        refusals.check(arm, force=False, said=said)
    assert capsys.readouterr().err.count("kimi-int4-fp8-kv") == 1


@pytest.mark.parametrize(
    ("variable", "rule"),
    [
        pytest.param({"NCCL_ALGO": "Tree"}, "NCCL Tree could not be captured", id="refused"),
        pytest.param({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable-segments-ipc", id="segments"),
        pytest.param({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "expandable-segments-newer", id="newer name"),
        pytest.param({"SGLANG_SIMULATE_ACC_LEN": "3"}, "simulated-acceptance", id="simulated"),
    ],
)
def test_rules_see_what_the_engine_inherits(
    tree: Path, capsys: pytest.CaptureFixture[str], variable: dict[str, str], rule: str
) -> None:
    mine = launch("kimi-k2.5-int4-eagle3", gpus(), tree)
    refusals.check(mine, force=True)
    assert rule not in capsys.readouterr().err
    refusals.check(replace(mine, environ=variable), force=True)
    assert rule in capsys.readouterr().err
    # What the launch itself sets is what the engine gets.
    own = replace(mine.command, env={**mine.command.env, **dict.fromkeys(variable, "")})
    refusals.check(replace(mine, environ=variable, command=own), force=True)
    assert rule not in capsys.readouterr().err


def test_an_engine_that_was_asked_is_not_another_one_for_a_variable_that_no_rule_names(tree: Path) -> None:
    mine = launch("kimi-k2.5-int4-eagle3", gpus(), tree)
    made = refusals.check(replace(mine, environ={"EDITOR": "ed", "HF_TOKEN": "secret"}), force=False)
    assert made
    assert not {"EDITOR", "HF_TOKEN"} & set(made.question.env)


@pytest.mark.parametrize("here", [gpus(1), Gpus(problem="no driver")], ids=["unknown model", "no GPUs"])
def test_a_launch_that_is_not_planned_has_an_environment_too(
    tree: Path, capsys: pytest.CaptureFixture[str], here: Gpus
) -> None:
    mine = launch("mine", here, tree, recipe=Recipe.model_validate({"id": "mine", "target": "owner/unheard-of"}))
    refusals.check(mine, force=False)
    assert "warning" not in capsys.readouterr().err
    refusals.check(replace(mine, environ={"SGLANG_SIMULATE_ACC_LEN": "3"}), force=False)
    assert capsys.readouterr().err.count("warning: simulated-acceptance: ") == 1


def test_a_model_nobody_knows_is_not_planned(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe.model_validate({"id": "mine", "target": "owner/unheard-of"})
    assert refusals.check(launch("mine", gpus(1), tree, recipe=recipe), force=False) is None
    assert "not planned: no configuration of the target owner/unheard-of" in capsys.readouterr().err


@pytest.mark.parametrize("here", [gpus(), Gpus(problem="no driver")], ids=["gpus", "none"])
@pytest.mark.parametrize("engine", [{"patched": False}, {"without": "goodput-policy"}], ids=["stock", "older series"])
def test_a_flag_of_a_patch_that_the_engine_does_not_have(here: Gpus, engine: dict[str, Any], tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "older", **engine)
    recipe = lookup.find("kimi-k2.5-int4-eagle3")
    machine = planning.machine(recipe, "cuda", gpus())
    version = engines.find(tree=tree).installation.version
    command = commands.build(recipe, machine, {}, version=version)
    with pytest.raises(OtherEngineError, match="comes with the patch goodput-policy") as error:
        refusals.check(
            Launch(recipe, command, planning.planned(engines.find(tree=tree)), planning.seen(here)), force=True
        )
    assert "sglang-bw install" in error.value.hint


def test_flags_are_checked_without_gpus(tree: Path) -> None:
    recipe = lookup.find("tiny")
    command = commands.build(
        recipe, planning.machine(recipe, "cpu", None), {}, extra=flags.parse(["--cuda-graph-bs", "1"])
    )
    with pytest.raises(PlanRefusedError, match="--cuda-graph-bs-decode 1 instead"):
        refusals.check(Launch(recipe, command, planning.planned(engines.find(tree=tree)), None), force=False)


def test_speculation_that_loses(tree: Path) -> None:
    recipe = lookup.find("kimi-k2.5-int4-eagle3")
    crowded = recipe.model_copy(
        update={"workloads": (recipe.workloads[1].model_copy(update={"context": 65536, "concurrency": 64}),)}
    )
    made = refusals.check(launch("kimi", gpus(), tree, recipe=crowded), force=False)
    cell = refusals.loses(made, crowded)
    assert cell
    assert cell.speedup
    assert cell.speedup.mid < 0.94
    assert refusals.loses(refusals.check(launch("kimi-k2.5-int4-eagle3", gpus(), tree), force=False), recipe) is None


def run(tree: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> BwError:
    here = gpus()
    monkeypatch.setattr(host_checks.nvml, "read", lambda _library: here)
    options = ["--device", "cuda", "--engine-tree", str(tree), "--port", str(free_port())]
    result = CliRunner().invoke(serve, [arguments[0], *options, *arguments[1:]])
    monkeypatch.setattr(host_checks.nvml, "read", READ)
    assert isinstance(result.exception, BwError), (result.output, result.exception)
    return result.exception


def test_serve_refuses_before_it_asks_the_hub(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "check", lambda *_a, **_k: pytest.fail("the hub was asked first"))
    error = run(tree, monkeypatch, "kimi-k2.5-int4-eagle3", "--", "--mem-fraction-static", "0.70")
    assert error.exit_code == 50
    error = run(tree, monkeypatch, "kimi-k2.5-int4-eagle3", "--", "--attention-backend", "fa3")
    assert error.exit_code == 51


def test_no_gpu_is_visible(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(host_checks.hub, "wanted", lambda *_: ())
    error = run(tree, monkeypatch, "qwen3-8b-eagle3")
    assert error.exit_code == 62
    assert "CUDA_VISIBLE_DEVICES is set and empty" in error.message
    assert "unset CUDA_VISIBLE_DEVICES" in error.hint


def test_a_machine_of_another_size_is_told_with_its_subject(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refusals.check(launch("kimi-k2.5-int4-eagle3", gpus(4), tree, "--tp-size", "4"), force=True)
    assert "warning: the recipe's machine: its number of GPUs is 8, here it is 4" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize("command", ["serve", "plan"])
def test_no_spec_goes_before_the_dashes(command: str) -> None:
    done = CliRunner().invoke(cli, [command, "tiny", "--", "--no-spec"])
    assert done.exit_code == 2
    assert f"--no-spec is an option of `{command}`, it goes before '--'" in " ".join(done.output.split())


def test_serve_looks_at_the_variables_of_its_shell(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setattr(host_checks, "check", lambda *_a, **_k: pytest.fail("it went on"))
    error = run(tree, monkeypatch, "kimi-k2.5-int4-eagle3")
    assert error.exit_code == 51
    assert "NCCL Tree" in error.message


@pytest.mark.parametrize("way", ["recipe", "file", "GPUs"])
def test_the_next_command_works_when_it_is_pasted(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    name = "kimi-k2.5-int4-eagle3"
    if way == "file":
        (tmp_path / "my recipe.yaml").write_text(lookup.catalogue()[name].read_text().replace(f"id: {name}", "id: t"))
        name = "./my recipe.yaml"
        monkeypatch.chdir(tmp_path)
    options = ["--no-spec", "--gpus", "0-7"] if way == "GPUs" else []
    flag = ["--mem-fraction-static", "0.70", "--api-key", "s3cret"]
    error = run(tree, monkeypatch, name, *options, "--", *flag)
    assert error.exit_code == 50
    line = error.hint.split("`")[1]
    spec = " --no-spec" if way == "GPUs" else ""
    assert line == (
        f"sglang-bw plan {shlex.quote(name)} --gpus '8xRTX PRO 6000' --engine-tree {tree}{spec}"
        " -- --mem-fraction-static 0.70"
    )
    done = CliRunner().invoke(cli, [*shlex.split(line)[1:3], "--no-resolve", *shlex.split(line)[3:]])
    assert isinstance(done.exception, PlanDoesNotFitError)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        pytest.param(Typed("./ok", draft="./d"), "./ok --draft ./d --gpus 4xH200 -- --tp-size 1", id="a model"),
        pytest.param(Typed("./ok", draft="./d", divides=True), "./ok --draft ./d --gpus 4xH200", id="divided"),
        pytest.param(
            Typed("o/m", engine_flags=("--tp-size=4",)), "o/m --gpus 4xH200 -- --tp-size=4", id="divided by hand"
        ),
        pytest.param(Typed("tiny", model="a b"), "tiny --model-path 'a b' --gpus 4xH200", id="a recipe"),
    ],
)
def test_the_line_of_a_model(typed: Typed, expected: str) -> None:
    seen = (Hardware("cuda", "sm90", "H200", "nvlink", 4), boards.find("H200"))
    assert typed.plan(seen) == f"sglang-bw plan {expected}"


def test_the_line_of_a_board_nobody_knows_and_of_none() -> None:
    seen = planning.seen(gpus(2, name="NVIDIA RTX 9999", memory=50000 << 20))
    line = Typed("tiny").plan(seen)
    assert line == "sglang-bw plan tiny --gpus '2xNVIDIA RTX 9999:50000MiB:sm120'"
    assert boards.parse_gpus(shlex.split(line)[-1])[1].memory_mib == 50000
    assert Typed("tiny").plan(None) == "sglang-bw plan tiny"


def test_serve_leaves_speculation_out_where_it_loses(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "crowded.yaml"
    text = lookup.catalogue()["kimi-k2.5-int4-eagle3"].read_text().replace("  trust-remote-code: true\n", "")
    start, end = text.index("workloads:"), text.index("composition:")
    loads = "baseline_where_it_loses: true\nworkloads: [{name: x, context: 65536, concurrency: 64}]\n"
    file.write_text(text[:start] + loads + text[end:])
    started: list[commands.Command] = []

    def stop(command: commands.Command, *_arguments: object, **_options: object) -> None:
        started.append(command)
        raise BwError("far enough")

    monkeypatch.setattr(host_checks, "check", stop)
    run(tree, monkeypatch, str(file), "--allow-stock")
    run(tree, monkeypatch, str(file), "--allow-stock", "--", "--speculative-algorithm", "EAGLE3")
    assert [command.speculates for command in started] == [False, True]


def test_a_recipe_for_gpus_does_not_start_on_a_cpu() -> None:
    found = {
        name: refusals.only_for_gpus(recipe, commands.build(recipe, planning.machine(recipe, "cpu", None), {}))
        for name in lookup.catalogue()
        for recipe in [lookup.find(name)]
    }
    assert found.pop("tiny") is None
    assert all(problem is not None and problem.exit_code == 52 for problem in found.values())
    assert "RTX PRO 6000" in str(found["kimi-k2.5-int4-eagle3"])
