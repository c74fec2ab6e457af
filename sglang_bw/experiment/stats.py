"""The ratio of two arms with its interval.

The data are paired log-ratios ``d[r, p]``: round r, prompt p. Two things vary from experiment to experiment: what the
machine does in a round, which all its prompts share, and how a prompt takes to the treatment, which all rounds share.
So rounds and prompts are resampled, both, and what is left over separately. Resampled as they stand, round means would
carry the leftover noise a second time, and prompt means a third; each is shrunk to what exceeds that noise (Davison
and Hinkley, Bootstrap Methods and their Application, 1997, section 3.8; the moments are those of a two-way analysis of
variance). The interval is BCa (Efron 1987). For few rounds a bootstrap is too narrow, as a normal interval is
(Hesterberg, The American Statistician 69, 2015): its ends are moved outwards in the proportion of Student's quantile to
the normal one, with Satterthwaite's degrees of freedom.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from sglang_bw.ledger.record import Verdict

DRAWS = 4000
LEVEL = 0.95
# From here on the interval holds its level for every mix of noise of the tests; with two rounds it held 91 %, with
# three 93 %. An even number, so that neither arm was first more often.
LEAST_ROUNDS = 4
_SEED = 20261129

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A ratio and the interval that holds it.

    :ivar value: geometric mean of the ratios.
    """

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval, as a share of the ratio."""
        return (self.high - self.low) / 2 / self.value

    @property
    def verdict(self) -> Verdict:
        """What the interval says of B against A."""
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "undecided"


@dataclass(frozen=True)
class _Parts:
    """Two-way analysis of variance of ``d``: effects, scaled so that resampling them has the right variance.

    :ivar df: Satterthwaite's degrees of freedom of the grand mean's variance.
    """

    mean: float
    rounds: Array
    prompts: Array
    rest: Array
    df: float


def ratio(logs: Array, *, level: float = LEVEL, draws: int = DRAWS, seed: int = _SEED) -> Interval:
    """Return the geometric mean of ratios with its BCa interval.

    :param logs: natural logarithms of B's speed over A's; shape (rounds, prompts), at least 2 rounds.
    :param draws: bootstrap samples.
    :raises ValueError: fewer than two rounds, or a value that is no finite number.
    """
    logs = np.atleast_2d(np.asarray(logs, dtype=float))
    if logs.shape[0] < 2 or logs.shape[1] < 1 or not np.isfinite(logs).all():
        raise ValueError("needs finite numbers of at least two rounds")
    parts = _analyse(logs)
    means = _resample(parts, np.random.default_rng(seed), draws)
    stretch = _stretch(level, parts.df)
    low, high = (parts.mean + end * stretch for end in bca(means, 0.0, _influence(parts), level))
    return Interval(math.exp(parts.mean), math.exp(low), math.exp(high))


def bca(draws: Array, estimate: float, influence: Array, level: float) -> tuple[float, float]:
    """Return the bias-corrected and accelerated interval.

    :param draws: bootstrap replicates of the estimate.
    :param influence: of every resampled unit on the estimate, centred; gives the acceleration.
    :param level: coverage, between 0 and 1.
    """
    if np.ptp(draws) < 1e-12:  # nothing varies
        return estimate, estimate
    # Draws that equal the estimate but for rounding count half: with few units there are many.
    apart = np.sign(np.where(np.isclose(draws, estimate, rtol=0, atol=1e-12), 0, draws - estimate))
    below = (1 - apart.mean()) / 2
    bias = special.ndtri(np.clip(below, 1 / len(draws), 1 - 1 / len(draws)))
    squares = float(np.sum(influence**2))
    acceleration = float(np.sum(influence**3)) / 6 / squares**1.5 if squares else 0.0
    z = bias + special.ndtri(np.array([(1 - level) / 2, (1 + level) / 2]))
    low, high = np.quantile(draws, special.ndtr(bias + z / (1 - acceleration * z)))
    return float(low), float(high)


def _analyse(logs: Array) -> _Parts:
    count, width = logs.shape
    mean = float(logs.mean())
    rounds, prompts = logs.mean(axis=1) - mean, logs.mean(axis=0) - mean
    rest = logs - mean - rounds[:, None] - prompts[None, :]
    free = (count - 1) * (width - 1)
    noise = float(np.sum(rest**2)) / free if free else 0.0
    # Mean squares of a single observation's size: their expectation is the effect's own variance times the number of
    # observations that share it, plus the noise.
    round_ms = width * float(np.sum(rounds**2)) / (count - 1)
    prompt_ms = count * float(np.sum(prompts**2)) / (width - 1) if width > 1 else 0.0
    return _Parts(
        mean=mean,
        rounds=rounds * _scale(round_ms, noise, count),
        prompts=prompts * _scale(prompt_ms, noise, width),
        rest=rest * math.sqrt(count * width / free) if free else rest,
        df=_freedom(round_ms, prompt_ms, noise, count, width),
    )


def _scale(mean_square: float, noise: float, count: int) -> float:
    """Return the factor for effects whose resampling shall have the effect's own variance, noise taken off."""
    if count < 2 or mean_square <= noise:
        return 0.0
    return math.sqrt((1 - noise / mean_square) * count / (count - 1))


def _freedom(round_ms: float, prompt_ms: float, noise: float, count: int, width: int) -> float:
    """Return Satterthwaite's degrees of freedom of ``round_ms + prompt_ms - noise``, without what noise explains."""
    shared = [(ms, size - 1) for ms, size in ((round_ms, count), (prompt_ms, width)) if ms > noise]
    terms = [*shared, ((1 - len(shared)) * noise, max((count - 1) * (width - 1), 1))]
    total = sum(part for part, _ in terms)
    return 1 / sum((part / total) ** 2 / df for part, df in terms) if total else math.inf


def _resample(parts: _Parts, dice: np.random.Generator, draws: int) -> Array:
    """Draw rounds, and then prompts, and average; the distance from the mean, one number a draw."""
    count, width = parts.rest.shape
    # How often each round and prompt was drawn, as shares: a mean over the drawn ones is a product with these.
    by_round = dice.multinomial(count, np.full(count, 1 / count), draws) / count
    by_prompt = dice.multinomial(width, np.full(width, 1 / width), draws) / width
    rest = np.einsum("dr,rp,dp->d", by_round, parts.rest, by_prompt, optimize=True)
    means: Array = by_round @ parts.rounds + by_prompt @ parts.prompts + rest
    return means


def _influence(parts: _Parts) -> Array:
    return np.concatenate([parts.rounds / len(parts.rounds), parts.prompts / len(parts.prompts)])


def _stretch(level: float, df: float) -> float:
    """Return Student's quantile over the normal one."""
    tail = (1 + level) / 2
    return 1.0 if math.isinf(df) else float(special.stdtrit(df, tail) / special.ndtri(tail))
