"""Patched against stock at tensor parallelism 2: greedy tokens, and output tokens per second with an interval."""

from __future__ import annotations

import math
from typing import Any

from record.servers import Record
from record.speed import speed

from . import arms, greedy
from .bench import Bench

LENGTH = 3.0
BAR = 0.99
HALF_WIDTH = 0.02


def run(bench: Bench) -> None:
    """Start the three servers, compare tokens without simulation, then speeds with a simulated accept length."""
    options, record = bench.options, bench.record
    arms.start(bench, "stock", "patched", "off")
    record["flags"] = arms.flags(bench, "patched")
    record["servers"] = {name: server.told() for name, server in bench.servers.items()}
    bench.keep()
    record["tokens"] = _tokens(bench)
    bench.keep()
    arms.control(bench, ["stock", "patched"], LENGTH)
    record["batches"] = {}
    stock, patched = (bench.servers[name] for name in ("stock", "patched"))
    for batch in options.batches:
        found = speed(
            stock, patched, batch, pairs=options.pairs, tokens=options.tokens, vocabulary=arms.vocabulary(bench)
        )
        record["batches"][str(batch)] = found | {"experiment": judge(found["blocks"])}
        bench.keep()


def _tokens(bench: Bench) -> Record:
    """Compare the greedy tokens of both arms with those of no speculation, at the draft's real acceptance."""
    options = bench.options
    prompts = greedy.Prompts(options.prompts, options.answer, arms.vocabulary(bench))
    names = ["stock", "patched"]
    arms.control(bench, names, arms.REAL)
    known = greedy.reference(bench.servers["off"], prompts)
    found: Record = {}
    for name in ["off", *names]:
        for at_once in (1, options.prompts):
            answers = greedy.ask(bench.servers[name], prompts, at_once)
            found[f"{name}, {at_once} at once"] = greedy.compare(known, answers, prompts.vocabulary)
    return found


def judge(blocks: list[list[float]]) -> dict[str, Any]:
    """Return the ratio patched/stock over pairs of neighbouring blocks, by the tool's own statistics.

    :param blocks: output tokens per second of stock and of patched, a pair a row.
    """
    import numpy as np

    from sglang_bw.experiment import stats

    logs = np.array([[math.log(patched / stock)] for stock, patched in blocks])
    found = stats.ratio(logs)
    counts = found.half_width <= HALF_WIDTH  # and passes when its interval reaches the bar
    return {
        "ratio": round(found.value, 4),
        "low": round(found.low, 4),
        "high": round(found.high, 4),
        "half_width": round(found.half_width, 4),
        "verdict": "undecided" if not counts else "passes" if found.high >= BAR else "fails",
    }


def line(record: Record) -> str:
    """Return what was found in one line."""
    said = [f"{name}: {greedy.said(found)}" for name, found in record.get("tokens", {}).items()]
    for batch, found in record.get("batches", {}).items():
        own = found["experiment"]
        said.append(f"batch {batch}: patched/stock {own['ratio']} ({own['low']} to {own['high']}), {own['verdict']}")
    return "; ".join(said)
