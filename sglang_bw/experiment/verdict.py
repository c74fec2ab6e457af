"""From blocks to numbers: ratios with their guards, what each arm did, and where the outputs part."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special

from sglang_bw.experiment import stats
from sglang_bw.experiment.blocks import gpu_use, mean
from sglang_bw.experiment.quantiles import Quantiles, middle, quantiles
from sglang_bw.ledger.record import ArmNumbers, Block, Difference, OutputComparison, Ratio, RequestRow

SMALL_BATCH = 4
LEAST_DRIFT = math.log(1.01)
_SHOWN = 12
_LINE = 3

Measure = Callable[[RequestRow], float | None]


@dataclass(frozen=True)
class Limits:
    """What a request must keep to count as good. Seconds; ``None`` is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def met(self, row: RequestRow) -> bool:
        """Tell whether a request was answered and kept every limit; a single token has no TPOT to keep."""
        tpot = 0.0 if row.output_tokens == 1 else row.tpot_s
        pairs = ((self.ttft_s, row.ttft_s), (self.tpot_s, tpot), (self.e2e_s, row.e2e_s))
        kept = (limit is None or (value is not None and value <= limit) for limit, value in pairs)
        return row.output_tokens > 0 and all(kept)

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.ttft_s, self.tpot_s, self.e2e_s))


def speed(row: RequestRow) -> float | None:
    """Return output tokens per second of one request, prefill included; ``None`` for an empty answer."""
    return row.output_tokens / row.e2e_s if row.output_tokens and row.e2e_s else None


def decode_speed(row: RequestRow) -> float | None:
    """Return output tokens per second after the first token."""
    return 1 / row.tpot_s if row.tpot_s else None


def log_ratios(blocks: Iterable[Block], concurrency: int, measure: Measure = speed) -> stats.Array:
    """Return ln(B / A), shape (rounds, prompts): complete rounds, and prompts that have a value in each of them."""
    a, b = (_matrix(blocks, name, concurrency, measure) for name in ("A", "B"))
    rounds = min(len(a), len(b))
    if not rounds:
        return np.empty((0, 0))
    logs = np.log(b[:rounds]) - np.log(a[:rounds])
    return logs[:, np.isfinite(logs).all(axis=0)]


def interval(blocks: Iterable[Block], concurrency: int) -> stats.Interval | None:
    """Return the ratio of one concurrency so far; ``None`` before there are two rounds with answers."""
    logs = log_ratios(blocks, concurrency)
    return stats.ratio(logs) if logs.shape[0] > 1 and logs.shape[1] else None


def ratio(blocks: Sequence[Block], concurrency: int, limits: Limits, speculates: tuple[bool, bool]) -> Ratio | None:
    """Return everything about one concurrency.

    :param speculates: of A and of B.
    :return: ``None`` when there are no two rounds.
    """
    found = interval(blocks, concurrency)
    if found is None:
        return None
    shape = log_ratios(blocks, concurrency).shape
    a, b = (numbers([x for x in blocks if x.arm == name and x.concurrency == concurrency], limits) for name in "AB")
    drift, drifted = _drift(blocks, concurrency, found)
    return Ratio(
        concurrency=concurrency,
        value=found.value,
        low=found.low,
        high=found.high,
        half_width=found.half_width,
        rounds=shape[0],
        prompts=shape[1],
        verdict=found.verdict if shape[0] >= stats.LEAST_ROUNDS else "undecided",
        drift=drift,
        drifted=drifted,
        round_cost=_round_cost(blocks, concurrency, a, b, speculates),
        a=a,
        b=b,
    )


def is_broken(ratio: Ratio) -> bool:
    """Tell whether a speculative round seems cheaper than a decode step at a small batch: then the baseline is slow.

    By more than the half-width: of a draft that is never right, R is 1 give or take the noise.
    """
    cost = ratio.round_cost
    return cost is not None and cost * (1 + ratio.half_width) < 1 and ratio.concurrency <= SMALL_BATCH


def numbers(blocks: Sequence[Block], limits: Limits) -> ArmNumbers:
    """Return what one arm did in these blocks."""
    rows = [row for block in blocks for row in block.rows]
    seconds = sum(block.seconds for block in blocks)
    rounds, accepted = sum(row.rounds for row in rows), sum(row.accepted for row in rows)
    speeds = [value for row in rows if (value := speed(row)) is not None]
    return ArmNumbers(
        tok_s=sum(row.output_tokens for row in rows) / seconds,
        tok_s_user=statistics.median(speeds) if speeds else 0.0,
        ttft_s=_spread(row.ttft_s for row in rows),
        tpot_s=_spread(row.tpot_s for row in rows),
        itl_s=middle([block.spread_s for block in blocks if block.spread_s]),
        e2e_s=_spread(row.e2e_s for row in rows),
        goodput=sum(map(limits.met, rows)) / seconds if limits else None,
        accept_length=1 + accepted / rounds if rounds else None,
        histogram=_histogram(rows),
        kv_use=max((block.kv_use for block in blocks if block.kv_use is not None), default=None),
        graph_share=mean([block.graph_share for block in blocks if block.graph_share is not None]),
        gpu=gpu_use([block.gpu for block in blocks if block.gpu]),
    )


