"""The engine's policies on traces: the bars, and the simulator itself."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bw.errors import PolicyError
from sglang_bw.experiment.policy import engine, measured, traces
from sglang_bw.experiment.policy.arm import Fixed, Goodput, Late, Stock
from sglang_bw.experiment.policy.compare import LEAST_SHARE, MOST_REGRET, compare
from sglang_bw.experiment.policy.engine import Policies
from sglang_bw.experiment.policy.play import play
from sglang_bw.experiment.policy.trace import Trace, expected_length, rates_of
from sglang_bw.fork.series import newest_base
from sglang_bw.launch.probe.rounds import Point, Result
from tests.conftest import CHECKOUT, PATCHES, EngineTrees
from tests.probe.test_rounds import HOST

CELLS = CHECKOUT / "tests" / "plan" / "data" / "speculation_cells.csv"
ROWS, _ = measured.rows(CELLS)
_GLM = [row for row in ROWS if "GLM" in row.host[1]]
SYNTHETIC = traces.synthetic(measured.cliff(_GLM))


# Rows on which a policy is most easily wrong: the two choices are a few percent apart, or speculation loses badly.
def _near(speedup: float, count: int) -> list[measured.Row]:
    """Return the rows whose speedup is nearest."""
    return sorted(ROWS, key=lambda row: abs(row.length * row.plain / row.round - speedup))[:count]


_CHOSEN = {row.number: row for row in (*_near(0.0, 3), *_near(0.92, 8), *_near(0.95, 8), *_near(1.05, 4), *_near(9, 3))}
_HAS_POLICY = "goodput" in (PATCHES / newest_base(PATCHES) / "series").read_text(encoding="utf-8")
needs_policy = pytest.mark.skipif(not _HAS_POLICY, reason="the newest series has no goodput policy")


@pytest.fixture(scope="module")
def policies(engine_trees: EngineTrees) -> Policies:
    return engine.load(engine_trees.patched)


@needs_policy
@pytest.mark.engine
@pytest.mark.parametrize("trace", SYNTHETIC, ids=[trace.name for trace in SYNTHETIC])
def test_regret(policies: Policies, trace: Trace) -> None:
    found = compare(policies, trace, seeds=3)
    assert found.held <= MOST_REGRET, found.as_json()
    assert found.share >= LEAST_SHARE, found.as_json()


@needs_policy
@pytest.mark.engine
@pytest.mark.parametrize("row", list(_CHOSEN.values()), ids=lambda row: f"row {row.number}")
def test_never_far_below_the_best_fixed_choice(policies: Policies, row: measured.Row) -> None:
    found = compare(policies, row.trace(4000), seeds=2)
    assert found.share >= LEAST_SHARE, found.as_json()


@needs_policy
@pytest.mark.engine
def test_the_first_system_ends_at_off(policies: Policies) -> None:
    trace = traces.first_system()
    fixed = play(trace, Fixed(3))
    assert fixed.rate == pytest.approx(traces.FIRST_SPECULATING, rel=1e-3)
    for seed in range(5):
        ours = play(trace, Goodput(policies, trace, seed), seed)
        assert ours.decided == 0
        assert ours.settled <= 200
        assert ours.rate >= LEAST_SHARE * traces.FIRST_BASELINE


@needs_policy
@pytest.mark.engine
def test_one_switch_in_fifty_rounds_at_most(policies: Policies) -> None:
    for trace in (traces.first_system(), *(trace for trace in SYNTHETIC if trace.name.startswith("H200"))):
        ours = play(trace, Goodput(policies, trace, 0))
        rounds = [number for number, _ in ours.switches]
        assert all(later - earlier >= 50 for earlier, later in pairwise(rounds)), trace.name


@needs_policy
@pytest.mark.engine
def test_the_engines_modules_leave_no_trace(policies: Policies) -> None:
    assert policies.policy.__name__ == "sglang.srt.speculative.goodput_policy"
    script = (
        "import sys; from pathlib import Path; from sglang_bw.experiment.policy import engine; "
        "found = engine.load(Path(sys.argv[1])); print(found.policy.GoodputPolicy.__name__, "
        "[name for name in sys.modules if name.partition('.')[0] in ('sglang', 'torch')])"
    )
    tree = Path(str(policies.policy.__file__)).parents[3]
    done = subprocess.run([sys.executable, "-c", script, str(tree)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["GoodputPolicy", "[]"]


@needs_policy
@pytest.mark.engine
def test_a_result_of_probe_round_makes_a_start_up_table(policies: Policies) -> None:
    result = Result(HOST, "tiny", "0.5.23", "cuda")
    result.plain[4] = Point(4, 1.0, 0.010, 0.0, False)
    result.rounds[3, 4] = [Point(4, length, 0.025, 0.0, True) for length in (1.0, 4.0)]
    rows = json.loads(json.dumps(result.as_json()["table"]))
    table = policies.cost.CostTable({(steps, batch): seconds for steps, batch, seconds in rows})
    assert table.seconds(3, 4) == pytest.approx(0.025)
    assert table.seconds(0, 4) == pytest.approx(0.010)


@pytest.mark.engine
def test_an_engine_without_the_policy(engine_trees: EngineTrees) -> None:
    with pytest.raises(PolicyError, match="no goodput_policy"):
        engine.load(engine_trees.stock)


def test_no_engine(tmp_path: Path) -> None:
    with pytest.raises(PolicyError):
        engine.load(tmp_path)


class _Recorder(Fixed):
    """Notes what a policy is told."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.launches = 0
        self.seen: list[tuple[int, list[int], float | None]] = []

    def launch(self, batch: int, done: float) -> int:
        self.launches += 1
        return super().launch(batch, done)

    def observe(self, _steps: int, _batch: int, accepted: list[int], gap: float | None) -> None:
        self.seen.append((self.launches, accepted, gap))


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_results_come_late_and_gaps_are_rounds(lag: int) -> None:
    trace = Trace("t", lambda _k, _b: 0.01, lambda _d: (0.5,), tokens=200, noise=0.0, stalls=0.0, lag=lag)
    arm = _Recorder(3)
    play(trace, arm)
    assert [launches for launches, _, _ in arm.seen[:5]] == [number + lag + 1 for number in range(5)]
    assert arm.seen[0][2] is None
    assert [gap for _, _, gap in arm.seen[lag + 2 : 20]] == pytest.approx([0.01] * (18 - lag))


