"""`ab` on mock servers: planted effects are found, guards speak, and whatever happens the record is whole."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bw.errors import LoadError
from sglang_bw.experiment import ab as experiment
from sglang_bw.experiment import arm as arms
from sglang_bw.experiment import blocks
from sglang_bw.experiment import prompts as prompt_sets
from sglang_bw.experiment import verdict as verdicts
from sglang_bw.experiment.ab import Experiment
from sglang_bw.experiment.arm import Arm, ArmPlan, Name
from sglang_bw.experiment.client import Sampling
from sglang_bw.experiment.head import head
from sglang_bw.experiment.pair import Pair
from sglang_bw.experiment.prompts import Prompt
from sglang_bw.experiment.settings import Settings
from sglang_bw.experiment.verdict import Limits
from sglang_bw.launch import port as ports
from sglang_bw.launch.server import PortLostError
from sglang_bw.ledger.record import Block, RequestRow, RunRecord
from sglang_bw.ledger.report.policy import switches
from sglang_bw.ledger.runfile import RunFile, read
from tests.experiment.conftest import Silent, StartMock
from tests.launch.serving import until
from tests.ledger.runs import ratio

FAST = ["--prompts", "tiny", "--count", "6", "--max-tokens", "12", "--rounds", "4"]


def command(record: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "sglang_bw", "ab", "--record", str(record), *arguments]


# A busy machine may drift while it is measured; the run is then said not to be valid, rightly.
DONE = (0, 74)


def run_ab(record: Path, *arguments: str, code: int | tuple[int, ...] = DONE) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(record, *arguments), capture_output=True, text=True, timeout=300)
    assert done.returncode in (code if isinstance(code, tuple) else (code,)), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def compare(record: Path, a: str, b: str, *arguments: str, code: int | tuple[int, ...] = DONE) -> RunRecord:
    run_ab(record, "--url", a, "--url", b, *FAST, *arguments, code=code)
    return read(record)


def outcome(run: RunRecord) -> Any:
    assert run.outcome
    return run.outcome


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


@pytest.mark.alone
def test_a_slower_server_is_found(mock: StartMock, record: Path) -> None:
    run = compare(record, mock(token_s=0.01), mock(token_s=0.02), "--concurrency", "1,3")
    assert [ratio.verdict for ratio in outcome(run).ratios] == ["slower", "slower"]
    assert [0.4 < ratio.value < 0.65 for ratio in outcome(run).ratios] == [True, True]
    assert outcome(run).failure is None
    assert outcome(run).valid is not any(ratio.drifted for ratio in outcome(run).ratios)


def test_blocks_alternate_and_hold_every_request(mock: StartMock, record: Path) -> None:
    run = compare(record, mock(), mock(), "--concurrency", "2")
    assert "".join(block.arm for block in run.blocks) == "ABBAABBA"
    assert [block.round for block in run.blocks] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {len(block.rows) for block in run.blocks} == {6}
    assert len({tuple(row.prompt for row in block.rows) for block in run.blocks}) == 1
    assert outcome(run).outputs.different == 0
    assert outcome(run).outputs.compared == 6


@pytest.mark.alone
def test_speculation_is_told_with_its_histogram_and_its_cost(mock: StartMock, record: Path) -> None:
    plain, fast = mock(token_s=0.01), mock(token_s=0.02, burst=3, speculative=True)
    run = compare(record, plain, fast, "--max-tokens", "30", "--goodput", "tpot=0.009")
    (ratio,) = outcome(run).ratios
    assert ratio.verdict == "faster"
    assert ratio.b.accept_length == 3.0
    assert ratio.b.histogram[2] == sum(ratio.b.histogram) > 0
    assert ratio.a.accept_length is None
    assert ratio.round_cost == pytest.approx(2, abs=0.5)
    assert ratio.a.goodput == 0
    assert ratio.b.goodput
    assert run.difference["speculative_algorithm"] == (None, "EAGLE3")
    assert run.arms[1].speculation == "EAGLE3, 3 steps, topk 1, 4 draft tokens"


def test_memory_and_the_switches_of_a_policy_are_recorded(mock: StartMock, record: Path) -> None:
    run = compare(record, mock(), mock(speculative=True, adapts=True))
    assert run.arms[1].memory == {"weights": 1.5, "KV cache": 0.25, "graphs": 0.75, "free": 9.0}
    assert not any(block.policy for block in run.blocks if block.arm == "A")
    assert all(block.policy for block in run.blocks if block.arm == "B")
    found = switches(run)
    assert sum(one.count for one in found) == 4  # 26 requests, the warm-up's two among them
    assert {(one.before, one.after) for one in found} <= {(1, 3), (3, 1)}
    assert found[0].reason == "batch 1: pays"


def test_a_planted_difference_is_shown(mock: StartMock, record: Path) -> None:
    run = compare(record, mock(), mock(differs_at=7))
    assert outcome(run).outputs.different == 6
    first = outcome(run).outputs.first
    assert (first.position, first.unit) == (7, "token")
    assert int(first.b.split()[0]) == int(first.a.split()[0]) + 1


@pytest.mark.parametrize("differs_at", [-1, 7])
@pytest.mark.parametrize("ids", [(True, False), (False, True), (False, False)])
def test_answers_without_ids_are_compared_as_text(
    mock: StartMock, record: Path, ids: tuple[bool, bool], differs_at: int
) -> None:
    run = compare(record, mock(ids=ids[0]), mock(ids=ids[1], differs_at=differs_at), "--rounds", "2")
    found = outcome(run).outputs
    assert (found.compared, found.different) == (6, 0 if differs_at < 0 else 6)
    assert differs_at < 0 or (found.first.position, found.first.unit) == (7, "character")


@pytest.mark.parametrize(
    ("row", "met"),
    [
        ({"output_tokens": 5, "ttft_s": 0.1, "tpot_s": 0.1, "e2e_s": 0.5}, True),
        ({"output_tokens": 1, "ttft_s": 0.1, "e2e_s": 0.1}, True),
        ({"output_tokens": 5, "ttft_s": 0.1, "tpot_s": 0.3, "e2e_s": 0.5}, False),
        ({"output_tokens": 0, "e2e_s": 0.1}, False),
        ({"output_tokens": 5, "e2e_s": 0.1}, False),
        ({}, False),
    ],
)
def test_a_request_without_tokens_is_no_good_one(row: dict[str, Any], met: bool) -> None:
    assert Limits(ttft_s=1, tpot_s=0.2, e2e_s=1).met(RequestRow(prompt="p", **row)) is met


@pytest.mark.alone
def test_a_broken_baseline_is_flagged(mock: StartMock, record: Path) -> None:
    """A plain decode step of 40 ms against rounds of 10: no verify pass is cheaper than a decode step."""
    slow, fast = mock(token_s=0.04), mock(token_s=0.01, burst=3, speculative=True)
    run = compare(record, slow, fast, "--max-tokens", "15", code=74)
    assert not outcome(run).valid
    assert "the baseline is broken" in " ".join(outcome(run).warnings)


@pytest.mark.parametrize(("cost", "is_broken"), [(0.99, False), (0.96, True), (1.02, False)])
def test_a_baseline_is_not_broken_by_noise(cost: float, is_broken: bool) -> None:
    update = {"value": 1.0, "low": 0.97, "high": 1.03, "half_width": 0.03, "round_cost": cost}
    assert verdicts.is_broken(ratio(1, 1.0).model_copy(update=update)) == is_broken


@pytest.mark.alone
def test_a_machine_that_drifts_is_flagged(mock: StartMock, record: Path) -> None:
    """Only the baseline slows down, by half from its first block to its last."""
    run = compare(record, mock(token_s=0.01, slower=0.02), mock(token_s=0.01), "--rounds", "4", code=74)
    assert outcome(run).ratios[0].drift < 0.8
    assert "drifted" in " ".join(outcome(run).warnings)


def test_random_tokens_are_refused_where_an_accept_length_is_measured(mock: StartMock, record: Path) -> None:
    servers = ["--url", mock(), "--url", mock(speculative=True), "--prompts", "random", "--rounds", "2"]
    refused = run_ab(record, *servers, code=73)
    assert "--allow-random" in refused.stderr
    run_ab(record.with_name("forced"), *servers, "--allow-random", "--count", "2", "--max-tokens", "6")


def test_more_requests_at_a_time_than_prompts_are_refused(record: Path) -> None:
    """Six prompts at "64 at once" would be six at once."""
    servers = ["--url", "http://127.0.0.1:1", "--url", "http://127.0.0.1:2"]
    refused = run_ab(record, *servers, *FAST, "--concurrency", "4,24", code=73)
    assert "tiny has 6 prompts here: never would 24 requests be open" in refused.stderr
    assert "(bundled: tiny)" in refused.stderr
    assert not record.exists()
    assert "(bundled: none)" in run_ab(record, *servers, "--concurrency", "64", code=73).stderr


@given(st.integers(1, 200), st.integers(1, 64))
def test_no_part_of_a_block_has_fewer_prompts_than_requests_at_a_time(count: int, concurrency: int) -> None:
    prompts = [Prompt(str(number), text="x") for number in range(max(count, concurrency))]
    parts = blocks.split(prompts, concurrency)
    assert [prompt for part in parts for prompt in part] == prompts
    assert all(len(part) >= concurrency for part in parts)
    assert len(parts) == 1 or min(map(len, parts)) >= 2 * concurrency
    assert len(parts) <= 8


def test_the_prefix_cache_is_flushed_before_every_block(mock: StartMock, record: Path) -> None:
    import httpx

    a, b = mock(), mock()
    compare(record, a, b, "--concurrency", "1,2")
    # Two concurrencies: a warm-up each, then four rounds of both.
    assert httpx.get(f"{a}/counts", trust_env=False).json()["flushed"] == 2 + 4 * 2


def test_rounds_go_on_until_the_interval_is_narrow(mock: StartMock, record: Path) -> None:
    arguments = ["--prompts", "tiny", "--count", "4", "--max-tokens", "8", "--within", "30%"]
    run_ab(record, "--url", mock(token_s=0.01), "--url", mock(token_s=0.01), *arguments)
    (ratio,) = outcome(read(record)).ratios
    assert ratio.half_width <= 0.3
    assert ratio.rounds >= 6
    assert ratio.rounds % 2 == 0


def test_the_budget_ends_a_run(mock: StartMock, record: Path) -> None:
    arguments = ["--prompts", "tiny", "--count", "4", "--max-tokens", "8", "--within", "0.0001", "--budget", "3s"]
    run_ab(record, "--url", mock(token_s=0.01), "--url", mock(token_s=0.01), *arguments)
    assert any("the budget ended" in warning for warning in outcome(read(record)).warnings)


def measured(mock: StartMock, record: Path, *arguments: str) -> Any:
    load = ["--prompts", "tiny", "--count", "2", "--max-tokens", "4"]
    run_ab(record, "--url", mock(token_s=0.01), "--url", mock(token_s=0.02), *load, *arguments)
    return outcome(read(record))


def test_a_budget_that_ends_before_the_rounds_is_told(mock: StartMock, record: Path) -> None:
    found = measured(mock, record, "--rounds", "30", "--budget", "1.5s")
    assert any(re.search(r"budget ended after \d+ of 30 rounds", warning) for warning in found.warnings)


def test_the_most_rounds_are_named(mock: StartMock, record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(mock, record, "--within", "0.001%")
    assert found.ratios[0].rounds == experiment.MOST_ROUNDS == 40
    (said,) = [warning for warning in found.warnings if "within" in warning]
    assert "after 40 rounds" in said
    assert "within 0.001 %" in said
    assert "budget" not in said


@pytest.mark.parametrize(("rounds", "verdict"), [(2, "undecided"), (3, "undecided"), (4, "slower")])
def test_few_rounds_have_no_verdict(rounds: int, verdict: str) -> None:
    row = RequestRow(prompt="p", output_tokens=10, ttft_s=0.1, e2e_s=1.0)
    found = [
        Block(arm=arm, round=number, position=0, concurrency=1, began=datetime.now(UTC), seconds=1.0, rows=(slow,))
        for number in range(rounds)
        for arm, slow in (("A", row), ("B", row.model_copy(update={"e2e_s": 2.0})))
    ]
    ratio = verdicts.ratio(found, 1, Limits(), (False, False))
    assert ratio
    assert ratio.high < 1
    assert ratio.verdict == verdict


def test_a_run_of_few_rounds_says_so(mock: StartMock, record: Path) -> None:
    found = measured(mock, record, "--rounds", "2")
    assert found.ratios[0].verdict == "undecided"
    assert any("fewer than 4 rounds" in warning for warning in found.warnings)


def test_the_start_of_both_arms_is_no_part_of_the_budget(mock: StartMock, record: Path) -> None:
    plans = ArmPlan("A", "a", mock(token_s=0.001)), ArmPlan("B", "b", mock(token_s=0.001))

    def slowly(plan: ArmPlan) -> Arm:
        time.sleep(1.5)
        return Arm(plan, None)

    prompts = prompt_sets.load("tiny").first(2)
    settings = Settings(prompts, Sampling(max_tokens=4), budget_s=1.0, within=1e-6)
    run_here(plans, slowly, settings, record)
    assert len(read(record).blocks) > 4


def test_only_the_first_round_of_turns_loads_both_arms(
    mock: StartMock, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that only loads move: the first round takes two, the second one, and a third would end at four."""
    loads: list[Name] = []
    monkeypatch.setattr(experiment, "time", SimpleNamespace(monotonic=lambda: float(len(loads))))
    plans = ArmPlan("A", "a", mock(token_s=0.001)), ArmPlan("B", "b", mock(token_s=0.001))

    def load(plan: ArmPlan) -> Arm:
        loads.append(plan.name)
        return Arm(plan, None)

    settings = Settings(prompt_sets.load("tiny").first(2), Sampling(max_tokens=4), budget_s=3.5, within=1e-6)
    run_here(plans, load, settings, record, together=False)
    assert loads == ["A", "B", "A"]
    assert [ratio.rounds for ratio in outcome(read(record)).ratios] == [2]


