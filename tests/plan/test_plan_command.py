"""`sglang-bw plan`: the first system's results, exit codes, and what a user may get wrong."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sglang_bw.cli import planning
from sglang_bw.cli.plan import plan as command
from sglang_bw.errors import BwError
from sglang_bw.host import nvml
from sglang_bw.plan import seen
from sglang_bw.plan.instead import allowed
from sglang_bw.plan.memory import Alternative
from sglang_bw.plan.question import PlannedEngine
from sglang_bw.plan.rules import facts
from sglang_bw.plan.speculation import accept_curve, verdicts
from sglang_bw.plan.speculation.cost import Ratio
from sglang_bw.recipes import configs, lookup
from tests.host.fake_host import Host

KIMI_RECIPE = "kimi-k2.5-int4-eagle3"
KIMI, DRAFT, PRO = "moonshotai/Kimi-K2.5", "lightseekorg/kimi-k2.5-eagle3-mla", "8xRTX PRO 6000"
EP = [
    "--tp-size",
    "8",
    "--ep-size",
    "8",
    "--moe-a2a-backend",
    "flashinfer",
    "--moe-runner-backend",
    "flashinfer_cutlass",
]


@pytest.fixture(autouse=True)
def _nothing_from_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub cache, and no engine that the answers could depend on."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    series = planning.of_series()
    monkeypatch.setattr(planning, "_engine", lambda wish: PlannedEngine(wish.version) if wish.version else series)


def run(*arguments: str, code: int = 0) -> dict[str, Any]:
    """Return the JSON of a plan."""
    result = CliRunner().invoke(command, ["--json", "--no-resolve", *arguments])
    error = result.exception
    assert (error.exit_code if isinstance(error, BwError) else 0) == code, (result.output, error)
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["exit_code"] == code
    return found


def refused(*arguments: str) -> BwError:
    result = CliRunner().invoke(command, ["--no-resolve", *arguments])
    assert isinstance(result.exception, BwError), (result.output, result.exception)
    return result.exception


def test_experts_apart_did_not_fit_on_the_first_system() -> None:
    default = run(KIMI, "--gpus", PRO, "--engine", "0.5.9", "--", *EP, code=50)
    assert default["memory"]["verdict"] == "does not fit"
    assert default["memory"]["mem_fraction_static"] == pytest.approx(0.77146, abs=1e-5)  # the public log's
    free = default["memory"]["free_after_load_bytes"] / 2**30
    assert free == pytest.approx(16.3, rel=0.05)  # what was seen
    higher = run(KIMI, "--gpus", PRO, "--engine", "0.5.9", "--", *EP, "--mem-fraction-static", "0.90")
    assert higher["memory"]["verdict"] == "fits"
    assert higher["memory"]["kv_tokens"] == pytest.approx(105_000, rel=0.06)


def test_tensor_parallelism_fitted_and_eagle3_did_not() -> None:
    plain = run(KIMI, "--gpus", PRO, "--engine", "0.5.9", "--", "--tp-size", "8")
    assert 0 < plain["memory"]["kv_tokens"] < 10_000  # the log has 4,578
    eagle = run(KIMI, "--draft", DRAFT, "--gpus", PRO, "--engine", "0.5.9", "--", "--tp-size", "8", code=50)
    assert eagle["memory"]["verdict"] == "does not fit"
    assert eagle["memory"]["mem_fraction_static"] == pytest.approx(0.7524, abs=1e-4)
    assert any("without speculation" in other["title"] for other in eagle["alternatives"])


@pytest.mark.parametrize("name", [name for name in lookup.catalogue() if name != "tiny"])
def test_every_recipe_fits_its_own_machine(name: str) -> None:
    found = run(name)
    assert found["verdict"] in ("fits", "tight")
    assert found["speculation"]["cells"]
    measured = lookup.find(name).memory.weights_gib
    line = next(line for line in found["memory"]["lines"] if line["name"] == "weights target")
    if measured:
        assert line["bytes"] / 2**30 == pytest.approx(measured, rel=0.05)


def test_the_answer_says_what_it_rests_on() -> None:
    found = run("kimi-k2.5-int4-eagle3")
    assert found["resolution"]["source"] == "restated"
    assert any("restated, not run" in note for note in found["notes"])
    assert any("facts that ship with the recipe" in note for note in found["notes"])
    assert found["memory"]["weights"] == "estimate from config.json"
    assert {"one user", "a few agents"} == {demand["name"] for demand in found["demands"]}


def test_context_and_concurrency_are_asked_for() -> None:
    found = run("kimi-k2.5-int4-eagle3", "--context", "32768", "--concurrency", "4")
    (demand,) = found["demands"]
    assert (demand["context"], demand["concurrency"], demand["resident"]) == (32768, 4, 4)
    assert [(cell["context"], cell["concurrency"]) for cell in found["speculation"]["cells"]] == [(32768, 4)]
    too_long = run("kimi-k2.5-int4-eagle3", "--context", "262144", code=50)
    assert any("less than one request of 262,144" in reason for reason in too_long["memory"]["reasons"])


@pytest.mark.parametrize(
    ("arguments", "says", "instead"),
    [
        pytest.param(["--context", "131072"], "the model's maximum of 40,960", "--context 40960", id="the model"),
        pytest.param(
            ["--context", "65536", "--gpus", "RTX 5090"], "the model's maximum of 40,960", "--context 40960", id="5090"
        ),
        pytest.param(
            ["--context", "30000", "--", "--context-length", "20000"],
            "than --context-length 20000",
            "up to the model's 40960",
            id="the launch",
        ),
    ],
)
def test_no_plan_for_requests_that_the_engine_refuses(arguments: list[str], says: str, instead: str) -> None:
    found = run("qwen3-8b-eagle3", "--concurrency", "2", *arguments, code=50)
    memory = found["memory"]
    assert says in memory["reasons"][0]
    assert instead in memory["reasons"][1]
    assert (memory["requests_of_context"], memory["least_mem_fraction_static"]) == (0, None)
    assert [demand["resident"] for demand in found["demands"]] == [0]
    assert found["alternatives"] == []
    assert says in refused("qwen3-8b-eagle3", *arguments).message
    assert run("qwen3-8b-eagle3", "--context", "40960")["verdict"] == "fits"


def test_a_launch_with_short_requests_is_planned() -> None:
    """Shorter than every workload of the recipe and every context of the table."""
    flags = ["--no-resolve", "--", "--context-length", "100"]
    shown = CliRunner().invoke(command, ["qwen3-8b-eagle3", *flags], catch_exceptions=False)
    assert "requests of 100 tokens" in shown.output
    found = run("qwen3-8b-eagle3", "--", "--context-length", "100")
    assert {cell["context"] for cell in found["speculation"]["cells"]} == {100}
    assert {demand["resident"] for demand in found["demands"]} == {0}  # of 8,192 tokens


MINIMAX = "minimax-m2.7-nvfp4-eagle3"


def cells_of(*arguments: str) -> dict[tuple[int, int], dict[str, Any]]:
    found = run(MINIMAX, *arguments)["speculation"]["cells"]
    return {(cell["context"], cell["concurrency"]): cell for cell in found}


def test_what_was_measured_of_the_launch_is_said_before_what_others_cost() -> None:
    """113.5 to 104.9 tok/s with one request, 378.3 to 388.6 with eight; the borrowed curve has 1.61 and 1.28."""
    cells = cells_of()
    alone, team = cells[8192, 1], cells[8192, 8]
    assert alone["verdict"] == "loses"
    assert alone["speedup"]["mid"] == pytest.approx(104.9 / 113.5)
    assert alone["break_even"]["mid"] == pytest.approx(2.41 * 113.5 / 104.9)
    assert (alone["accept_length"]["mid"], alone["best_steps"]) == (pytest.approx(2.41), 0)
    assert "113.5 tok/s without and 104.9 with it" in alone["basis"]
    assert team["verdict"] == "undecided"
    assert team["speedup"]["mid"] == pytest.approx(388.6 / 378.3)
    # Nobody measured it, and the curve says 1.66 where the same launch lost at a shorter context.
    far = cells[65536, 1]
    assert far["verdict"] == "undecided"
    assert "other side of 1: 0.92 with 1 at once" in far["reason"]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--gpus", "2xRTX 5090"], id="board"),
        pytest.param(["--gpus", "4xRTX PRO 6000", "--", "--tp-size", "4"], id="number of GPUs"),
        pytest.param(["--fabric", "nvlink"], id="fabric"),
        pytest.param(["--draft", "lightseekorg/kimi-k2.5-eagle3-mla"], id="draft"),
        pytest.param(["--", "--speculative-num-steps", "2", "--speculative-num-draft-tokens", "3"], id="steps"),
    ],
)
def test_what_was_measured_of_another_launch_is_not_taken(arguments: list[str]) -> None:
    result = CliRunner().invoke(command, [MINIMAX, "--json", "--no-resolve", "--force", *arguments])
    cells = json.loads(result.stdout)["speculation"]["cells"]
    assert not any("evidence" in cell["basis"] + cell["reason"] for cell in cells)


def test_what_was_measured_here_is_better_than_evidence(tmp_path: Path) -> None:
    points = tmp_path / "decode.csv"
    points.write_text("context,concurrency,tok_s\n0,1,113\n0,4,400\n0,16,900\n")
    assert "this host" in cells_of("--decode", str(points))[8192, 1]["basis"]


def test_a_cell_between_measured_ones_is_left_open() -> None:
    near, *_ = verdicts(accept_curve("MiniMax", "x/eagle3"), _Cheap(), [0], [4], 3)
    assert near.verdict == "pays"
    rows = tuple(
        seen.Seen(3, concurrency, (0, 8192), 100, speed, None, "x") for concurrency, speed in [(1, 92), (8, 103)]
    )
    assert seen.held_against(near, rows).verdict == "undecided"
    assert seen.held_against(near, rows[1:]) == near
    assert seen.held_against(near, ()) == near


class _Cheap:
    """Speculation that costs next to nothing."""

    def ratio(self, _context: int, _concurrency: int, _steps: int) -> Ratio:
        return Ratio(1.1, 0.05, "a test")


def test_a_rule_refuses_and_force_goes_on() -> None:
    found = run("kimi-k2.5-int4-eagle3", "--", "--moe-runner-backend", "flashinfer_trtllm", code=51)
    assert found["verdict"] == "refused"
    assert any("trtllm-gen" in line for line in found["refusals"])
    forced = CliRunner().invoke(
        command,
        ["kimi-k2.5-int4-eagle3", "--no-resolve", "--force", "--", "--moe-runner-backend", "flashinfer_trtllm"],
        catch_exceptions=False,
    )
    assert forced.exit_code == 0
    assert "refused" in forced.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(
            ["kimi-k2.5-int4-eagle3"],
            {
                "without speculation": [],
                "FP8 KV cache": ["kimi-int4-fp8-kv", "fp8-kv-mla-verify"],
                "fraction 0.95": ["nccl-buffers"],
                "experts apart (EP)": ["ep-pcie"],
            },
            id="Kimi on eight boards",
        ),
        pytest.param(
            ["qwen3-8b-eagle3", "--gpus", "1xDGX Spark"],
            {"FP8 KV cache": [], "graphs up to 16": [], "without speculation": [], "fraction 0.90": ["spark-fraction"]},
            id="DGX Spark",
        ),
        pytest.param(
            ["kimi-k2.5-int4-eagle3", "--gpus", "8xB200"],
            {"FP8 KV cache": [], "fraction 0.90": [], "experts apart (EP)": [], "without speculation": []},
            id="no warning of any",
        ),
    ],
)
def test_what_a_rule_warns_of_is_offered_last(arguments: list[str], expected: dict[str, list[str]]) -> None:
    others = run(*arguments)["alternatives"]
    assert [(other["title"], other["warned_by"]) for other in others] == list(expected.items())


def test_what_a_rule_forbids_is_not_offered() -> None:
    known = facts.Facts({"arch": "sm121", "speculates": True}, {"kv-cache-dtype": "auto"}, {})
    offered = [Alternative("x", "--kv-cache-dtype nvfp4", None), Alternative("y", "--kv-cache-dtype fp8_e4m3", None)]
    assert [other.title for other in allowed(offered, known)] == ["y"]


def test_a_warning_is_seen_in_the_table() -> None:
    shown = CliRunner().invoke(command, [KIMI_RECIPE, "--no-resolve"], catch_exceptions=False).output
    assert "but see" in shown
    assert "ep-pcie" in shown


def test_a_model_is_not_its_own_eagle3_draft() -> None:
    found = run("qwen3-8b-eagle3", "--draft", "Qwen/Qwen3-8B", code=51)
    assert any(line.startswith("plain-model-as-eagle3-draft: ") for line in found["refusals"])


def verdicts_of(*arguments: str) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = run(KIMI_RECIPE, *arguments)["speculation"]["cells"]
    return cells


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(["--gpus", "8xB200"], id="board"), pytest.param(["--fabric", "nvlink"], id="fabric")],
)
def test_another_board_s_cost_does_not_decide_what_its_interval_leaves_open(arguments: list[str]) -> None:
    there, here = verdicts_of(*arguments), verdicts_of()
    assert not [
        cell
        for cell in there
        if cell["verdict"] != "undecided" and cell["speedup"]["low"] < 1 < cell["speedup"]["high"]
    ]
    decided = [sum(cell["verdict"] != "undecided" for cell in cells) for cells in (there, here)]
    assert decided[0] < decided[1]
    assert all("on RTX PRO 6000 over PCIe (" in cell["basis"] for cell in there + here)


def test_a_renamed_flag_is_refused_with_its_new_name() -> None:
    found = run("kimi-k2.5-int4-eagle3", "--", "--cuda-graph-max-bs", "16", code=51)
    (flag,) = [flag for flag in found["flags"] if flag["fate"] == "renamed"]
    assert flag["instead"] == ["--cuda-graph-max-bs-decode", "16"]


def test_another_engine() -> None:
    error = refused("kimi-k2.5-int4-eagle3", "--engine", "0.5.9")
    assert error.exit_code == 54
    assert ">=0.5.23" in error.message


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        pytest.param(["tiny"], 52, "not known for which GPUs", id="no GPU anywhere"),
        pytest.param(["kimi-k2.5-int4-eagle3", "--gpus", "4xRTX PRO 6000"], 52, "for 8 GPUs", id="too few GPUs"),
        pytest.param(
            ["kimi-k2.5-int4-eagle3", "--gpus", "8xRTX PR 6000"], 55, "no board is called", id="unknown board"
        ),
        pytest.param(["o/m", "--gpus", "B200"], 52, "no configuration of the target o/m", id="unknown model"),
        pytest.param(["./absent", "--gpus", "B200"], 52, "there is no directory", id="no directory"),
        pytest.param(["kimi", "--gpus", "B200"], 30, "no recipe 'kimi'", id="unknown recipe"),
        pytest.param(["tiny", "--gpus", "8"], 55, "no board is called '8'", id="a number alone"),
        pytest.param([KIMI, "--gpus", PRO, "--engine", "new"], 52, "'new' is not a version", id="no version"),
        pytest.param([KIMI, "--gpus", PRO, "--", "--tp-size", "8", "--ep-size", "3"], 56, "ep 3", id="experts"),
        pytest.param([KIMI, "--gpus", PRO, "--", "--tp-size", "0"], 52, "--tp-size 0", id="no GPUs at all"),
        pytest.param(
            [KIMI, "--gpus", PRO, "--", "--tp-size", "8", "--mem-fraction-static", "nan"], 56, "not a number", id="NaN"
        ),
        pytest.param(
            [KIMI, "--gpus", PRO, "--", "--tp-size", "8", "--max-running-requests", "-4"], 56, "-4", id="negative"
        ),
        pytest.param(["kimi-k2.5-int4-eagle3", "--decode", "/absent.csv"], 58, "cannot be read", id="no measurements"),
    ],
)
def test_bad_input(arguments: list[str], code: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "new" in arguments:
        monkeypatch.undo()
    error = refused(*arguments)
    assert error.exit_code == code, error
    assert says in error.message
    assert error.hint


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        pytest.param("--mem-fraction-static", "has no value", id="nothing"),
        pytest.param("--mem-fraction-static 1.5", "expected 0 to 1", id="too much"),
        pytest.param("--mem-fraction-static 0", "not in 0..1", id="none"),
        pytest.param("--context-length abc", "abc, not a whole number", id="text"),
        pytest.param("--max-running-requests 1e400", "inf, not a whole number", id="infinite"),
        pytest.param("--page-size 64 64", "takes one value, not 2", id="two values"),
        pytest.param("--page-size 0", "expected 1 or more", id="zero"),
        pytest.param("--cuda-graph-bs-decode 1 2 x", "1 2 x, not a whole number", id="text in a list"),
        pytest.param("--speculative-num-steps -3", "-3, expected 1 to 256", id="negative steps"),
        pytest.param("--speculative-num-steps 99999999", "expected 1 to 256", id="endless steps"),
        pytest.param("--mamba-full-memory-ratio x", "x, not a number", id="ratio"),
    ],
)
def test_a_flag_that_is_not_the_number_it_must_be(flags: str, says: str) -> None:
    error = refused("qwen3-8b-eagle3", "--", *flags.split())
    assert (error.exit_code, bool(error.hint)) == (56, True)
    assert says in error.message


def test_all_numbers_that_are_wrong_are_named() -> None:
    error = refused("qwen3-8b-eagle3", "--", "--page-size", "x", "--context-length", "y")
    assert all(flag in error.message for flag in ("--page-size", "--context-length"))


def test_a_model_is_divided_over_the_gpus_that_are_named() -> None:
    found = run(KIMI, "--gpus", PRO, "--", "--mem-fraction-static", "0.90")
    assert found["argv"][-2:] == ["--tp-size", "8"]
    assert any("--tp-size 8" in note for note in found["notes"])
    assert planning.divided(KIMI, (), 1) == ((), "")
    assert planning.divided("kimi-k2.5-int4-eagle3", (), 8) == ((), "")


def test_replicas_need_gpus_of_their_own() -> None:
    assert "2 GPUs (tp 1 x pp 1 x dp 2)" in refused("qwen3-8b-eagle3", "--", "--dp-size", "2").message
    run("qwen3-8b-eagle3", "--gpus", "2xRTX PRO 6000", "--", "--dp-size", "2")
    groups = ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"]
    run("qwen3-8b-eagle3", "--gpus", "2xRTX PRO 6000", "--", *groups)


def test_a_config_that_lacks_fields(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    error = refused(str(tmp_path), "--gpus", "B200")
    assert error.exit_code == 56
    assert "hidden_size" in error.message


def test_a_local_model_with_headers(tmp_path: Path) -> None:
    tiny = configs.find(lookup.find("tiny").target)
    assert tiny
    found = run(str(tiny.path), "--gpus", "RTX 5090", "--no-spec")
    assert found["memory"]["weights"] == "safetensors headers"
    assert found["speculation"] is None


def test_decode_points_of_the_host_are_believed(tmp_path: Path) -> None:
    points = tmp_path / "decode.csv"
    points.write_text("context,concurrency,tok_s\n0,1,89.5\n0,4,110\n0,16,120\n")
    found = run("kimi-k2.5-int4-eagle3", "--decode", str(points), "--context", "2048", "--concurrency", "1")
    (cell,) = found["speculation"]["cells"]
    assert cell["verdict"] == "loses"  # four rows cost over three times a row
    points.write_text("context,concurrency,tok_s\n0,1,nan\n")
    assert refused("kimi-k2.5-int4-eagle3", "--decode", str(points)).exit_code == 58


def test_slow_all_reduces_never_pay(tmp_path: Path) -> None:
    """The first system: 89.5 tok/s, 122 all-reduces a pass, about 200 us at the size of the verify pass."""
    probe, points = tmp_path / "probe.json", tmp_path / "decode.csv"
    sizes = [14336, 28672, 57344, 114688, 229376, 458752, 917504, 1835008, 3670016]
    rows = [
        {"bytes": size, "microseconds": 90 if size < 20000 else 200 * max(1, size / 57344) ** 0.5} for size in sizes
    ]
    probe.write_text(json.dumps({"probe": "allreduce", "latencies": rows}))
    points.write_text("context,concurrency,tok_s\n0,1,89.5\n")
    found = run(
        "kimi-k2.5-int4-eagle3", "--decode", str(points), "--probe-allreduce", str(probe)
    )  # fmt: skip
    assert "pays" not in {cell["verdict"] for cell in found["speculation"]["cells"]}


def test_it_is_quick() -> None:
    begun = time.process_time()
    CliRunner().invoke(command, ["kimi-k2.5-int4-eagle3", "--no-resolve"], catch_exceptions=False)
    assert time.process_time() - begun < 1.5


def test_a_table_goes_alone(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["tiny", "--replay", str(tmp_path / "x.csv")])
    assert result.exit_code == 2
    assert CliRunner().invoke(command, []).exit_code == 2


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_is_readable(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_bw.cli import console

    monkeypatch.setattr(console.out, "_width", width)
    shown = CliRunner().invoke(command, ["kimi-k2.5-int4-eagle3", "--no-resolve"], catch_exceptions=False).output
    lines = shown.splitlines()
    assert lines[0].startswith("kimi-k2.5-int4-eagle3: fits")
    assert any("weights target" in line and "71." in line for line in lines)
    assert any("does speculation pay" in line for line in lines)
    assert "\x1b" not in shown


def test_what_is_set_in_the_shell_counts_where_the_plan_is_for_the_gpus_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setenv("NCCL_P2P_LEVEL", "NVL")  # the recipe's is SYS
    monkeypatch.setenv("SGLANG_ANYTHING", "1")
    monkeypatch.setenv("TORCH_ANYTHING", "nobody judges by it")
    elsewhere = run(KIMI_RECIPE)  # no GPU is here
    assert "NCCL_ALGO" not in elsewhere["env"]
    assert elsewhere["env"]["NCCL_P2P_LEVEL"] == "SYS"

    monkeypatch.setattr(nvml, "load", Host().nvml)
    here = run(KIMI_RECIPE, code=51)
    assert "nccl-tree-graphs" in [finding["rule"] for finding in here["findings"]]
    assert here["env"]["NCCL_P2P_LEVEL"] == "NVL"
    assert "TORCH_ANYTHING" not in here["env"]
    note = "set in this shell, and so for `serve`: NCCL_ALGO=Tree, NCCL_P2P_LEVEL=NVL, SGLANG_ANYTHING=1"
    assert note in here["notes"]


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0,1,2", 3), ("5", 1), pytest.param("", None, id="none"), pytest.param("9", None, id="not here")],
)
def test_the_gpus_here_are_those_that_the_shell_shows(
    visible: str, count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "load", Host().nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if count is None:
        assert f"CUDA_VISIBLE_DEVICES={visible} shows none here" in refused("tiny").message
        return
    assert run("tiny")["machine"]["gpus"] == count