def test_the_oracle_is_never_beaten_and_a_fixed_choice_can_be_it() -> None:
    for trace in SYNTHETIC:
        for steps in trace.candidates:
            assert play(trace, Fixed(steps)).regret >= -1e-9
    trace = traces.first_system()
    assert play(trace, Fixed(0)).regret == pytest.approx(0)
    assert play(trace, Fixed(3)).regret == pytest.approx(traces.FIRST_BASELINE / traces.FIRST_SPECULATING - 1, rel=1e-3)


def test_a_late_oracle_pays_for_the_rounds_it_did_not_know() -> None:
    trace = next(trace for trace in SYNTHETIC if trace.known_after)
    regrets = [
        play(trace, Late(replace(trace, known_after=rounds))).regret
        for rounds in (0, trace.known_after, 4 * trace.known_after)
    ]
    assert regrets[0] == pytest.approx(0)
    assert 0.01 < regrets[1] < regrets[2]


def test_common_acceptance_is_equal_for_all_requests() -> None:
    trace = Trace("t", lambda _k, _b: 0.01, lambda _d: (0.5,), lambda _d: 8, tokens=100, common=True)
    arm = _Recorder(3)
    play(trace, arm)
    assert all(len(set(accepted)) == 1 and len(accepted) == 8 for _, accepted, _ in arm.seen)
    assert len({accepted[0] for _, accepted, _ in arm.seen}) > 1