def run_here(
    plans: tuple[ArmPlan, ArmPlan],
    start: Callable[[ArmPlan], Arm],
    settings: Settings,
    record: Path,
    *,
    together: bool = True,
    pair: type[Pair] = Pair,
) -> None:
    begin = head(plans, None, settings, recipe=None)
    Experiment(begin, pair(plans, start, together=together), settings, RunFile(record), Silent()).run()


class Engines(Pair):
    """Knows that every engine is gone, as for those that were started here."""

    def why(self, name: Name) -> str | None:
        return f"the engine of arm {name} ended: SIGKILL"


@pytest.mark.parametrize(
    ("fault", "pair", "failure"), [("dies-idle", Engines, "server-died"), ("hangs-idle", Pair, "timeout")]
)
def test_an_engine_that_fails_between_blocks_has_failed(
    mock: StartMock, record: Path, monkeypatch: pytest.MonkeyPatch, fault: str, pair: type[Pair], failure: str
) -> None:
    monkeypatch.setattr(arms, "_ASK_S", 1.0)
    plans = ArmPlan("A", "a", mock()), ArmPlan("B", "b", mock(fault=fault, fault_after=2))
    settings = Settings(prompt_sets.load("tiny").first(2), Sampling(max_tokens=4))
    with pytest.raises(LoadError):
        run_here(plans, lambda plan: Arm(plan, None), settings, record, pair=pair)
    found = outcome(read(record))
    assert (found.failure, found.arm) == (failure, "B")


