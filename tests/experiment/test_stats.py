"""The interval of a ratio: calibrated on synthetic experiments without an effect, and equal to scipy's on one level."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sglang_bw.experiment import stats
from sglang_bw.experiment.ab import LEAST_ROUNDS

NULLS = 1000


def noise(dice: np.random.Generator, shape: str, *size: int) -> stats.Array:
    """Unit variance, normal or with heavier tails."""
    return dice.standard_t(5, size) / math.sqrt(5 / 3) if shape == "heavy" else dice.standard_normal(size)


def null(
    dice: np.random.Generator, rounds: int, prompts: int, sigma: tuple[float, float, float], shape: str = "normal"
) -> stats.Array:
    """Log-ratios without an effect: noise of rounds, of prompts, and of single requests."""
    by_round, by_prompt, single = sigma
    return (
        by_round * noise(dice, shape, rounds, 1)
        + by_prompt * noise(dice, shape, 1, prompts)
        + single * noise(dice, shape, rounds, prompts)
    )


@pytest.mark.parametrize(
    ("sigma", "rounds", "shape"),
    [
        pytest.param((0.02, 0.0, 0.03), 8, "normal", id="rounds"),
        pytest.param((0.02, 0.05, 0.05), 8, "normal", id="prompts"),
        pytest.param((0.02, 0.02, 0.1), 8, "normal", id="requests"),
        pytest.param((0.02, 0.0, 0.05), 8, "heavy", id="heavy-tails"),
        pytest.param((0.02, 0.02, 0.05), 20, "normal", id="many-rounds"),
        pytest.param((0.02, 0.0, 0.03), stats.LEAST_ROUNDS, "normal", id="few-rounds"),
        pytest.param((0.02, 0.05, 0.05), stats.LEAST_ROUNDS, "normal", id="few-rounds-prompts"),
        pytest.param((0.02, 0.0, 0.05), stats.LEAST_ROUNDS, "heavy", id="few-rounds-heavy-tails"),
    ],
)
def test_1000_nulls_are_covered(sigma: tuple[float, float, float], rounds: int, shape: str) -> None:
    dice = np.random.default_rng(7)
    intervals = [stats.ratio(null(dice, rounds, 16, sigma, shape), draws=2000) for _ in range(NULLS)]
    covered = sum(found.low <= 1 <= found.high for found in intervals)
    assert 0.93 * NULLS <= covered <= 0.97 * NULLS


def test_nulls_are_covered_when_the_width_decides_when_to_stop() -> None:
    """Stopping at a narrow interval favours experiments that look calmer than they are; it must not cost much."""
    dice = np.random.default_rng(8)
    covered = 0
    for _ in range(NULLS):
        logs = null(dice, 24, 16, (0.03, 0.0, 0.05))
        for rounds in range(LEAST_ROUNDS, 25, 2):
            found = stats.ratio(logs[:rounds], draws=1000)
            if found.half_width <= 0.02:
                break
        covered += found.low <= 1 <= found.high
    assert 0.92 * NULLS <= covered <= 0.97 * NULLS


def test_one_level_is_scipys_bca() -> None:
    """With one number a round, and without the widening for few rounds, only the plain bootstrap is left."""
    data = np.random.default_rng(3).gamma(2, 0.1, 60)
    scipys = scipy.stats.bootstrap(
        (data,), np.mean, n_resamples=20000, rng=np.random.default_rng(1)
    ).confidence_interval
    dice = np.random.default_rng(2)
    draws = data[dice.integers(0, 60, (20000, 60))].mean(axis=1)
    found = stats.bca(draws, float(data.mean()), (data - data.mean()) / 60, 0.95)
    assert found == pytest.approx((scipys.low, scipys.high), abs=0.004 * data.mean())
    widened = stats.ratio(data[:, None], draws=20000)
    # Student's quantile at 59 degrees of freedom is 2 % over the normal one, and n / (n - 1) adds 1 %.
    reach = (math.log(widened.high) - math.log(widened.low)) / (scipys.high - scipys.low)
    assert reach == pytest.approx(1.03, abs=0.03)


def test_a_planted_effect_is_found() -> None:
    logs = null(np.random.default_rng(5), 8, 16, (0.02, 0.02, 0.05)) + math.log(0.9)
    found = stats.ratio(logs)
    assert found.verdict == "slower"
    assert found.low < 0.9 < found.high


def test_nothing_varies() -> None:
    found = stats.ratio(np.full((4, 3), math.log(2)))
    assert (found.low, found.value, found.high) == pytest.approx((2, 2, 2))
    assert found.half_width == pytest.approx(0)


@pytest.mark.parametrize("bad", [np.zeros((1, 5)), np.array([[0.0, math.nan], [0.0, 0.0]]), np.zeros((3, 0))])
def test_what_has_no_interval_is_refused(bad: stats.Array) -> None:
    with pytest.raises(ValueError, match="two rounds"):
        stats.ratio(bad)


@settings(max_examples=60, deadline=None)
@given(arrays(float, st.tuples(st.integers(2, 12), st.integers(1, 12)), elements=st.floats(-2, 2)))
def test_any_numbers_have_an_interval(logs: stats.Array) -> None:
    found = stats.ratio(logs, draws=300)
    assert 0 < found.low <= found.high < math.inf
    assert math.log(found.value) == pytest.approx(logs.mean())


def test_the_interval_moves_with_the_numbers_and_turns_with_the_arms() -> None:
    logs = null(np.random.default_rng(6), 6, 10, (0.02, 0.02, 0.05))
    found, moved, turned = stats.ratio(logs), stats.ratio(logs + 1), stats.ratio(-logs)
    assert (moved.low, moved.high) == pytest.approx((found.low * math.e, found.high * math.e))
    assert (turned.low, turned.high) == pytest.approx((1 / found.high, 1 / found.low), rel=0.01)
