"""A value as a sum of effects, the common ones first: how an unmeasured pair is guessed from its row and its column."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

# A mean of n values is drawn towards zero as if so many zeros were among them: few values say little.
_SHRINK = 0.5


def additive(known: Sequence[tuple[Sequence[Hashable], float]], wanted: Sequence[Hashable]) -> float:
    """Return the value expected at ``wanted``.

    :param known: (levels, value): what a value depends on, in an order in which each effect is the mean of what those
        before it leave unexplained.
    """
    total = sum(value for _, value in known) / len(known)
    rest = [value - total for _, value in known]
    for place, level in enumerate(wanted):
        groups: defaultdict[Hashable, list[float]] = defaultdict(list)
        for (levels, _), value in zip(known, rest, strict=True):
            groups[levels[place]].append(value)
        effects = {name: sum(values) / (len(values) + _SHRINK) for name, values in groups.items()}
        rest = [value - effects[levels[place]] for (levels, _), value in zip(known, rest, strict=True)]
        total += effects.get(level, 0.0)
    return total
