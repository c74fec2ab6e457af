"""Time of a plain decode step between and beyond measured points."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bw.errors import SpeculationInputError
from sglang_bw.plan.speculation import nearest
from sglang_bw.plan.speculation.curve import NEAREST, StepCurve
from sglang_bw.plan.speculation.nearest import Host

KIMI = {(0, 1): 0.0108, (0, 2): 0.0132, (0, 4): 0.0167, (0, 8): 0.0228, (0, 16): 0.0251}
GLM = {(0, 1): 0.0169, (0, 2): 0.0216, (0, 4): 0.0244, (0, 8): 0.0318, (0, 16): 0.0373, (0, 32): 0.1007}
POINTS = st.dictionaries(
    st.tuples(st.sampled_from([0, 16_000, 64_000]), st.sampled_from([1, 2, 4, 8, 32, 128])),
    st.floats(1e-4, 10.0),
    min_size=1,
)


@given(POINTS, st.sampled_from([0, 500, 16_000, 128_000]), st.integers(1, 4096))
def test_any_points_give_a_positive_finite_time(points: dict[tuple[int, int], float], context: int, rows: int) -> None:
    step = StepCurve(points, StepCurve(KIMI)).at(context, rows)
    assert math.isfinite(step.seconds)
    assert step.seconds > 0
    assert 0 <= step.attention <= step.seconds


@given(POINTS)
def test_measured_points_come_back(points: dict[tuple[int, int], float]) -> None:
    curve = StepCurve(points)
    for (context, rows), seconds in points.items():
        assert curve.at(context, rows).seconds == pytest.approx(seconds)


def test_between_points_straight_in_log_log() -> None:
    step = StepCurve(KIMI).at(0, 6)
    assert 0.0167 < step.seconds < 0.0228
    assert step.basis == "interpolated"


def test_beyond_the_points_time_grows_but_not_faster_than_rows() -> None:
    curve = StepCurve(KIMI)
    assert 0.0251 < curve.at(0, 32).seconds < 2 * 0.0251
    assert curve.at(0, 32).basis == "extrapolated"


def test_a_cliff_is_named_and_not_taken_for_a_slope() -> None:
    curve = StepCurve(GLM)
    assert curve.cliff(8, 32) == 32
    assert curve.cliff(1, 16) is None
    assert curve.at(0, 64).seconds < 1.4 * 0.1007


def test_attention_of_more_rows_is_scaled_from_the_same_context() -> None:
    points = {**KIMI, (64_000, 1): 0.0165, (64_000, 2): 0.0188, (64_000, 4): 0.0268}
    step = StepCurve(points).at(64_000, 16)
    assert step.attention > 0.0268 - 0.0167
    assert step.seconds == pytest.approx(0.0251 + step.attention)


def test_a_single_point_takes_its_shape_from_the_nearest_known_curve() -> None:
    curve = nearest.curve(Host("Kimi-K2.5 INT4", "sglang", "TP8"), {(0, 1): 0.01117})
    assert curve.like is not None
    step = curve.at(0, 4)
    assert step.basis == NEAREST
    assert 1.4 < step.seconds / 0.01117 < 1.7


def test_a_dense_model_is_flat_at_few_rows() -> None:
    curve = nearest.curve(Host("Qwen3-8B", "sglang", "TP1"), {(0, 1): 0.0066})
    assert curve.at(0, 4).seconds / 0.0066 < 1.05
    assert curve.at(0, 512).seconds / 0.0066 > 2


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_point_is_an_error(value: float) -> None:
    with pytest.raises(SpeculationInputError):
        StepCurve({(0, 1): value})


def test_no_point_is_an_error() -> None:
    with pytest.raises(SpeculationInputError):
        StepCurve({})


@pytest.mark.parametrize(
    ("model", "experts"),
    [
        ("moonshotai/Kimi-K2.6", (384, 8)),
        ("Qwen3-235B-A22B", (128, 8)),
        ("Some-New-100B-A10B", (128, 8)),
        ("meta-llama/Llama-3.3-70B-Instruct", None),
        ("DeepSeek-R1-Distill-Llama-8B", None),
    ],
)
def test_experts_by_name(model: str, experts: tuple[int, int] | None) -> None:
    assert nearest.experts(model) == experts


def test_more_rows_read_more_experts() -> None:
    """Kimi: 8 experts a token, 31 of 384 for four."""
    assert nearest.expert_growth("Kimi-K2.5", 1, 4) == pytest.approx(3.88, abs=0.01)
    assert nearest.expert_growth("Llama-3.1-8B", 1, 4) == 1.0
