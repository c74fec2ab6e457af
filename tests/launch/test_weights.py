from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_bw.errors import ModelFilesError
from sglang_bw.launch import command as commands
from sglang_bw.launch import weights
from sglang_bw.recipes import flags, lookup
from sglang_bw.recipes.hardware import Hardware
from sglang_bw.recipes.schema import Draft, Weights
from tests.launch.serving import write_model, write_safetensors

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"

CPU = Hardware(device="cpu")


def truncate(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def edit_index(directory: Path, **changes: str) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"].update(changes)
    (directory / INDEX).write_text(json.dumps(index))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def test_a_whole_model_passes(model: Path) -> None:
    weights.check(model, "target", tokenizer=model)


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        pytest.param(lambda d: (d / "config.json").unlink(), "config.json is missing", id="config"),
        pytest.param(
            lambda d: (d / "config.json").write_text("{"), "config.json is not valid JSON", id="config broken"
        ),
        pytest.param(lambda d: (d / "tokenizer.json").unlink(), "no tokenizer: none of tokenizer.json", id="tokenizer"),
        pytest.param(
            lambda d: (d / "tokenizer.json").write_text("[1"), "tokenizer.json is not valid JSON", id="tokenizer cut"
        ),
        pytest.param(lambda d: (d / SECOND).unlink(), f"{SECOND} is missing (1 of 3 tensors)", id="shard"),
        pytest.param(lambda d: truncate(d / FIRST, 1), f"{FIRST} is cut off", id="shard cut in its data"),
        pytest.param(
            lambda d: truncate(d / FIRST, 60), f"the header of {FIRST} is cut off", id="shard cut in its header"
        ),
        pytest.param(lambda d: (d / FIRST).write_bytes(b""), f"{FIRST} is no safetensors file", id="shard empty"),
        pytest.param(
            lambda d: (d / FIRST).write_bytes(b"<html>" * 99),
            f"{FIRST} is no safetensors file",
            id="shard is a web page",
        ),
        pytest.param(
            lambda d: edit_index(d, z=SECOND), f"{SECOND} lacks 1 tensors that {INDEX} promises, such as z", id="tensor"
        ),
        pytest.param(lambda d: (d / INDEX).write_text("{}"), f"{INDEX} has no weight_map", id="index without map"),
        pytest.param(lambda d: (d / INDEX).write_text("{"), f"{INDEX} is not valid JSON", id="index cut"),
        pytest.param(
            lambda d: (d / FIRST).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"),
            f"{FIRST} is a Git LFS pointer",
            id="git lfs",
        ),
        pytest.param(
            lambda d: [(d / INDEX).unlink(), (d / SECOND).unlink()], f"{SECOND} is missing", id="gap without index"
        ),
        pytest.param(
            lambda d: [(d / name).unlink() for name in (INDEX, FIRST, SECOND)],
            "no weights: neither *.safetensors",
            id="no weights",
        ),
        pytest.param(
            lambda d: (d / INDEX).write_text(json.dumps({"weight_map": {"a": "x" * 300}})),
            "cannot be read: File name too long",
            id="index with a name that is too long",
        ),
        pytest.param(shutil.rmtree, "does not exist", id="no directory"),
        pytest.param(lambda d: [shutil.rmtree(d), d.touch()], "is a file, not a directory", id="a file"),
    ],
)
def test_findings(model: Path, damage: Callable[[Path], object], finding: str) -> None:
    damage(model)
    with pytest.raises(ModelFilesError) as error:
        weights.check(model, "target", tokenizer=model)
    assert finding in error.value.message
    assert error.value.exit_code == 32


def test_every_finding_is_reported(model: Path) -> None:
    (model / "config.json").unlink()
    (model / "tokenizer.json").unlink()
    truncate(model / FIRST, 1)
    (model / SECOND).unlink()
    with pytest.raises(ModelFilesError) as error:
        weights.check(model, "target", tokenizer=model)
    assert len(error.value.message.splitlines()) == 5


def test_a_draft_needs_no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    weights.check(model, "draft", tokenizer=None)


def test_made_up_weights_need_no_files(model: Path) -> None:
    (model / SECOND).unlink()
    weights.check(model, "draft", tokenizer=None, weights=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("/" + "x" * 300, "cannot be read: File name too long", id="too long"),
        pytest.param("~no-such-user/m", "there is no home directory ~no-such-user", id="home directory of nobody"),
    ],
)
def test_paths_that_cannot_be_looked_at(name: str, message: str) -> None:
    command = commands.build(lookup.find("tiny"), CPU, {}, extra=flags.parse(["--model-path", name]))
    with pytest.raises(ModelFilesError, match=message):
        weights.check_command(command)


def test_a_directory_closed_to_us(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", refuse)  # the mode of a directory keeps out everybody but root
    with pytest.raises(ModelFilesError, match="cannot be read: Permission denied"):
        weights.check(model, "target", tokenizer=model)


@pytest.mark.parametrize("names", [["tokenizer.model"], ["vocab.json", "merges.txt"], ["qwen.tiktoken"]])
def test_other_tokenizers(model: Path, names: list[str]) -> None:
    (model / "tokenizer.json").unlink()
    for name in names:
        (model / name).write_text("{}")
    weights.check(model, "target", tokenizer=model)


def test_a_launch_checks_both_models_where_they_are_local(model: Path, tmp_path: Path) -> None:
    recipe = lookup.find("tiny")
    here = recipe.model_copy(update={"target": Weights(path=model), "draft": Draft(path=tmp_path / "absent")})
    with pytest.raises(ModelFilesError, match=r"the draft .*absent does not exist"):
        weights.check_command(commands.build(here, CPU, {}))
    weights.check_command(commands.build(here, CPU, {}, speculate=False))
    weights.check_command(
        commands.build(here, CPU, {}, extra=flags.parse(["--speculative-draft-model", "owner/draft"]))
    )
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelFilesError, match="no tokenizer"):
        weights.check_command(commands.build(here, CPU, {}, speculate=False))
    weights.check_command(commands.build(here, CPU, {}, speculate=False, extra=flags.parse(["--skip-tokenizer-init"])))


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_any_bytes_are_judged_without_a_crash(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "model.safetensors"
    path.write_bytes(data)
    assert weights._shard(path)[1]


@settings(max_examples=30)
@given(st.integers(min_value=1))
def test_any_cut_is_found(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "model.safetensors"
    write_safetensors(path, ["a", "b", "c"])
    assert weights._shard(path)[1] == ""
    truncate(path, 1 + cut % path.stat().st_size)
    assert weights._shard(path)[1]
