"""Verdicts, on the cases that the project exists for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bw.errors import SpeculationInputError
from sglang_bw.plan.speculation import Host, Verdict, accept_curve, probe, round_cost, verdicts
from sglang_bw.plan.speculation.accept import AcceptCurve, golden
from sglang_bw.plan.speculation.allreduce import AllReduce
from sglang_bw.plan.speculation.verdict import Cell, best_steps, judge

CONTEXTS = (0, 16_000, 64_000)
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
# 61 layers, two all-reduces each, hidden 7168; about 200 us at the verify pass's 57,344 bytes.
FIRST_SYSTEM = AllReduce(122, 7168, ((57_344, 200e-6),))
KIMI = Host("moonshotai/Kimi-K2.5 INT4", "sglang", "TP8")


def _tau(steps: int, length: float) -> AcceptCurve:
    return golden("eagle3", "Kimi-K2.5").through(steps, length, sigma=0.05, source="assumed")


def _by_width(cells: tuple[Cell, ...]) -> dict[int, Cell]:
    return {cell.concurrency: cell for cell in cells}


class TestFirstSystem:
    @given(st.integers(1, 8), st.floats(0.0, 1.0))
    def test_never_pays_with_any_draft(self, steps: int, share: float) -> None:
        accept = _tau(steps, 1 + share * steps)
        cells = verdicts(accept, round_cost(KIMI, {(0, 1): 89.5}, FIRST_SYSTEM), CONTEXTS, CONCURRENCIES, steps)
        assert all(cell.verdict is not Verdict.PAYS for cell in cells)

    def test_loses_with_the_accept_length_of_served_traffic_and_says_why(self) -> None:
        accept = accept_curve("Kimi-K2.5", "lightseekorg/kimi-k2.5-eagle3")
        (cell,) = verdicts(accept, round_cost(KIMI, {(0, 1): 89.5}, FIRST_SYSTEM), [0], [1])
        assert cell.verdict is Verdict.LOSES
        assert cell.break_even is not None
        assert cell.break_even.mid > 2.9
        assert cell.best_steps == 0
        assert "make the all-reduce faster first" in cell.reason

    def test_a_healthy_all_reduce_turns_it(self) -> None:
        healthy = AllReduce(122, 7168, ((14_336, 27e-6), (65_536, 34e-6)))
        (cell,) = verdicts(_tau(3, 2.88), round_cost(KIMI, {(0, 1): 89.5}, healthy), [0], [1])
        assert cell.verdict is Verdict.PAYS

    def test_sizes_nobody_measured_leave_a_cell_open(self) -> None:
        (cell,) = verdicts(_tau(3, 2.88), round_cost(KIMI, {(0, 1): 89.5}, FIRST_SYSTEM), [0], [4])
        assert (cell.verdict, cell.speedup, cell.break_even) == (Verdict.UNDECIDED, None, None)
        assert "229,376 bytes" in cell.reason


def test_kimi_on_eight_boards_wins_alone_and_loses_with_company_at_64k() -> None:
    accept = accept_curve("Kimi-K2.6", "lightseekorg/kimi-k2.5-eagle3-mla")
    cells = _by_width(verdicts(accept, round_cost(Host("Kimi-K2.6 INT4", "sglang", "TP8")), [64_000], CONCURRENCIES))
    assert cells[1].verdict is Verdict.PAYS
    for width in (4, 8, 16, 32, 64):
        assert cells[width].speedup is not None
        assert cells[width].speedup.mid < 1
        assert cells[width].verdict is not Verdict.PAYS
    assert cells[16].verdict is cells[32].verdict is cells[64].verdict is Verdict.LOSES


def test_glm_falls_off_its_cliff_at_32_rows() -> None:
    host = Host("GLM-5.1 NVFP4", "vllm b12x sparse MLA", "TP8")
    cells = _by_width(verdicts(accept_curve("GLM-5.1"), round_cost(host), [0], CONCURRENCIES))
    assert [cells[width].verdict for width in (1, 2, 4)] == [Verdict.PAYS] * 3
    assert [cells[width].verdict for width in (8, 16)] == [Verdict.LOSES] * 2
    assert "cliff at 32 rows" in cells[8].basis
    assert cells[8].best_steps is not None
    assert cells[8].best_steps < 3, "a narrower verify pass stays before the cliff"


@pytest.mark.parametrize(("backend", "cliff"), [("flashinfer_cutlass", False), ("b12x", True)])
def test_the_curve_of_the_same_moe_backend_is_taken(backend: str, cliff: bool) -> None:
    """SGLang's GLM-5: a step of 16 rows costs twice one of 8 with b12x, not with cutlass."""
    cost = round_cost(Host("zai-org/GLM-5-FP8", f"SGLang moe={backend}", "TP8"))
    cells = _by_width(verdicts(accept_curve("GLM-5"), cost, [0], [4, 8]))
    assert ("cliff at 16 rows" in cells[4].basis) is cliff
    assert cells[8].verdict is (Verdict.LOSES if cliff else Verdict.PAYS)


