"""What Tab gives: names that are there, in a real bash, without importing what nobody asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from sglang_bw.cli import cli
from sglang_bw.fork.series import bases, patches_root
from tests.conftest import CHECKOUT


def complete(*words: str) -> list[str]:
    """Return what is offered for the last word; files as ``<file>``."""
    found = ShellComplete(cli, {}, "sglang-bw", "_SGLANG_BW_COMPLETE").get_completions(list(words[:-1]), words[-1])
    return [item.value if item.type == "plain" else f"<{item.type}>" for item in found]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        pytest.param(("re",), {"rebase", "recipes"}, id="commands"),
        pytest.param(("serve", "kimi"), {"kimi-k2.5-int4-eagle3", "kimi-k2.5-nvfp4-eagle3"}, id="recipes"),
        pytest.param(("bundle", "--device", "cpu", "ti"), {"tiny"}, id="recipes of a bundle"),
        pytest.param(("serve", "./my"), {"<file>"}, id="files-where-no-recipe-fits"),
        pytest.param(("serve", "tiny", "--no-"), {"--no-spec", "--no-warmup"}, id="options"),
        pytest.param(("serve", "tiny", "--device", ""), {"auto", "cpu", "cuda"}, id="choices"),
        pytest.param(("plan", "x", "--gpus", "8xrtx-pro-6"), {"8xRTX-PRO-6000"}, id="machines"),
        pytest.param(("plan", "x", "--gpus", "4"), {"4xB200", "4xRTX-5090"}, id="count-of-the-machine"),
        pytest.param(("patches", "show", "0007"), {"0007-nvfp4-moe-backend"}, id="patches-by-number"),
        pytest.param(("patches", "show", "nvfp4"), {"nvfp4-moe-backend"}, id="patches-by-topic"),
        pytest.param(
            ("patches", "show", "--base", "0.5.9", "kimi-k25-ea"), {"kimi-k25-eagle3"}, id="patches-of-a-base"
        ),
        pytest.param(("upgrade", ""), set(bases(patches_root())), id="bases"),
        pytest.param(("ab", "tiny", "--prompts", "ch"), {"chat"}, id="prompt-sets"),
        pytest.param(("ledger", "why", "tin"), {"tiny"}, id="below-a-group"),
        pytest.param(("patches", "show", "--patches", "/nowhere", ""), set(), id="nothing-there"),
    ],
)
def test_what_is_offered(words: tuple[str, ...], offered: set[str]) -> None:
    found = set(complete(*words))
    assert offered <= found
    assert offered or found == set()
    assert all(name.lower().startswith(words[-1].lower()) or name == "<file>" for name in found)


def test_a_machine_that_is_offered_is_understood() -> None:
    from sglang_bw.host.boards import BOARDS, find

    offered = complete("plan", "x", "--gpus", "8x")
    assert len(offered) == len(BOARDS)
    assert [find(name.partition("x")[2]) for name in offered] == list(BOARDS)


def test_names_of_commands_cost_no_import_of_a_command() -> None:
    program = (
        "import sys, json; from sglang_bw.cli import main\n"
        "try: main([])\n"
        "except SystemExit: print(json.dumps([m for m in sys.modules if m.startswith('sglang_bw.')]), file=sys.stderr)"
    )
    environ = {**os.environ, "_SGLANG_BW_COMPLETE": "bash_complete", "COMP_WORDS": "sglang-bw se", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["plain,serve"]
    loaded = {".".join(name.split(".")[:2]) for name in json.loads(done.stderr) if name != "sglang_bw.cli"}
    assert loaded <= {"sglang_bw.errors"}


@pytest.mark.parametrize("command", ["serve", "ab", "plan"])
def test_completing_an_argument_loads_no_numerics_and_no_client(command: str) -> None:
    """They take most of half a second."""
    program = f"import sys; from sglang_bw.cli import cli; cli.get_command(None, {command!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"numpy", "scipy", "httpx", "aiohttp", "torch", "sglang"} & set(done.stdout.split()) == set()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sglang-bw serve qwen3-", ["qwen3-8b-eagle3"]),
        ("sglang-bw patches show 0010", ["0010-eagle3-draft-algorithm"]),
        ("sglang-bw pl", ["plan"]),
        ("sglang-bw plan x --gpus 8xB2", ["8xB200"]),
    ],
)
def test_in_a_real_bash(line: str, expected: list[str], tmp_path: Path) -> None:
    """The function that click prints, called as bash calls it when Tab is pressed."""
    tool = tmp_path / "sglang-bw"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m sglang_bw "$@"\n', encoding="utf-8")
    tool.chmod(0o755)
    script = """
    source <(_SGLANG_BW_COMPLETE=bash_source sglang-bw)
    read -ra COMP_WORDS <<< "$LINE"
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$LINE COMP_POINT=${#LINE}
    function=$(complete -p sglang-bw | sed 's/.*-F \\([^ ]*\\).*/\\1/')
    compopt() { :; }
    $function sglang-bw "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(CHECKOUT), "LINE": line}
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout.split() == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_documented_line_prints_a_function(shell: str) -> None:
    page = (CHECKOUT / "docs" / "completion.md").read_text(encoding="utf-8")
    assert f"_SGLANG_BW_COMPLETE={shell}_source sglang-bw" in page
    environ = {**os.environ, "_SGLANG_BW_COMPLETE": f"{shell}_source"}
    done = subprocess.run([sys.executable, "-m", "sglang_bw"], env=environ, capture_output=True, text=True, check=True)
    assert "_SGLANG_BW_COMPLETE" in done.stdout