@given(steps=st.integers(1, 8), share=st.floats(0, 1))
def test_rates_give_the_length_that_was_asked_for(steps: int, share: float) -> None:
    length = 1 + share * steps
    assert expected_length(rates_of(length, steps), steps) == pytest.approx(length, abs=1e-6)


@pytest.mark.parametrize("length", [0.5, 4.1, float("nan"), float("inf")])
def test_an_impossible_length(length: float) -> None:
    with pytest.raises(ValueError, match="impossible"):
        rates_of(length, 3)


def test_draws_follow_the_rates() -> None:
    trace = Trace("t", lambda _k, _b: 0.01, lambda _d: (0.8, 0.5), tokens=8000)
    arm = _Recorder(2)
    play(trace, arm, seed=random.Random(1).randrange(9))
    mean = sum(accepted[0] for _, accepted, _ in arm.seen) / len(arm.seen)
    assert mean == pytest.approx(0.8 + 0.4, abs=0.06)


def test_rows_of_a_table() -> None:
    assert len(ROWS) == 391
    row = next(row for row in ROWS if not row.assumed)
    trace = row.trace(100)
    assert play(trace, Fixed(0)).rate * row.batch == pytest.approx(92.4, rel=1e-6)
    assert play(trace, Fixed(3)).rate * row.batch == pytest.approx(122.0, rel=1e-2)
    costs = measured.cliff(_GLM)
    assert costs[3, 8] > 2.5 * costs[3, 4]


def test_rows_that_cannot_be_replayed(tmp_path: Path) -> None:
    with CELLS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))[:3]
    rows[0]["tps_spec"] = rows[0]["speedup"] = ""
    rows[1]["accept_len(=1+k*rate)"] = "9"
    broken = tmp_path / "cells.csv"
    with broken.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    found, left = measured.rows(broken)
    assert [row.number for row in found] == [3]
    assert left.keys() == {1, 2}
    assert "impossible" in left[2]
    # Too few batches of one host for a cost cliff: a table of a few rows is replayed without that trace.
    assert not measured.cliff(found)
    assert len(traces.synthetic({})) == len(SYNTHETIC) - 1


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_a_cliff_is_of_one_host_and_one_step_count(steps: int) -> None:
    host, other = ("source", "model", "engine", "TP8 0"), ("source", "model", "engine", "TP4 0")
    rows = [
        measured.Row(number, where, 4**number, drafts, 0.01, 0.01 * cost**number, 1.5, assumed=False)
        for where, drafts, cost in ((host, steps, 1.5), (host, steps + 1, 1.2), (other, steps, 1.1))
        for number in range(4)
    ]
    rows += [measured.Row(9, host, 1, drafts, 0.01, 9.0, 1.5, assumed=False) for drafts in range(20, 24)]
    costs = measured.cliff(rows)
    assert costs == {
        (k, 4**number): pytest.approx(0.01 * (1.5**number if k else 1)) for k in (0, steps) for number in range(4)
    }
    trace = next(trace for trace in traces.synthetic(costs) if "cliff" in trace.name)
    assert trace.candidates == (0, steps)
    assert 1 < trace.length(steps, 0) < 2.7
    assert play(trace, Fixed(steps)).rate > 0


def test_the_script_says_what_is_wrong(tmp_path: Path) -> None:
    script = CHECKOUT / "scripts" / "replay_policy.py"
    empty = tmp_path / "empty.csv"
    empty.write_text("a,b\n1,2\n")
    for arguments, code in (([str(tmp_path / "none.csv")], 57), ([str(empty)], 57), ([str(CELLS), "--tree", "."], 69)):
        done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert done.stderr.startswith("error: ")


@needs_policy
@pytest.mark.engine
def test_stock_falls_where_ours_does_not(policies: Policies) -> None:
    """The bars mean something: upstream's policy misses them, on the case that this project began with."""
    trace = traces.first_system()
    assert play(trace, Stock(policies, trace)).rate < 0.7 * traces.FIRST_BASELINE
