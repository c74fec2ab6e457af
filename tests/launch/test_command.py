from __future__ import annotations

import json
import shlex
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from sglang_bw.cli import console, main
from sglang_bw.cli.launch import serve
from sglang_bw.errors import BwError, ModelFilesError, RecipeError, UnknownRecipeError
from sglang_bw.fork.verify import inspect
from sglang_bw.launch import command as commands
from sglang_bw.launch import engine as engines
from sglang_bw.launch import selection
from sglang_bw.recipes import flags, lookup
from sglang_bw.recipes.hardware import Hardware
from tests.launch.serving import write_model, write_tree

CPU = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CPU:
        monkeypatch.delenv(name, raising=False)


def dry_run(*arguments: str, code: int = 0) -> tuple[dict[str, str], list[str]]:
    """Return environment and words of the printed line."""
    result = CliRunner().invoke(serve, ["--dry-run", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    words = shlex.split(result.stdout.splitlines()[0])
    start = words.index("sglang")
    assert words[start : start + 2] == ["sglang", "serve"]
    return dict(word.split("=", 1) for word in words[:start]), words[start + 2 :]


def value(words: list[str], flag: str) -> str:
    assert words.count(flag) == 1
    return words[words.index(flag) + 1]


def test_tiny_on_a_cpu() -> None:
    env, words = dry_run("tiny", "--device", "cpu")
    assert env == CPU
    assert value(words, "--device") == "cpu"
    assert value(words, "--dtype") == "float32"
    assert value(words, "--model-path").endswith("/models/tiny_pair/target")
    assert value(words, "--speculative-draft-model-path").endswith("/models/tiny_pair/draft")
    assert value(words, "--speculative-algorithm") == "EAGLE3"
    assert value(words, "--max-total-tokens").isdigit()
    assert (value(words, "--host"), value(words, "--port")) == ("127.0.0.1", "30000")


def test_tiny_on_a_gpu() -> None:
    env, words = dry_run("tiny", "--device", "cuda")
    assert env == {}
    assert value(words, "--device") == "cuda"
    assert value(words, "--attention-backend") == "triton"
    assert "--dtype" not in words


def test_the_baseline_differs_in_the_speculation_only() -> None:
    _, with_spec = dry_run("tiny", "--device", "cpu")
    _, without = dry_run("tiny", "--device", "cpu", "--no-spec")
    plain, spec = flags.parse(without), flags.parse(with_spec)
    assert plain == tuple(flag for flag in spec if not flag.name.startswith("speculative-"))
    assert plain != spec


def test_engine_flags_win() -> None:
    _, words = dry_run(
        *["tiny", "--device", "cpu", "--port", "30001", "--"],
        *["--max-total-tokens=99", "--model", "other/model", "--speculative-num-steps", "2", "--port", "5"],
        *["--json-model-override-args", '{"a": [1, 2]}', "--no-such-thing"],
    )
    assert "--max-total-tokens=99" not in words  # written the usual way
    assert value(words, "--max-total-tokens") == "99"
    assert value(words, "--model") == "other/model"
    assert "--model-path" not in words
    assert value(words, "--speculative-num-steps") == "2"
    assert value(words, "--port") == "5"
    assert value(words, "--json-model-override-args") == '{"a": [1, 2]}'
    assert words[-1] == "--no-such-thing"


def test_the_device_of_the_engine_flags_decides() -> None:
    env, words = dry_run("tiny", "--device", "cuda", "--", "--device", "cpu")
    assert env == CPU
    assert "--attention-backend" not in words


def test_local_weights_for_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t").mkdir()
    _, words = dry_run("tiny", "--device", "cpu", "--model-path", "./t", "--draft-path", "owner/draft")
    assert value(words, "--model-path") == str(tmp_path / "t")
    assert value(words, "--speculative-draft-model-path") == "owner/draft"
    assert value(words, "--served-model-name") == "tiny"


@pytest.mark.parametrize("name", ["owner/model", "./here", "here"])
def test_a_model_with_a_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    _, words = dry_run(name, "--draft", "owner/draft", "--device", "cuda")
    assert value(words, "--model-path") == (name if "/" in name and "." not in name else str(tmp_path / "here"))
    assert value(words, "--speculative-draft-model-path") == "owner/draft"
    assert value(words, "--speculative-algorithm") == "EAGLE3"
    assert value(words, "--speculative-num-steps") == "3"


def test_a_model_alone_needs_a_word_about_speculation() -> None:
    result = CliRunner().invoke(serve, ["owner/model", "--dry-run"])
    assert result.exit_code == 2
    assert "--draft" in result.output
    assert "--speculative-algorithm" not in dry_run("owner/model", "--no-spec", "--device", "cpu")[1]
    assert (
        value(
            dry_run("owner/model", "--device", "cpu", "--", "--speculative-algorithm", "NGRAM")[1],
            "--speculative-algorithm",
        )
        == "NGRAM"
    )


def test_a_recipe_file_with_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "my.yaml"
    recipe.write_text("id: my\ntarget: owner/model\nenv: {NCCL_DEBUG: WARN, SGLANG_B: 'two words'}\n")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    env, _ = dry_run(str(recipe), "--device", "cuda")
    assert env == {"NCCL_DEBUG": "WARN", "SGLANG_B": "two words"}
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert dry_run(str(recipe), "--device", "cuda")[0]["NCCL_DEBUG"] == "INFO"  # what the user has set wins


def test_secrets_are_kept_out_of_the_log(tmp_path: Path) -> None:
    recipe = tmp_path / "my.yaml"
    recipe.write_text("id: my\ntarget: owner/model\nenv: {HF_TOKEN: hush, OTHER: word}\n")
    command = commands.build(
        lookup.find(str(recipe)), Hardware(device="cuda"), {}, extra=flags.parse(["--api-key=hush", "--port=5"])
    )
    shown = command.pasteable()
    assert "hush" not in shown
    assert "OTHER=word" in shown
    assert 'HF_TOKEN="$HF_TOKEN"' in shown
    assert shown.endswith("--config API-KEY.yaml")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        pytest.param("serve tny", 30, "did you mean tiny?", id="unknown recipe"),
        pytest.param("serve no/such.yaml", 30, "cannot read the recipe no/such.yaml", id="no such file"),
        pytest.param("serve bad.yaml", 31, "unknown key 'arg'; did you mean 'args'?", id="unknown key"),
        pytest.param("serve tiny --engine-tree {empty}", 20, "{empty} holds no unpacked engine", id="no engine"),
        pytest.param("serve tiny --engine-tree {stock}", 21, "is upstream's, without the series", id="stock engine"),
        pytest.param("serve tiny --engine-tree {edited}", 22, "sglang/__init__.py (edited)", id="edited engine"),
        pytest.param(
            "serve {cut} --no-spec --engine-tree {tree}", 32, "model-00002-of-00002.safetensors is missing", id="shard"
        ),
        pytest.param("serve {cut} --no-spec --engine-tree {tree}", 32, "no tokenizer", id="tokenizer"),
        pytest.param(
            "serve {whole} --no-spec --engine-tree {tree} --port {port}", 33, "is in use by pid", id="port in use"
        ),
        pytest.param("serve tiny --python {empty}/python", 18, "cannot run", id="no interpreter"),
    ],
)
def test_exit_codes_before_the_load(
    arguments: str,
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bad input ends before anything is started: with a message, a hint, and the exit code of its class."""
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("bad.yaml").write_text("id: bad\ntarget: owner/model\narg: {}\n")
    edited, cut = write_tree(tmp_path / "edited"), write_model(tmp_path / "cut")
    (edited / "sglang" / "__init__.py").write_text("# edited")
    (cut / "model-00002-of-00002.safetensors").unlink()
    (cut / "tokenizer.json").unlink()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        places = {
            "empty": tmp_path / "empty",
            "tree": write_tree(tmp_path / "tree"),
            "stock": write_tree(tmp_path / "stock", patched=False),
            "edited": edited,
            "cut": cut,
            "whole": write_model(tmp_path / "whole"),
            "port": listener.getsockname()[1],
        }
        with pytest.raises(SystemExit) as end:
            main([*arguments.format(**places).split(), "--device", "cpu", "--log", "log"])
    told = capsys.readouterr().err
    assert end.value.code == code, told
    assert message.format(**places) in told
    assert "error: " in told
    assert "hint: " in told
    assert "Traceback" not in told
    assert not Path("log").exists()


def test_json_dry_run() -> None:
    result = CliRunner().invoke(serve, ["tiny", "--device", "cpu", "--dry-run", "--json"])
    told = json.loads(result.stdout)
    assert told["argv"][:2] == ["sglang", "serve"]
    assert told["env"] == CPU
    assert told["url"] == "http://127.0.0.1:30000"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        pytest.param("tyni", UnknownRecipeError, id="mistyped"),
        pytest.param("gpt2", UnknownRecipeError, id="a model without owner"),
        pytest.param("absent.yaml", UnknownRecipeError, id="no such file"),
        pytest.param("here/absent", ModelFilesError, id="no such directory in one that exists"),
        pytest.param("~no-such-user/m", ModelFilesError, id="home directory of nobody"),
        pytest.param("x" * 300, UnknownRecipeError, id="too long for a file"),
        pytest.param("here/" + "x" * 300, ModelFilesError, id="too long for a file, in a directory"),
    ],
)
def test_names_that_are_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: type[BwError]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    with pytest.raises(error):
        selection.select(name, draft="owner/draft")


def test_a_draft_for_a_recipe_without_speculation(tmp_path: Path) -> None:
    recipe = tmp_path / "plain.yaml"
    recipe.write_text("id: plain\ntarget: owner/model\n")
    with pytest.raises(RecipeError, match="has no spec"):
        selection.select(str(recipe), draft="owner/draft")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["tiny", "--max-total-tokens", "3"], "Engine flags go behind '--'", id="flag before the dashes"),
        pytest.param(["tiny", "again"], "'again' is no engine flag", id="two names"),
        pytest.param(["tiny", "--port", "70000"], "70000", id="port out of range"),
        pytest.param(["tiny", "--", "--device", "tpu"], "'tpu' is not known", id="device"),
        pytest.param([], "Missing argument", id="no name"),
        pytest.param([""], "it is empty", id="empty name"),
        pytest.param(["tiny", "--draft", ""], "it is empty", id="empty draft"),
        pytest.param(["tiny", "--model-path", ""], "it is empty", id="empty model path"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(serve, arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ("", "http://127.0.0.1:30000"),
        ("--host 0.0.0.0", "http://127.0.0.1:30000"),
        ("--host :: --port 1", "http://[::1]:1"),
        ("--host box.lan", "http://box.lan:30000"),
        ("--ssl-certfile c --ssl-keyfile k", "https://127.0.0.1:30000"),
    ],
)
def test_url(words: str, url: str) -> None:
    assert commands.build(lookup.find("tiny"), Hardware(device="cpu"), {}, extra=flags.parse(words.split())).url == url


@pytest.mark.parametrize("port", ["x", "²", "-1", ""])
def test_port_that_is_no_number(port: str) -> None:
    with pytest.raises(RecipeError, match="--port needs a number"):
        commands.build(lookup.find("tiny"), Hardware(device="cpu"), {}, extra=flags.parse(["--port", port]))


def test_a_package_in_the_working_directory_is_no_shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is started with -P, which leaves the working directory out."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    assert inspect().shadowed_by == tmp_path / "sglang"
    assert engines.find().installation.shadowed_by is None


def test_the_note_of_a_dry_run_has_its_hint(tmp_path: Path) -> None:
    stock = write_tree(tmp_path / "stock", patched=False)
    result = CliRunner().invoke(serve, ["tiny", "--device", "cpu", "--dry-run", "--engine-tree", str(stock)])
    note, hint = result.stderr.splitlines()
    assert note.startswith("note: the installed sglang")
    assert hint.startswith("hint: `sglang-bw install`")


def test_what_is_printed_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": ":100:", "b": "[red]", "c": ":smiley:"}
    console.print_json(value)
    console.err.print("/models/:100:/x", markup=False)
    told = capsys.readouterr()
    assert json.loads(told.out) == value
    assert told.err == "/models/:100:/x\n"


def test_what_runs_is_what_is_printed() -> None:
    command = commands.build(lookup.find("tiny"), Hardware(device="cpu"), {})
    ran = command.argv(Path("python"))
    assert ran[:4] == ["python", "-P", "-m", "sglang.launch_server"]
    assert shlex.split(command.pasteable()) == [
        "OMP_NUM_THREADS=1",
        "SGLANG_USE_CPU_ENGINE=1",
        "sglang",
        "serve",
        *ran[4:],
    ]