def test_a_port_that_is_lost_is_no_failure_of_a_launch(mock: StartMock, record: Path) -> None:
    plans = ArmPlan("A", "a", mock()), ArmPlan("B", "b", mock())

    def lose(_plan: ArmPlan) -> Arm:
        raise PortLostError("another process took port 1 while the engine loaded")

    with pytest.raises(PortLostError):
        run_here(plans, lose, Settings(prompt_sets.load("tiny").first(2)), record)
    assert outcome(read(record)).failure == "other"


@pytest.mark.parametrize(
    ("fault", "code", "failure", "says"),
    [
        ("die", 70, "server-died", "broke the connection"),
        ("500", 70, "server-error", "out of memory"),
        ("garbage", 70, "bad-stream", "not what the API promises"),
        ("deep", 70, "bad-stream", "nested too deeply"),
        ("nine", 70, "bad-stream", "prompt_tokens is 'nine'"),
        ("empty", 70, "server-error", "no tokens"),
        ("abort", 70, "server-error", "aborted the request"),
        ("never", 70, "timeout", "said nothing"),
        ("context", 72, "prompts", "does not fit"),
        ("400", 70, "prompts", "no tools here"),
    ],
)
def test_a_failure_mid_run_keeps_what_was_finished(
    mock: StartMock, record: Path, fault: str, code: int, failure: str, says: str
) -> None:
    """B fails in its second block: warm-up 2, then 6 a block."""
    servers = ["--url", mock(), "--url", mock(fault=fault, fault_after=10)]
    failed = run_ab(record, *servers, *FAST, "--request-timeout", "1", code=code)
    assert failed.stderr.count("\nerror: ") == 1
    assert says in failed.stderr
    run = read(record)
    assert [block.arm for block in run.blocks] == ["A", "B"]
    assert outcome(run).failure == failure
    assert not outcome(run).valid


