"""Quantiles of latencies."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Quantiles = tuple[float, float, float]
LEVELS = (0.5, 0.9, 0.99)


def quantiles(values: Sequence[float]) -> Quantiles:
    """Return the 0.5, 0.9 and 0.99 quantile, each a value that was seen; zeros for nothing."""
    ordered = sorted(values)
    if not ordered:
        return (0.0, 0.0, 0.0)
    low, middle, high = (ordered[min(len(ordered) - 1, int(len(ordered) * level))] for level in LEVELS)
    return (low, middle, high)


def middle(spreads: Sequence[Quantiles]) -> Quantiles:
    """Return the median over blocks of each quantile; zeros for nothing."""
    if not spreads:
        return (0.0, 0.0, 0.0)
    low, center, high = (statistics.median(column) for column in zip(*spreads, strict=True))
    return (low, center, high)