def test_another_model_s_curve_does_not_decide_what_its_interval_leaves_open() -> None:
    cells = verdicts(
        accept_curve("New-100B-A10B", "x/eagle3"), round_cost(Host("New-100B-A10B", "sglang")), [0], [16, 64]
    )
    for cell in cells:
        assert cell.speedup is not None
        assert not (cell.verdict is not Verdict.UNDECIDED and cell.speedup.low < 1 < cell.speedup.high)


@given(st.floats(1.0, 4.0), st.sampled_from(CONTEXTS), st.sampled_from(CONCURRENCIES))
def test_one_step_more_than_the_best_no_longer_pays(length: float, context: int, width: int) -> None:
    accept, cost = _tau(3, length), round_cost(Host("Kimi-K2.6", "vllm", "TP8"))
    best, speedup = best_steps(accept, cost, context, width)

    def ratio(steps: int) -> float:
        return cost.ratio(context, width, steps).ratio or 0.0 if steps else 1.0

    assert speedup == pytest.approx(accept.length(best) / ratio(best))
    if best:
        gain, price = accept.marginal(best), ratio(best) - ratio(best - 1)
        assert gain > price * accept.length(best - 1) / ratio(best - 1)
    if best < 8:
        gain, price = accept.marginal(best + 1), ratio(best + 1) - ratio(best)
        assert gain <= price * accept.length(best) / ratio(best) + 1e-9


@pytest.mark.parametrize(
    ("speedup", "verdict"),
    [(1.061, Verdict.PAYS), (1.06, Verdict.UNDECIDED), (0.94, Verdict.UNDECIDED), (0.939, Verdict.LOSES)],
)
def test_within_six_percent_of_one_is_undecided(speedup: float, verdict: Verdict) -> None:
    assert judge(speedup) is verdict


def test_cells_are_json() -> None:
    cells = verdicts(_tau(3, 2.5), round_cost(KIMI, {(0, 1): 89.5}, FIRST_SYSTEM), [0], [1, 64])
    loaded = json.loads(json.dumps([cell.to_json() for cell in cells]))
    assert loaded[0]["break_even"]["mid"] == cells[0].break_even.mid if cells[0].break_even else False
    assert loaded[1]["verdict"] == "undecided"


def test_own_points_decide_without_any_table() -> None:
    """Two plain decode points, at c and at 4c: a step of four rows costs twice one of one."""
    cost = round_cost(Host("Kimi-K2.5", "sglang", "TP8"), {(0, 1): 100.0, (0, 4): 200.0})
    (cell,) = verdicts(_tau(3, 2.3), cost, [0], [1])
    assert cell.break_even is not None
    assert cell.break_even.mid == pytest.approx(2.0 + 3 * 0.07, abs=0.02)


@pytest.mark.parametrize("speed", [0.0, -5.0, float("nan"), float("inf")])
def test_impossible_speeds_are_an_error(speed: float) -> None:
    with pytest.raises(SpeculationInputError):
        round_cost(KIMI, {(0, 1): speed})


