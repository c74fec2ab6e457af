"""The accept length of a user's own traffic, from what the engine said about it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_bw.errors import SpeculationInputError
from sglang_bw.plan.speculation.accept import AcceptCurve, from_lengths, golden

# "accept len: 2.35" of the decode lines in the engine's log; it counts the bonus token.
_LOG_LINE = re.compile(r"accept len(?:gth)?:\s*(\d+(?:\.\d+)?)", re.IGNORECASE)
_GIVE = 'give "accept len" lines of the engine\'s log, or JSON lines with meta_info of a server that speculates'
# How far the mean of served traffic is trusted: it is this traffic, but another day.
_SIGMA = 0.04


@dataclass
class _Seen:
    """What was found so far: rounds by accepted draft tokens, and mean lengths with the rounds behind them."""

    histogram: dict[int, float] = field(default_factory=dict)
    lengths: list[tuple[float, float]] = field(default_factory=list)

    def response(self, body: dict[str, Any]) -> None:
        info = body.get("meta_info", body)
        if not isinstance(info, dict):
            return
        if isinstance(counts := info.get("spec_correct_drafts_histogram"), list):
            for accepted, rounds in enumerate(counts):
                if isinstance(rounds, int | float) and rounds > 0:
                    self.histogram[accepted] = self.histogram.get(accepted, 0.0) + rounds
        length, rounds = info.get("spec_accept_length"), info.get("spec_verify_ct", 1)
        if isinstance(length, int | float) and isinstance(rounds, int | float) and length >= 1 and rounds > 0:
            self.lengths.append((float(length), float(rounds)))


def accept_curve(path: Path, steps: int, *, kind: str = "eagle3", model: str = "") -> AcceptCurve:
    """Return the accept lengths of served traffic.

    ``path`` holds the engine's log, or one JSON object a line: responses of ``/generate`` with their ``meta_info``. A
    histogram (``spec_correct_drafts_histogram``) gives the whole curve; a mean length gives one point of it, and the
    shape is that of the golden curve of ``kind`` and ``model``.

    :param steps: draft steps of the server that wrote it.
    :raises SpeculationInputError: when it cannot be read or says nothing about accept lengths.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SpeculationInputError(f"{path} cannot be read: {error.strerror or error}", hint=_GIVE) from error
    seen = _read(text.splitlines())
    source = f"served traffic ({path.name})"
    if seen.histogram:
        return from_lengths(_lengths(seen.histogram), sigma=_SIGMA, source=source)
    if not seen.lengths:
        raise SpeculationInputError(
            f"{path} says nothing about accept lengths",
            hint=_GIVE,
        )
    mean = sum(length * rounds for length, rounds in seen.lengths) / sum(rounds for _, rounds in seen.lengths)
    return golden(kind, model).through(steps, mean, sigma=_SIGMA, source=source)


def _read(lines: Iterable[str]) -> _Seen:
    seen = _Seen()
    for line in lines:
        if line.lstrip().startswith("{"):
            try:
                body = json.loads(line)
            except ValueError:
                continue
            seen.response(body)
        elif (found := _LOG_LINE.search(line)) and float(found[1]) >= 1:
            seen.lengths.append((float(found[1]), 1.0))
    return seen


def _lengths(histogram: dict[int, float]) -> dict[int, float]:
    """Return accept length by steps from rounds by accepted draft tokens."""
    rounds = sum(histogram.values())
    deepest = max(histogram)
    length, lengths = 1.0, {}
    for step in range(1, max(deepest, 1) + 1):
        length += sum(count for accepted, count in histogram.items() if accepted >= step) / rounds
        lengths[step] = length
    return lengths
