from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from sglang_bw.cli.recipes import recipes as command
from sglang_bw.errors import RecipeError, UnknownRecipeError
from sglang_bw.recipes import lookup
from sglang_bw.recipes.schema import Hardware, Recipe

GOOD = """\
id: mine
engine: {sglang: ">=0.5.23,<0.5.24"}
target: {id: owner/target, revision: abc}
draft: ./draft
spec: {steps: 3, topk: 4, draft_tokens: 8, args: {speculative-attention-mode: decode}}
args: {max-total-tokens: 4096, disable-radix-cache: true}
env: {NCCL_DEBUG: WARN, SGLANG_X: 1}
overrides:
  - {when: {device: cuda}, args: {attention-backend: triton, disable-radix-cache: null}, env: {SGLANG_X: 2}}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_every_bundled_recipe_is_valid_and_named_as_its_file() -> None:
    assert "tiny" in lookup.catalogue()
    for name in lookup.catalogue():
        recipe = lookup.find(name)
        assert recipe.id == name
        assert recipe.engine.sglang
        assert recipe.title


def test_tiny_sets_its_token_pool() -> None:
    tiny = lookup.find("tiny")
    assert 0 < tiny.args["max-total-tokens"] <= 32768  # type: ignore[operator]
    assert tiny.spec is not None
    assert (tiny.spec.algorithm, tiny.spec.steps, tiny.spec.topk, tiny.spec.draft_tokens) == ("EAGLE3", 3, 1, 4)


def test_a_recipe_file(tmp_path: Path) -> None:
    recipe = lookup.read(write(tmp_path, GOOD))
    assert recipe.target.id == "owner/target"
    assert recipe.draft is not None
    assert recipe.draft.path == tmp_path / "draft"  # beside the file, not in the working directory
    cpu, cuda = recipe.on(Hardware(device="cpu")), recipe.on(Hardware(device="cuda"))
    assert cpu.args == {"max-total-tokens": 4096, "disable-radix-cache": True}
    assert cpu.env == {"NCCL_DEBUG": "WARN", "SGLANG_X": "1"}
    assert cuda.args == {"max-total-tokens": 4096, "disable-radix-cache": None, "attention-backend": "triton"}
    assert cuda.env == {"NCCL_DEBUG": "WARN", "SGLANG_X": "2"}


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ("0.5.23", True),
        ("0.5.23+bw.1", True),
        ("0.5.23+bw.1.d0a1b2c3", True),
        ("0.5.22+bw.4", False),
        ("0.5.24", False),
    ],
)
def test_engine_range(version: str, accepted: bool) -> None:
    assert lookup.find("tiny").engine.accepts(version) is accepted


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        pytest.param("args:", "arg:", "mine.yaml:6: unknown key 'arg'; did you mean 'args'?", id="unknown key"),
        pytest.param(
            "steps: 3, topk",
            "steps: 3, topks",
            "mine.yaml:5: unknown key 'spec.topks'; did you mean 'spec.topk'?",
            id="nested",
        ),
        pytest.param(
            "{device: cuda}",
            "{devise: cuda}",
            "mine.yaml:9: unknown key 'overrides[0].when.devise'; did you mean 'overrides[0].when.device'?",
            id="condition",
        ),
        pytest.param("{device: cuda}", "{}", "overrides[0].when: needs a condition", id="no condition"),
        pytest.param("{device: cuda}", "{arch: sm121x}", "overrides[0].when.arch", id="no architecture"),
        pytest.param(
            "env: {SGLANG_X: 2}}",
            "spec: {topk: 1}}",
            "mine.yaml: overrides[0].spec: Value error, a chain (topk 1) of 3 steps verifies 4",
            id="override breaks the chain",
        ),
        pytest.param("max-total-tokens", "mem-fraction-static", "is set by memory.fraction", id="memory flag"),
        pytest.param("draft: ./draft", "draft: {kind: mha}", "needs exactly one of id, path", id="draft nowhere"),
        pytest.param(
            "draft: ./draft", "draft: {kind: mtp}", "kind mtp needs spec.algorithm NEXTN or EAGLE", id="mtp algorithm"
        ),
        pytest.param(
            "engine:", "xyzzy:", "mine.yaml:2: unknown key 'xyzzy'; known here: id, title, engine,", id="far from any"
        ),
        pytest.param("id: mine\n", "", "mine.yaml: the key 'id' is missing", id="missing key"),
        pytest.param(
            "id: owner/target, rev",
            "rev",
            "target: needs exactly one of id, path and bundled, has none",
            id="no weights",
        ),
        pytest.param("id: owner/target,", "id: o/t, path: ./x,", "has id and path", id="two kinds of weights"),
        pytest.param("draft: ./draft\n", "", "mine.yaml: spec needs a draft", id="spec without draft"),
        pytest.param(
            "topk: 4, draft_tokens: 8", "topk: 1, draft_tokens: 8", "a chain (topk 1) of 3 steps verifies 4", id="chain"
        ),
        pytest.param(
            "draft_tokens: 8",
            "draft_tokens: 99",
            "3 steps with topk 4 draft at most 37 draft_tokens",
            id="tree too big",
        ),
        pytest.param(
            "draft_tokens: 8",
            "draft_tokens: many",
            "spec.draft_tokens: input should be a valid integer",
            id="no number",
        ),
        pytest.param(">=0.5.23,<0.5.24", "newest", "'newest' is not a version range", id="version range"),
        pytest.param("max-total-tokens", "port", "args: 'port' is set by `serve --port`", id="owned flag"),
        pytest.param("max-total-tokens", "model", "args: 'model' is set by target", id="alias of an owned flag"),
        pytest.param("max-total-tokens", "--max-total-tokens", "write it without leading dashes", id="dashes"),
        pytest.param(
            "{max-total", "{speculative-attention-mode: a, max-total", "belongs into spec.args", id="spec flag in args"
        ),
        pytest.param(
            "NCCL_DEBUG:", "NCCL-DEBUG:", "'NCCL-DEBUG' is not the name of an environment variable", id="env name"
        ),
        pytest.param(
            "id: mine\n",
            "id: mine\nid: yours\n",
            "mine.yaml:2: the key 'id' is there twice (first on line 1)",
            id="twice",
        ),
        pytest.param("id: mine", "id: [mine", "mine.yaml:2: not valid YAML", id="not YAML"),
        pytest.param("id: mine", "id: 2026-99-99", "mine.yaml: not valid YAML: month must be", id="no date"),
        pytest.param(
            "draft: ./draft", "draft: &x [*x]", "mine.yaml:4: the alias at 'draft[0]' contains itself", id="recursive"
        ),
        pytest.param(
            "env: {NCCL",
            "env: &x {A: {B: *x}, NCCL",
            "mine.yaml:7: the alias at 'env.A.B' contains itself",
            id="far recursion",
        ),
        pytest.param("draft: ./draft", f"draft: {'[' * 5000}", "mine.yaml: nested too deep", id="deep"),
        pytest.param(
            "draft: ./draft",
            'draft: "~no-such-user/m"',
            "mine.yaml:4: draft.path: there is no home directory ~no-such-user",
            id="home directory of nobody",
        ),
        pytest.param("draft: ./draft", 'draft: ""', "draft.id: string should have at least 1 character", id="empty id"),
        pytest.param(GOOD, "- a\n", "a recipe is a mapping", id="a list"),
        pytest.param(GOOD, "", "a recipe is a mapping", id="empty"),
    ],
)
def test_findings(tmp_path: Path, old: str, new: str, finding: str) -> None:
    assert old in GOOD
    with pytest.raises(RecipeError) as error:
        lookup.read(write(tmp_path, GOOD.replace(old, new)))
    assert finding in str(error.value)
    assert error.value.exit_code == 31


def test_all_findings_are_reported_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (
        GOOD.replace("max-total-tokens: 4096", "port: 1, host: x")
        .replace("steps: 3", "steps: 0")
        .replace("\nenv:", "\nenvs:")
    )
    with pytest.raises(RecipeError) as error:
        lookup.read(write(tmp_path, text))
    assert "has 4 findings" in error.value.message
    lines = [line.split(":")[1] for line in error.value.message.splitlines()[1:]]
    assert lines == sorted(lines) == ["5", "6", "6", "7"]


def test_an_alias_that_is_no_loop(tmp_path: Path) -> None:
    text = "id: mine\ntarget: o/t\nargs: &same {a: 1}\noverrides: [{when: {gpus: 2}, args: *same}]\n"
    recipe = lookup.read(write(tmp_path, text))
    assert recipe.on(Hardware()).args == recipe.on(Hardware(count=2)).args == {"a": 1}


def test_a_path_below_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    recipe = lookup.read(write(tmp_path, GOOD.replace("./draft", "~/draft")))
    assert recipe.draft is not None
    assert recipe.draft.path == tmp_path / "home" / "draft"


@pytest.mark.parametrize("name", ["tny", "Tiny", "tiny-pair", "tin"])
def test_unknown_recipe_names_the_nearest(name: str) -> None:
    with pytest.raises(UnknownRecipeError, match=r"did you mean tiny\?") as error:
        lookup.find(name)
    assert error.value.exit_code == 30


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UnknownRecipeError, match="cannot read the recipe"):
        lookup.find(str(tmp_path / "absent.yaml"))


def test_schema_has_no_free_keys() -> None:
    """Free keys would let a misspelt one pass; only flags, variables and numbers are maps."""
    schema = Recipe.model_json_schema()
    assert all(part.get("additionalProperties") is False for part in [schema, *schema["$defs"].values()])


def test_commands(tmp_path: Path) -> None:
    run = CliRunner().invoke
    listed = run(command, ["list"])
    assert "tiny" in listed.output
    assert ">=0.5.23" in listed.output
    shown = run(command, ["show", "tiny"])
    assert shown.output == lookup.catalogue()["tiny"].read_text()
    good, bad = write(tmp_path, GOOD), tmp_path / "bad.yaml"
    bad.write_text("id: X\n")
    assert "ok (mine)" in run(command, ["check", str(good)]).output
    failed = run(command, ["check", str(bad), str(good), str(bad)])
    assert isinstance(failed.exception, RecipeError)
    assert failed.exception.message.count("the key 'target' is missing") == 2


def test_check_knows_a_mistyped_id(tmp_path: Path) -> None:
    for name in ("tinny", "Tiny"):
        error = CliRunner().invoke(command, ["check", name]).exception
        assert isinstance(error, UnknownRecipeError)
        assert f"no recipe {name!r}" in error.message
        assert "tiny" in str(error.hint)
    assert "no recipe ''" in str(CliRunner().invoke(command, ["check", ""]).exception)
    (tmp_path / "any").write_text(GOOD)
    assert "ok (mine)" in CliRunner().invoke(command, ["check", str(tmp_path / "any")]).output


def test_check_reports_every_file(tmp_path: Path) -> None:
    """A file that cannot be read takes nothing away from the findings of the others."""
    bad, absent = write(tmp_path, "id: X\n"), tmp_path / "absent.yaml"
    mixed = CliRunner().invoke(command, ["check", str(absent), str(bad), str(tmp_path)]).exception
    assert isinstance(mixed, RecipeError)
    assert f"cannot read the recipe {absent}" in mixed.message
    assert "the key 'target' is missing" in mixed.message
    assert f"cannot read the recipe {tmp_path}:" in mixed.message
    unread = CliRunner().invoke(command, ["check", str(absent), str(tmp_path)]).exception
    assert isinstance(unread, UnknownRecipeError)
    assert len(unread.message.splitlines()) == 2
