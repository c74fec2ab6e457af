"""The charts of a comparison, as Vega-Lite specifications; ``None`` where a run has nothing to draw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_bw.ledger.record import Block, Outcome, Ratio, RunRecord
from sglang_bw.ledger.report import policy
from sglang_bw.ledger.report.drawing import ARM_COLOURS

Spec = dict[str, Any]
_ROW = 34
FREE = "free"
_ARM_SCALE = {"domain": list(ARM_COLOURS), "range": list(ARM_COLOURS.values())}
_VERDICT_SCALE = {"domain": ["faster", "undecided", "slower"], "range": ["var(--good)", "var(--ink)", "var(--bad)"]}
_TIMES = (("ttft_s", "time to first token, s"), ("tpot_s", "time per output token, s"), ("e2e_s", "end to end, s"))


def ratios(outcome: Outcome) -> Spec | None:
    """Draw speed of B over A with its interval, one row a concurrency, and the line where nothing changes."""
    rows: list[Spec] = [
        {
            "concurrency": str(one.concurrency),
            "ratio": one.value,
            "low": one.low,
            "high": one.high,
            "verdict": one.verdict,
        }
        for one in outcome.ratios
    ]
    if not rows:
        return None
    y = {"field": "concurrency", "type": "ordinal", "title": "concurrency", "sort": None}
    colour = {"field": "verdict", "type": "nominal", "scale": _VERDICT_SCALE}
    ends = [min(1.0, *(row["low"] for row in rows)), max(1.0, *(row["high"] for row in rows))]
    x = {
        "type": "quantitative",
        "title": "speed of B over A, 95 % interval",
        "scale": {"domain": ends, "zero": False, "nice": True},
    }
    return {
        "height": _ROW * len(rows),
        "data": {"values": rows},
        "layer": [
            {"mark": {"type": "rule", "strokeDash": [4, 3], "aria": False}, "encoding": {"x": {"datum": 1, **x}}},
            {
                "mark": {"type": "rule", "strokeWidth": 3},
                "encoding": {"y": y, "x": {"field": "low", **x}, "x2": {"field": "high"}, "color": colour},
            },
            {
                "mark": {"type": "point", "size": 90},
                "encoding": {"y": y, "x": {"field": "ratio", **x}, "color": colour},
            },
        ],
    }


def throughput(outcome: Outcome) -> Spec | None:
    """Draw output tokens per second against concurrency, one line an arm."""
    rows = [
        {"concurrency": one.concurrency, "tok/s": arm.tok_s, "arm": name}
        for one in outcome.ratios
        for name, arm in (("A", one.a), ("B", one.b))
    ]
    if not rows:
        return None
    return {
        "height": 240,
        "data": {"values": rows},
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": _concurrency(outcome),
            "y": {"field": "tok/s", "type": "quantitative", "title": "output tok/s in all"},
            "color": _arm(),
            "strokeDash": {"field": "arm", "type": "nominal", "legend": None},
        },
    }


def accept_lengths(outcome: Outcome) -> Spec | None:
    """Draw how many tokens verify passes emitted, the bonus token included, as shares of an arm's passes."""
    rows = []
    for name in ("A", "B"):
        sums: dict[int, int] = {}
        for one in outcome.ratios:
            for accepted, passes in enumerate((one.a if name == "A" else one.b).histogram):
                sums[accepted + 1] = sums.get(accepted + 1, 0) + passes
        total = sum(sums.values())
        rows += [
            {"tokens": tokens, "share": n / total, "passes": n, "arm": name} for tokens, n in sums.items() if total
        ]
    if not rows:
        return None
    return {
        "height": 200,
        "data": {"values": rows},
        "mark": {"type": "bar"},
        "encoding": {
            "x": {"field": "tokens", "type": "ordinal", "title": "tokens of a verify pass", "axis": {"labelAngle": 0}},
            "xOffset": {"field": "arm"},
            "y": {"field": "share", "type": "quantitative", "title": "share of passes", "axis": {"format": "%"}},
            "color": _arm(),
            "description": {"field": "passes"},
        },
    }


def latencies(run: RunRecord) -> Iterator[tuple[str, Spec]]:
    """Draw one chart a kind of time: every request, one box an arm and concurrency; gives title and chart."""
    for field, title in _TIMES:
        rows = [
            {"concurrency": str(block.concurrency), "arm": block.arm, "s": value}
            for block in run.blocks
            for row in block.rows
            if (value := getattr(row, field)) is not None
        ]
        if rows:
            yield title, _boxes(rows, title)