def test_a_fault_of_this_tool_has_an_outcome_too(
    mock: StartMock, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = ArmPlan("A", "a", mock()), ArmPlan("B", "b", mock())
    settings = Settings(prompt_sets.load("tiny").first(2), Sampling(max_tokens=4), rounds=2)
    monkeypatch.setattr(Silent, "round_over", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_here(plans, lambda plan: Arm(plan, None), settings, record)
    run = read(record)
    assert (len(run.blocks), outcome(run).failure) == (2, "other")
    assert outcome(run).failure_text == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("kv_tokens", ["many", float("inf")])
def test_a_server_that_says_nonsense_of_itself(mock: StartMock, record: Path, kv_tokens: object) -> None:
    failed = run_ab(record, "--url", mock(), "--url", mock(kv_tokens=kv_tokens), *FAST, code=71)
    assert "arm B says of itself what SGLang does not say" in failed.stderr
    assert outcome(read(record)).failure == "wrong-arm"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_kill_loses_nothing_that_was_finished(mock: StartMock, record: Path, number: signal.Signals) -> None:
    servers = ["--url", mock(token_s=0.01), "--url", mock(token_s=0.01), *FAST, "--rounds", "200"]
    process = subprocess.Popen(command(record, *servers), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until(lambda: record.exists() and record.read_text().count('"kind":"block"') >= 3, 60, "three blocks")
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    run = read(record)
    assert len(run.blocks) >= 3
    if number is signal.SIGKILL:
        assert run.outcome is None
    else:
        assert (process.returncode, outcome(run).failure) == (130, "interrupted")
        assert "Traceback" not in said


def test_a_record_that_cannot_be_written(mock: StartMock, record: Path) -> None:
    record.write_text("here already")
    done = run_ab(record, "--url", mock(), "--url", mock(), *FAST, code=17)
    assert "is there already" in done.stderr
    done = run_ab(record / "below-a-file", "--url", mock(), "--url", mock(), *FAST, code=17)
    assert "cannot write the record" in done.stderr
    assert record.read_text() == "here already"


def test_a_disk_that_fills_up_is_one_error_and_keeps_the_rest(mock: StartMock, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: the run file may have 20 kB."""
    record = tmp_path / "run.jsonl"
    servers = ["--url", mock(), "--url", mock(), *FAST, "--rounds", "60"]
    script = "ulimit -f 20; trap '' XFSZ; exec \"$@\""
    done = subprocess.run(
        ["bash", "-c", script, "-", *command(record, *servers)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 17, done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot write the record" in done.stderr
    assert read(record).blocks


def test_servers_that_are_not_there(mock: StartMock, record: Path) -> None:
    gone = run_ab(record, "--url", "http://127.0.0.1:1", "--url", mock(), *FAST, code=70)
    assert "does not answer at http://127.0.0.1:1" in gone.stderr
    assert outcome(read(record)).failure == "other"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "a recipe is missing"),
        (["tiny"], "say what to compare with"),
        (["tiny", "--no-spec", "--vs", "tiny"], "say what to compare with"),
        (["--url", "http://a:1"], "--url is given twice"),
        (["--url", "ftp://a", "--url", "http://b"], "is no address"),
        (["--url", "http://[::1", "--url", "http://b"], "is no address"),
        (["--url", "http://a:99999", "--url", "http://b"], "is no address"),
        (["tiny", "--no-spec", "--request-timeout", "nan"], "is no number"),
        (["tiny", "--set", "steps"], "is no KEY=VALUE"),
        (["tiny", "--set", "x=[1,"], "is no list of values"),
        (["tiny", "--set", os.fsdecode(b"X=\xff")], "is no KEY=VALUE"),
        (["tiny", "--set", "page-size=1", "--set", "page-size=2"], "page-size is set twice"),
        (["tiny", "--set", "pagesize="], "has no pagesize to leave out"),
        (["tiny", "--set", "enable-metrics=off"], "has no enable-metrics to leave out"),
        (["tiny", "--no-spec", "--", "--served-model-name", os.fsdecode(b"\xff")], "is no UTF-8"),
        (["tiny", "--no-spec", "--", "--port", "40000"], "both arms would listen on port 40000"),
        (["tiny", "--no-spec", "--within", "0"], "is no share"),
        (["tiny", "--no-spec", "--budget", "soon"], "is no duration"),
        (["tiny", "--no-spec", "--concurrency", "0,1"], "is no list of numbers"),
        (["tiny", "--no-spec", "--goodput", "fast=1"], "is no limit"),
        (["tiny", "--no-spec", "--rounds", "1"], "x>=2"),
    ],
)
def test_wrong_usage(record: Path, arguments: list[str], says: str) -> None:
    assert says in run_ab(record, *arguments, code=2).stderr


def test_dry_run_shows_both_arms_and_starts_nothing(record: Path) -> None:
    arguments = ["tiny", "--set", "page-size=4", "--set", "NCCL_ALGO=Ring", "--dry-run", "--device", "cpu"]
    shown = run_ab(record, *arguments, "--", "--max-running-requests", "4").stdout
    assert shown.count("--max-running-requests 4") == 2
    assert shown.count("--page-size 4") == 1
    assert shown.count("NCCL_ALGO=Ring sglang") + shown.count("NCCL_ALGO=Ring OMP") == 1
    assert not record.exists()
    dry = json.loads(run_ab(record, *arguments, "--json").stdout)
    assert dry["arms"][0]["name"] == "A"


@pytest.mark.parametrize(
    ("value", "flag"),
    [
        ("010", ["--x", "010"]),
        ("12:30", ["--x", "12:30"]),
        ('{"a": 1}', ["--x", '{"a": 1}']),
        ("[1, 2]", ["--x", "1", "2"]),
        ("x: y: z", ["--x", "x: y: z"]),
        ("true", ["--x"]),
    ],
)
def test_a_value_of_set_reaches_the_engine_as_it_was_typed(record: Path, value: str, flag: list[str]) -> None:
    dry = run_ab(record, "tiny", "--set", f"x={value}", "--dry-run", "--device", "cpu", "--json", code=0)
    argv = json.loads(dry.stdout)["arms"][1]["argv"]
    assert argv[argv.index("--x") :] == flag


@pytest.mark.parametrize(("budget", "says"), [("30s", "30 s"), ("90s", "90 s"), ("150s", "2.5 min"), ("2h", "120 min")])
def test_a_budget_is_shown_as_it_is(record: Path, budget: str, says: str) -> None:
    arguments = ["--url", "http://a:1", "--url", "http://b:1", "--budget", budget, "--dry-run"]
    assert f"at most {says}, blocks" in run_ab(record, *arguments, code=0).stdout


def test_a_flag_may_be_left_out(record: Path) -> None:
    arguments = ["tiny", "--set", "max-running-requests=", "--dry-run", "--device", "cpu", "--json"]
    a, b = json.loads(run_ab(record, *arguments, code=0).stdout)["arms"]
    assert "--max-running-requests" in a["argv"]
    assert "--max-running-requests" not in b["argv"]


def test_what_can_be_refused_is_refused_before_a_load(record: Path) -> None:
    """Nothing was started: no record was begun."""
    refused = run_ab(record, "tiny", "--no-spec", "--prompts", "random", code=73)
    assert "random tokens inflate the accept length" in refused.stderr
    free = ports.next_free("127.0.0.1", 33000)
    assert free
    with socket.create_server(("127.0.0.1", free + 1)):
        refused = run_ab(record, "tiny", "--no-spec", "--prompts", "tiny", "--port", str(free), code=33)
    assert f"port {free + 1} on 127.0.0.1 is in use" in refused.stderr
    assert not record.exists()


@pytest.mark.parametrize(
    ("change", "tokens"),
    [
        (["--set", "speculative-num-steps=5"], "6"),
        (["--set", "speculative-num-steps=5", "--set", "speculative-num-draft-tokens=4"], "4"),
        (["--set", "speculative-num-steps=2", "--set", "speculative-eagle-topk=4"], "4"),
        (["--no-spec", "--", "--speculative-num-steps", "5"], "6"),
    ],
)
def test_the_draft_tokens_of_a_chain_follow_its_steps(record: Path, change: list[str], tokens: str) -> None:
    """As in the engine, which an arm is compared with; a tree has its own number."""
    shown = run_ab(record, "tiny", "--device", "cpu", "--dry-run", "--json", *change).stdout
    flags = json.loads(shown)["arms"][1]["argv"]
    assert flags.count("--speculative-num-draft-tokens") == 1
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == tokens


@pytest.mark.parametrize(("value", "simulated"), [("3", True), ("-1", False), ("", False)])
def test_simulated_acceptance_of_the_shell_is_recorded(
    record: Path, monkeypatch: pytest.MonkeyPatch, value: str, simulated: bool
) -> None:
    """The engine gets the whole environment of the shell, not only what the launch adds."""
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", value)
    arguments = ["tiny", "--no-spec", "--dry-run", "--json", "--device", "cpu"]
    assert json.loads(run_ab(record, *arguments).stdout)["simulated"] is simulated
    over = run_ab(record, "tiny", "--set", "SGLANG_SIMULATE_ACC_LEN=2", *arguments[2:])
    assert json.loads(over.stdout)["simulated"]


def test_secrets_do_not_reach_the_record(mock: StartMock, record: Path) -> None:
    environ = {**os.environ, "SGLANG_API_KEY": "hush-hush"}
    arguments = command(record, "--url", mock(), "--url", mock(), *FAST, "--json")
    done = subprocess.run(arguments, capture_output=True, text=True, env=environ, timeout=120)
    assert done.returncode in DONE, done.stderr
    assert "hush" not in record.read_text() + done.stdout + done.stderr
    assert json.loads(done.stdout)["outcome"]["failure"] is None
    dry = run_ab(record, "tiny", "--no-spec", "--dry-run", "--json", "--", "--api-key", "hush-hush")
    assert "hush" not in dry.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["tiny", "--set", "HF_TOKEN=hush-1", "--set", "api-key=hush-2", "--set", "--api-k=hush-3"],
        ["--url", "http://user:hush-4@127.0.0.1:1", "--url", "http://user:hush-5@127.0.0.1:2/"],
    ],
)
def test_secrets_do_not_reach_what_the_arms_are_said_to_be(record: Path, arguments: list[str]) -> None:
    for more in ([], ["--json"]):
        dry = run_ab(record, *arguments, "--dry-run", *more, code=0)
        assert "hush" not in dry.stdout + dry.stderr
    assert "127.0.0.1" in dry.stdout or "HF_TOKEN=***, api-key=***, api-k=***" in dry.stdout


def test_the_password_in_an_address_is_used_and_not_told(mock: StartMock, record: Path) -> None:
    a, b = (url.replace("://", "://user:hush@") for url in (mock(), mock(fault="500", fault_after=10)))
    failed = run_ab(record, "--url", a, "--url", b, *FAST, code=70)
    assert [block.arm for block in read(record).blocks] == ["A", "B"]
    gone = run_ab(record.with_name("gone"), "--url", "http://user:hush@127.0.0.1:1", "--url", b, *FAST, code=70)
    files = record.read_text() + record.with_name("gone").read_text()
    assert "hush" not in failed.stderr + gone.stderr + files
    assert "http://127.0.0.1" in failed.stderr


def test_time_is_told_while_it_runs(mock: StartMock, record: Path) -> None:
    began = time.monotonic()
    done = run_ab(record, "--url", mock(), "--url", mock(), *FAST)
    assert done.stderr.count("round ") == 4
    assert time.monotonic() - began < 60
