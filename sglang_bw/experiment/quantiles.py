"""Quantiles of latencies."""

from __future__ import annotations

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