def memory(run: RunRecord) -> Spec | None:
    """Draw what each arm's server says its memory holds; what is free stays out."""
    rows = [
        {"arm": arm.name, "what": what, "GB": size, "order": number}
        for arm in run.arms
        for number, (what, size) in enumerate(arm.memory.items())
        if what != FREE
    ]
    if not rows:
        return None
    return {
        "height": _ROW * len({row["arm"] for row in rows}),
        "data": {"values": rows},
        "mark": {"type": "bar"},
        "encoding": {
            "y": {"field": "arm", "type": "nominal", "title": None},
            "x": {"field": "GB", "type": "quantitative", "title": "GB"},
            "order": {"field": "order", "type": "quantitative"},
            "color": {
                "field": "what", "type": "nominal", "sort": None,
                "scale": {"range": [f"var(--c{n})" for n in range(1, 6)]},
            },
        },
    }  # fmt: skip


def round_cost(outcome: Outcome) -> Spec | None:
    """Draw the cost of a speculative round beside the accept length: it pays where the accept length is above."""
    known = [one for one in outcome.ratios if one.round_cost is not None]
    rows = [
        {"concurrency": one.concurrency, "value": one.round_cost, "what": "cost of a round (break-even)"}
        for one in known
    ]
    rows += [
        {"concurrency": one.concurrency, "value": length, "what": "accept length"}
        for one in known
        if (length := _speculative_length(one)) is not None
    ]
    if not rows:
        return None
    names = ["accept length", "cost of a round (break-even)"]
    return {
        "height": 220,
        "data": {"values": rows},
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": _concurrency(outcome),
            "y": {"field": "value", "type": "quantitative", "title": "tokens, or plain decode steps"},
            "color": {
                "field": "what", "type": "nominal", "scale": {"domain": names, "range": ["var(--b)", "var(--warn)"]},
            },
            "strokeDash": {"field": "what", "type": "nominal", "legend": None},
        },
    }  # fmt: skip


def timeline(run: RunRecord) -> Spec | None:
    """Draw the speed of every block in the order of the run, and where an adaptive policy changed its steps."""
    if not run.blocks:
        return None
    began = min(block.began for block in run.blocks)
    rows = [
        {
            "s": (block.began - began).total_seconds(),
            "tok/s": _speed(block),
            "arm": block.arm,
            "concurrency": f"concurrency {block.concurrency}",
        }
        for block in run.blocks
    ]
    x = {"type": "quantitative", "title": "seconds since the first block"}
    layers: list[Spec] = [
        {
            "mark": {"type": "point", "size": 50},
            "encoding": {
                "x": {"field": "s", **x},
                "y": {"field": "tok/s", "type": "quantitative", "title": "output tok/s"},
                "color": _arm(),
                "shape": {
                    "field": "concurrency",
                    "type": "nominal",
                    "sort": None,
                    "legend": {"symbolFillColor": "var(--ink)", "symbolStrokeColor": "var(--ink)"},
                },
            },
        }
    ]
    if switches := policy.switches(run):
        marks = [{"s": one.at_s, "steps": f"{one.arm}: {one.before} to {one.after} steps"} for one in switches]
        layers.append(
            {
                "data": {"values": marks},
                "mark": {"type": "rule", "color": "var(--warn)", "strokeDash": [2, 2]},
                "encoding": {"x": {"field": "s", **x}, "description": {"field": "steps"}},
            }
        )
    return {"height": 220, "data": {"values": rows}, "layer": layers}


def _speculative_length(ratio: Ratio) -> float | None:
    return ratio.b.accept_length if ratio.b.accept_length is not None else ratio.a.accept_length


def _speed(block: Block) -> float:
    return sum(row.output_tokens for row in block.rows) / block.seconds if block.seconds else 0.0


def _boxes(rows: list[Spec], title: str) -> Spec:
    levels = len({row["concurrency"] for row in rows})
    return {
        "height": 2 * _ROW * levels,
        "data": {"values": rows},
        "mark": {"type": "boxplot", "size": 14, "median": {"color": "var(--paper)"}, "rule": {"color": "var(--line)"}},
        "encoding": {
            "y": {"field": "concurrency", "type": "ordinal", "title": "concurrency", "sort": None},
            "yOffset": {"field": "arm"},
            "x": {"field": "s", "type": "quantitative", "title": title, "scale": {"zero": True}},
            "color": _arm(),
        },
    }


def _concurrency(outcome: Outcome) -> Spec:
    values = [one.concurrency for one in outcome.ratios]
    scale: Spec = {"type": "log", "base": 2} if min(values) > 0 and max(values) > min(values) else {}
    return {
        "field": "concurrency",
        "type": "quantitative" if scale else "ordinal",
        "title": "concurrency",
        "axis": {"values": values, "format": "d"} if scale else {"labelAngle": 0},
        **({"scale": scale} if scale else {}),
    }


def _arm() -> Spec:
    return {"field": "arm", "type": "nominal", "scale": _ARM_SCALE}