class TestProbe:
    def test_rounds_measured_here_are_taken_as_they_are(self, tmp_path: Path) -> None:
        path = tmp_path / "round.json"
        rounds = [{"batch": 1, "steps": steps, "seconds": 0.01 + 0.006 * steps} for steps in (1, 2, 3)]
        path.write_text(json.dumps({"probe": "round", "plain": [{"batch": 1, "seconds": 0.01}], "rounds": rounds}))
        one, four = verdicts(_tau(3, 2.0), probe.round_cost(path), [0], [1, 4])
        assert one.break_even is not None
        assert one.break_even.mid == pytest.approx(2.8)
        assert one.verdict is Verdict.LOSES
        assert four.verdict is Verdict.UNDECIDED
        assert "batch 4 (it has 1)" in four.reason

    def test_the_first_step_may_lose_where_three_pay(self, tmp_path: Path) -> None:
        """It carries what a round costs beside its drafts: on PCIe boards, most of it."""
        path = tmp_path / "round.json"
        rounds = [{"batch": 1, "steps": steps, "seconds": seconds} for steps, seconds in ((1, 0.0225), (3, 0.026))]
        path.write_text(json.dumps({"probe": "round", "plain": [{"batch": 1, "seconds": 0.0112}], "rounds": rounds}))
        accept, cost = _tau(3, 2.9), probe.round_cost(path)
        assert accept.length(1) < (cost.ratio(0, 1, 1).ratio or 0)
        (cell,) = verdicts(accept, cost, [0], [1])
        assert (cell.best_steps, cell.verdict) == (3, Verdict.PAYS)

    @pytest.mark.parametrize(("length", "best"), [(3.0, 3), (1.2, 0)])
    def test_the_best_of_the_steps_that_were_measured(self, tmp_path: Path, length: float, best: int) -> None:
        """`probe round` measures 0 steps and the recipe's own: what lies between is unknown, and no reason to stop."""
        path = tmp_path / "round.json"
        rounds = [{"batch": 1, "steps": steps, "seconds": seconds} for steps, seconds in ((0, 0.011), (3, 0.015))]
        path.write_text(json.dumps({"probe": "round", "plain": [{"batch": 1, "seconds": 0.01}], "rounds": rounds}))
        (cell,) = verdicts(_tau(3, length), probe.round_cost(path), [0], [1])
        assert cell.best_steps == best
        assert cell.verdict is (Verdict.PAYS if best else Verdict.LOSES)

    def test_all_reduce_latencies(self, tmp_path: Path) -> None:
        path = tmp_path / "allreduce.json"
        rows = [{"bytes": 14_336, "microseconds": 30.0}, {"bytes": 57_344, "microseconds": 200.0}]
        path.write_text(
            json.dumps({"latencies": [*rows, {"bytes": 57_344, "microseconds": 15, "backend": "pcie_ipc"}]})
        )
        reduce = probe.allreduce(path, calls=122, hidden=7168)
        assert reduce.seconds(4) == pytest.approx(122 * 200e-6)
        assert reduce.seconds(1) == pytest.approx(122 * 30e-6)
        assert 122 * 30e-6 < (reduce.seconds(2) or 0) < 122 * 200e-6
        assert reduce.seconds(5) is None
        with pytest.raises(SpeculationInputError, match=r"no latencies of symm\nit has nccl, pcie_ipc"):
            probe.allreduce(path, calls=122, hidden=7168, backend="symm")

    @pytest.mark.parametrize(
        "text", ["", "{}", '{"latencies": []}', '{"latencies": [{"bytes": 1, "microseconds": -2}]}', "[1]", "\x00"]
    )
    def test_a_damaged_file_is_one_clear_error(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "probe.json"
        path.write_text(text)
        with pytest.raises(SpeculationInputError, match="is not a result"):
            probe.allreduce(path, calls=122, hidden=7168)
        with pytest.raises(SpeculationInputError, match="is not a result"):
            probe.round_cost(path)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(SpeculationInputError, match="cannot be read"):
            probe.round_cost(tmp_path / "none.json")
