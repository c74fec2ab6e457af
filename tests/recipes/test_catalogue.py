"""The bundled recipes: honest, and held against the releases that they are for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sglang_bw.cli.recipes import recipes as command
from sglang_bw.errors import OutputError, PlanDoesNotFitError, RecipeError
from sglang_bw.launch import command as commands
from sglang_bw.plan.checkpoint import read_directory
from sglang_bw.recipes import configs, flags, lookup
from sglang_bw.recipes.hardware import Hardware
from sglang_bw.recipes.review import review
from sglang_bw.recipes.schema import Recipe

LARGE = [name for name in lookup.catalogue() if name != "tiny"]
PRO = Hardware("cuda", "sm120", "RTX PRO 6000", "pcie", 8)
B200 = Hardware("cuda", "sm100", "B200", "nvlink", 8)


def test_the_catalogue() -> None:
    assert set(lookup.catalogue()) == {
        "tiny",
        "kimi-k2.5-int4-eagle3",
        "kimi-k2.5-nvfp4-eagle3",
        "glm-5.1-nvfp4-mtp",
        "qwen3.5-397b-nvfp4-mtp",
        "minimax-m2.7-nvfp4-eagle3",
        "qwen3-8b-eagle3",
    }


@pytest.mark.parametrize("name", LARGE)
def test_a_recipe_says_what_it_rests_on(name: str) -> None:
    recipe = lookup.find(name)
    assert recipe.composition.run_together
    assert recipe.composition.untested
    assert recipe.evidence
    assert not any(row.ours for row in recipe.evidence), "nobody here has such a machine"
    assert recipe.hardware.board
    for weights in (recipe.target, recipe.draft):
        assert weights is not None
        assert weights.revision or weights.not_pinned or not weights.id
        if weights.config:
            shape = read_directory(configs.shipped(weights.config).path).shape
            assert shape.layers >= 1


@pytest.mark.parametrize("name", list(lookup.catalogue()))
def test_every_flag_is_one_of_its_releases(name: str) -> None:
    found = review(lookup.find(name))
    assert found.errors == ()
    assert all("is not pinned" in warning for warning in found.warnings)


def test_the_same_recipe_on_two_architectures() -> None:
    recipe = lookup.find("kimi-k2.5-nvfp4-eagle3")
    here, there = (commands.build(recipe, machine, {}) for machine in (PRO, B200))
    assert flags.value(here.flags, "attention-backend") == "triton"
    assert flags.value(there.flags, "attention-backend") == "cutedsl_mla"
    assert flags.value(here.flags, "moe-runner-backend") == "flashinfer_cutlass"
    assert flags.value(there.flags, "moe-runner-backend") == "flashinfer_trtllm"
    assert here.env["NCCL_P2P_LEVEL"] == "SYS"
    assert "NCCL_P2P_LEVEL" not in there.env
    assert flags.value(here.flags, "mem-fraction-static") == "0.9"
    assert flags.value(there.flags, "mem-fraction-static") == "0.85"


def test_graphs_take_the_flag_of_the_release() -> None:
    recipe = lookup.find("kimi-k2.5-int4-eagle3")
    old, new = (commands.build(recipe, PRO, {}, version=version) for version in ("0.5.9", "0.5.23+bw.1"))
    assert flags.value(old.flags, "cuda-graph-max-bs") == "16"
    assert flags.value(new.flags, "cuda-graph-max-bs-decode") == "16"
    assert not flags.has(new.flags, "cuda-graph-max-bs")


def test_a_target_with_its_own_draft_names_no_draft_model() -> None:
    command_line = commands.build(lookup.find("glm-5.1-nvfp4-mtp"), PRO, {})
    assert flags.value(command_line.flags, "speculative-algorithm") == "NEXTN"
    assert not flags.has(command_line.flags, "speculative-draft-model-path")
    assert command_line.speculates


def test_overrides_may_change_the_speculation() -> None:
    recipe = Recipe.model_validate(
        {
            "id": "x",
            "target": "o/t",
            "draft": "o/d",
            "spec": {"steps": 3, "args": {"speculative-attention-mode": "decode"}},
            "overrides": [
                {"when": {"gpus": [2, 4]}, "spec": {"steps": 1, "draft_tokens": 2}, "memory": {"fraction": 0.7}},
                {"when": {"board": "RTX 5090"}, "spec": {"args": {"speculative-attention-mode": "prefill"}}},
            ],
        }
    )
    two = recipe.on(Hardware(count=2, board="RTX 5090"))
    assert two.spec
    assert (two.spec.steps, two.spec.args) == (1, {"speculative-attention-mode": "prefill"})
    assert two.args["mem-fraction-static"] == 0.7
    assert recipe.on(Hardware()) == recipe.on(Hardware(count=8))


def test_check_names_flags_of_another_release(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(
        "id: old\nengine: {sglang: '>=0.5.22,<0.5.24'}\ntarget: o/t\n"
        "args: {mamba-scheduler-strategy: extra_buffer, tp: 2, disable-cuda-graph: true}\n"
    )
    failed = CliRunner().invoke(command, ["check", str(file)])
    assert isinstance(failed.exception, RecipeError)
    assert "args.mamba-scheduler-strategy: sglang 0.5.23 has --mamba-radix-cache-strategy" in failed.exception.message
    assert "write mamba-radix-cache-strategy extra_buffer" in failed.exception.message
    file.write_text(file.read_text().replace("mamba-scheduler", "mamba-radix-cache"))
    passed = CliRunner().invoke(command, ["check", str(file), "--json"], catch_exceptions=False)
    (row,) = json.loads(passed.stdout)
    assert row["ok"]
    assert any("short for --tp-size" in warning for warning in row["warnings"])
    assert any("--disable-cuda-graph is deprecated" in warning for warning in row["warnings"])
    assert any("target o/t is not pinned" in warning for warning in row["warnings"])


def test_check_knows_the_shipped_configurations(tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text("id: odd\ntarget: {id: o/t, config: kimi}\n")
    failed = CliRunner().invoke(command, ["check", str(file)])
    assert "target.config: 'kimi' does not ship" in str(failed.exception)


NEW = ["new", "moonshotai/Kimi-K2.5", "--draft", "lightseekorg/kimi-k2.5-eagle3-mla", "--gpus", "8xRTX PRO 6000"]


def test_new_writes_a_recipe_that_passes_the_check(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    CliRunner().invoke(command, [*NEW, "-o", str(file)], catch_exceptions=False)
    recipe = lookup.read(file)
    assert review(recipe).errors == ()
    assert recipe.draft
    assert recipe.draft.kind == "mla"
    assert recipe.args["tp-size"] == 8
    assert recipe.hardware.gpus == (8,)
    assert recipe.memory.fraction
    assert "nobody has run" in recipe.composition.untested
    again = CliRunner().invoke(command, [*NEW, "-o", str(file)])
    assert isinstance(again.exception, OutputError)


def test_new_takes_the_target_s_own_layers(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        command, ["new", "lukealonso/GLM-5.1-NVFP4", "--gpus", "8xRTX PRO 6000", "--json"], catch_exceptions=False
    )
    recipe = json.loads(result.stdout)
    assert recipe["draft"]["kind"] == "mtp"
    assert recipe["spec"]["algorithm"] == "NEXTN"


def test_new_does_not_write_what_does_not_fit() -> None:
    failed = CliRunner().invoke(command, [*NEW[:-1], "2xRTX PRO 6000"])
    assert isinstance(failed.exception, PlanDoesNotFitError)
    assert failed.exception.exit_code == 50


def test_new_with_an_id_that_is_none() -> None:
    result = CliRunner().invoke(command, [*NEW, "--id", "A b/../c"])
    assert result.exit_code == 2
    assert "is no id" in result.output


def test_a_part_of_an_id_tells_the_recipes_that_have_it() -> None:
    hint = lookup.unknown("kimi").hint
    assert "kimi-k2.5-int4-eagle3 or kimi-k2.5-nvfp4-eagle3?" in hint
    assert "tiny" not in hint.split("?")[0]