def compare_outputs(blocks: Sequence[Block]) -> OutputComparison:
    """Compare both arms' answers of each round, and A's with A's own first ones."""
    answers = {(x.arm, x.concurrency, x.round, row.prompt): row for x in blocks for row in x.rows}
    pairs: dict[tuple[int, str], bool] = {}
    unsteady: set[tuple[int, str]] = set()
    first: Difference | None = None
    for (arm, concurrency, number, prompt), row in answers.items():
        key, other = (concurrency, prompt), answers.get(("B", concurrency, number, prompt))
        if arm != "A" or other is None:
            continue
        found = _difference(row, other, concurrency)
        first = first or found
        pairs[key] = pairs.get(key, False) or found is not None
        if _difference(answers.get(("A", concurrency, 0, prompt), row), row, concurrency):
            unsteady.add(key)
    return OutputComparison(compared=len(pairs), different=sum(pairs.values()), unsteady=len(unsteady), first=first)


def _difference(a: RequestRow, b: RequestRow, concurrency: int) -> Difference | None:
    by_token = a.output_ids is not None and b.output_ids is not None
    left: Sequence[object] = a.output_ids or () if by_token else a.text or ""
    right: Sequence[object] = b.output_ids or () if by_token else b.text or ""
    if left == right:
        return None
    position = next(
        (n for n, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right))
    )
    unit: Literal["token", "character"] = "token" if by_token else "character"
    before, one, two = left[max(0, position - _SHOWN) : position], left[position:], right[position:]
    return Difference(
        prompt=a.prompt,
        concurrency=concurrency,
        position=position,
        unit=unit,
        before=_shown(before),
        a=_shown(one[:_SHOWN]),
        b=_shown(two[:_SHOWN]),
    )


def _shown(part: Sequence[object]) -> str:
    return part if isinstance(part, str) else " ".join(map(str, part))


def _matrix(blocks: Iterable[Block], arm: str, concurrency: int, measure: Measure) -> stats.Array:
    mine = sorted((x for x in blocks if x.arm == arm and x.concurrency == concurrency), key=lambda block: block.round)
    rows = [[measure(row) or math.nan for row in block.rows] for block in mine]
    return np.array(rows) if rows else np.empty((0, 0))


def _drift(blocks: Sequence[Block], concurrency: int, found: stats.Interval) -> tuple[float, bool]:
    """Return the trend of the baseline from its first to its last block, and whether it spoils the run.

    A straight line through the blocks' mean logarithms; it counts when its own 95 % interval leaves zero out, and it
    is larger than the half-width of the ratio's.
    """
    speeds = np.log(_matrix(blocks, "A", concurrency, speed))
    means = speeds[:, np.isfinite(speeds).all(axis=0)].mean(axis=1)
    steps = np.arange(len(means)) - (len(means) - 1) / 2
    slope = float(steps @ means / (steps @ steps))
    moved = slope * (len(means) - 1)
    if len(means) < _LINE:
        return math.exp(moved), False
    rest = means - means.mean() - slope * steps
    error = math.sqrt(float(rest @ rest) / (len(means) - 2) / float(steps @ steps)) * (len(means) - 1)
    is_chance = abs(moved) <= error * float(special.stdtrit(len(means) - 2, 0.975))
    return math.exp(moved), not is_chance and abs(moved) > max(found.half_width, LEAST_DRIFT)


def _round_cost(
    blocks: Sequence[Block], concurrency: int, a: ArmNumbers, b: ArmNumbers, speculates: tuple[bool, bool]
) -> float | None:
    """R: what a speculative round costs in decode steps, tau / S, from the time after the first token."""
    length = b.accept_length if speculates[1] else a.accept_length
    logs = log_ratios(blocks, concurrency, decode_speed)
    if speculates[0] == speculates[1] or length is None or not logs.size:
        return None
    gain = math.exp(float(logs.mean()))
    return length / (gain if speculates[1] else 1 / gain)


def _spread(values: Iterable[float | None]) -> Quantiles:
    return quantiles([value for value in values if value is not None])


def _histogram(rows: Sequence[RequestRow]) -> tuple[int, ...]:
    width = max((len(row.histogram) for row in rows), default=0)
    return tuple(sum(row.histogram[n] for row in rows if len(row.histogram) > n) for n in range(width))
