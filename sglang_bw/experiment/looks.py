"""When to look at something beside a block: often at first, so that a short block is seen while it runs."""

from __future__ import annotations

from collections.abc import Iterator

FIRST_S = 0.02
EVERY_S = 0.5


def pauses() -> Iterator[float]:
    """Yield seconds to wait between two looks, each twice the one before, up to :data:`EVERY_S`."""
    pause = FIRST_S
    while True:
        yield pause
        pause = min(2 * pause, EVERY_S)
