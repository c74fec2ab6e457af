"""Several machines: what each node's engine is told, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sglang_bw.cli import cli
from sglang_bw.errors import GpuSelectionError, PlanInputError
from sglang_bw.host import nvml
from sglang_bw.launch import command as commands
from sglang_bw.launch import nodes, preflight
from sglang_bw.launch.nodes import Nodes
from sglang_bw.recipes import flags
from sglang_bw.recipes.hardware import Hardware
from sglang_bw.recipes.schema import Recipe
from tests.host.fake_host import Board, Host

TINY = ["serve", "tiny", "--device", "cpu"]


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("10.0.0.1", "10.0.0.1:20000"),
        ("10.0.0.1:5000", "10.0.0.1:5000"),
        ("node-0.cluster:5000", "node-0.cluster:5000"),
        ("[fd00::1]", "[fd00::1]:20000"),
        ("[fd00::1]:5000", "[fd00::1]:5000"),
    ],
)
def test_addresses(text: str, head: str) -> None:
    assert nodes.head(text) == head


@pytest.mark.parametrize(
    "text", ["", ":5000", "a b:1", "host:", "host:0x1", "host:70000", "host:-1", "fd00::1", "[x]:1", "-a:1", "a:\u0661"]
)
def test_no_addresses(text: str) -> None:
    if text == "host:":  # the port is the usual one
        assert nodes.head(text) == "host:20000"
        return
    with pytest.raises(ValueError, match=r".+"):
        nodes.head(text)


def described(*arguments: str) -> list[list[str]]:
    done = CliRunner().invoke(cli, [*TINY, "--dry-run", "--json", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    return [node["argv"] for node in found["nodes"]] if "nodes" in found else [found["argv"]]


def place(argv: list[str]) -> tuple[str | None, ...]:
    line = flags.parse(argv[2:])
    return tuple(flags.value(line, name) for name in ("nnodes", "node-rank", "dist-init-addr"))


def test_a_dry_run_shows_every_node() -> None:
    found = described("--nodes", "3", "--head", "10.0.0.1", "--", "--tp-size", "6")
    assert [place(argv) for argv in found] == [("3", str(rank), "10.0.0.1:20000") for rank in range(3)]
    without = [[word for word in argv if word not in ("0", "1", "2")] for argv in found]
    assert without[0] == without[1] == without[2]
    lines = CliRunner().invoke(cli, [*TINY, "--dry-run", "--nodes", "2"]).stdout.splitlines()
    assert [f"--nnodes 2 --node-rank {rank} --dist-init-addr NODE-0:20000" in lines[rank] for rank in (0, 1)] == [
        True
    ] * 2


def test_one_node_of_several_and_one_alone() -> None:
    assert [place(argv) for argv in described("--nodes", "2", "--node-rank", "1", "--head", "a:1")] == [
        ("2", "1", "a:1")
    ]
    assert [place(argv) for argv in described()] == [(None, None, None)]
    assert [place(argv) for argv in described("--nodes", "1")] == [(None, None, None)]
    own = described("--", "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "a:1")
    assert [place(argv) for argv in own] == [("2", "1", "a:1")]


def test_a_recipe_for_several_machines(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("id: two\ntarget: owner/model\nnodes: 2\nargs: {tp-size: 4}\n")
    done = CliRunner().invoke(cli, ["serve", str(path), "--device", "cuda", "--dry-run"])
    assert [f"--node-rank {rank}" in line for rank, line in enumerate(done.stdout.splitlines())] == [True, True]
    refused = CliRunner().invoke(cli, ["serve", str(path), "--device", "cpu"])
    assert refused.exit_code == 2
    assert "2 nodes: the same command on each" in refused.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nodes", "2", "--node-rank", "2"], "ranks 0 to 1"),
        (["--node-rank", "1"], "go with --nodes"),
        (["--nodes", "2", "--head", "a b"], "no ADDR:PORT"),
        (["--nodes", "2", "--", "--nnodes", "2"], "not both"),
    ],
)
def test_what_contradicts_itself(arguments: list[str], says: str) -> None:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    done = CliRunner().invoke(cli, [*TINY, *arguments[:cut], "--dry-run", *arguments[cut:]])
    assert done.exit_code == 2
    assert says in done.output.replace("\n", " ")


def test_gpus_are_counted_on_each_node() -> None:
    recipe = Recipe.model_validate({"id": "my", "target": "owner/model", "nodes": 2})
    here = nvml.read(Host(boards=[Board(), Board()]).nvml())

    def used(size: str) -> int:
        extra = flags.parse(["--tp-size", size])
        place_of = Nodes(2, 1, "a:1")
        command = commands.build(recipe, Hardware(device="cuda"), {}, extra=(*extra, *place_of.flags()))
        return len(preflight.used(command, here, {}))

    assert used("4") == 2
    with pytest.raises(GpuSelectionError, match="needs 4 GPUs"):
        used("8")


def test_the_plan_counts_them_on_each_node() -> None:
    line = ["plan", "qwen3-8b-eagle3", "--gpus", "2x RTX 5090", "--"]
    done = CliRunner().invoke(cli, [*line, "--tp-size", "4"])
    assert isinstance(done.exception, PlanInputError)
    assert "for 4 GPUs (tp 4 x pp 1), and there are 2" in done.exception.message
    done = CliRunner().invoke(cli, [*line, "--tp-size", "8", "--nnodes", "2"])
    assert isinstance(done.exception, PlanInputError)
    assert "for 4 GPUs on each of 2 nodes" in done.exception.message
    done = CliRunner().invoke(cli, [*line, "--tp-size", "4", "--nnodes", "2"])
    assert not isinstance(done.exception, PlanInputError), done.exception
