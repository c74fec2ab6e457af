"""Accept length by draft steps."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bw.errors import SpeculationInputError
from sglang_bw.plan.speculation import served
from sglang_bw.plan.speculation.accept import AcceptCurve, draft_kind, expected, from_lengths, golden
from sglang_bw.plan.speculation.sources import accept_curve

SURVIVAL = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8).map(lambda values: sorted(values, reverse=True))


@given(SURVIVAL, st.integers(1, 20))
def test_length_grows_by_less_and_less_and_stays_within_steps_plus_one(survival: list[float], steps: int) -> None:
    curve = AcceptCurve(tuple(survival), 0.1, "x")
    assert 1 <= curve.length(steps) <= steps + 1
    assert curve.length(steps) <= curve.length(steps + 1)
    marginal = [curve.marginal(step) for step in range(1, steps + 2)]
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(marginal))


@given(st.integers(1, 8), st.floats(0.02, 0.98))
def test_a_curve_is_laid_through_a_measured_length(steps: int, share: float) -> None:
    length = 1 + share * steps
    curve = golden("eagle3", "Kimi-K2.5").through(steps, length, sigma=0.1, source="log")
    assert curve.length(steps) == pytest.approx(length, abs=1e-6)


@pytest.mark.parametrize("length", [0.5, 4.2, float("nan"), -1.0])
def test_an_impossible_length_is_an_error(length: float) -> None:
    with pytest.raises(SpeculationInputError, match="impossible"):
        golden("mtp").through(3, length, sigma=0.1, source="log")


def test_golden_curves_are_the_published_ones() -> None:
    """InferenceX: Kimi-K2.5 2.88 and 2.75 at three steps with and without thinking, GLM-5.2 2.99."""
    assert golden("eagle3", "moonshotai/Kimi-K2.5 INT4").length(3) == pytest.approx((2.88 + 2.75) / 2)
    assert golden("mtp", "GLM-5.1 NVFP4").length(3) == pytest.approx(2.99)
    assert 2.3 < golden("mtp", "Never-Heard-1B").length(3) < 3.4


def test_mixed_traffic_accepts_less_than_a_coding_benchmark() -> None:
    """8x RTX PRO 6000: 2.16 to 2.34 for Kimi's EAGLE-3, 2.6 for GLM's MTP."""
    assert 2.0 < expected("eagle3", "Kimi-K2.6").length(3) < 2.4
    assert 2.4 < expected("mtp", "GLM-5.1").length(3) < 2.7


def test_a_noisy_curve_does_not_fall() -> None:
    curve = from_lengths({1: 1.8, 2: 2.5, 3: 2.4, 4: 2.9}, sigma=0.1, source="x")
    assert curve.length(3) >= curve.length(2)
    assert curve.length(4) == pytest.approx(2.9)


def test_a_gap_in_the_steps_is_an_error() -> None:
    with pytest.raises(SpeculationInputError, match="without a gap"):
        from_lengths({1: 1.8, 3: 2.4}, sigma=0.1, source="x")


@pytest.mark.parametrize(
    ("text", "kind"),
    [("GLM-5.1 NVFP4 MTP", "mtp"), ("NEXTN 3/1/4", "mtp"), ("DFlash7", "mtp"), ("kimi-k2.6-eagle3-mla", "eagle3")],
)
def test_kind_of_draft(text: str, kind: str) -> None:
    assert draft_kind(text) == kind


def test_measured_evidence_is_believed_before_golden_curves() -> None:
    assert accept_curve("Kimi-K2.6", "x/eagle3", measured={3: 2.6}).length(3) == pytest.approx(2.6)
    assert accept_curve("GLM-5.1").length(3) > accept_curve("Kimi-K2.6", "x/eagle3").length(3)


class TestServed:
    def test_log_lines(self, tmp_path: Path) -> None:
        log = tmp_path / "engine.log"
        log.write_text(
            "[2026-11-29 10:00:00] Decode batch, #running-req: 1, accept len: 2.00, accept rate: 0.33\n"
            "[2026-11-29 10:00:01] Prefill batch\n"
            "[2026-11-29 10:00:02] Decode batch, #running-req: 1, accept len: 3.00, accept rate: 0.67\n"
        )
        assert served.accept_curve(log, 3).length(3) == pytest.approx(2.5)

    def test_responses_are_weighted_by_their_rounds(self, tmp_path: Path) -> None:
        log = tmp_path / "responses.jsonl"
        bodies = [{"spec_accept_length": 2.0, "spec_verify_ct": 30}, {"spec_accept_length": 3.0, "spec_verify_ct": 10}]
        log.write_text("\n".join(json.dumps({"text": "x", "meta_info": body}) for body in bodies))
        assert served.accept_curve(log, 3).length(3) == pytest.approx(2.25)

    def test_a_histogram_gives_the_whole_curve(self, tmp_path: Path) -> None:
        """Of 10 rounds 2 accepted nothing, 3 one, 1 two, 4 three draft tokens."""
        log = tmp_path / "responses.jsonl"
        log.write_text(json.dumps({"meta_info": {"spec_correct_drafts_histogram": [2, 3, 1, 4]}}))
        curve = served.accept_curve(log, 3)
        assert curve.survival == pytest.approx((0.8, 0.5, 0.4))
        assert curve.length(3) == pytest.approx(2.7)

    @pytest.mark.parametrize("text", ["", "hello\n", '{"meta_info": 3}\n{"broken', "accept len: 0.00"])
    def test_a_file_that_says_nothing(self, tmp_path: Path, text: str) -> None:
        log = tmp_path / "x.log"
        log.write_text(text)
        with pytest.raises(SpeculationInputError, match="says nothing"):
            served.accept_curve(log, 3)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(SpeculationInputError, match="cannot be read"):
            served.accept_curve(tmp_path / "none", 3)
