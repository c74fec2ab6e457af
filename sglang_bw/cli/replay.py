"""``plan --replay``: a published table, predicted row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_bw.cli.console import out, print_json
from sglang_bw.plan.replay import Replay, replay

_HEADER = ("row", "predicted", "observed", "error", "tau", "break-even", "verdict", "")


def run(path: Path, *, as_json: bool, accept_length_given: bool = False) -> None:
    """Predict the rows of a file and print them with their summary."""
    result = replay(path, accept_length_given=accept_length_given)
    if as_json:
        print_json(result.to_json())
    else:
        _print(result)


def _print(result: Replay) -> None:
    rows = [_HEADER, *(_cells(row, tokens=not result.speculative) for row in result.to_json()["rows"])]
    columns = [number for number in range(len(_HEADER)) if any(row[number] for row in rows[1:])]
    widths = {number: max(len(row[number]) for row in rows) for number in columns}
    for row in rows:
        cells = [row[n].ljust(widths[n]) if n >= 6 else row[n].rjust(widths[n]) for n in columns]
        out.print("  ".join(cells).rstrip(), markup=False)
    out.print()
    for line in _summary(result.summary()):
        out.print(line, markup=False)


def _cells(row: dict[str, Any], *, tokens: bool) -> tuple[str, ...]:
    form = ",.0f" if tokens else ".3f"
    remark = "observation cannot be true, not compared" if row["left_out"] else row["reason"] or row["basis"]
    return (
        str(row["row"]),
        _number(row["predicted"], form),
        _number(row["observed"], form),
        _number(row["error"], "+.1%"),
        _number(row.get("accept_length"), ".2f"),
        _number(row.get("break_even"), ".2f"),
        row.get("verdict") or "",
        remark,
    )


def _summary(summary: dict[str, Any]) -> list[str]:
    left = f", {summary['left_out']} left out" if summary["left_out"] else ""
    lines = [f"{summary['form']}: {summary['rows']} rows, {summary['predicted']} predicted{left}"]
    if summary["compared"]:
        lines.append(f"error: median {summary['median']:.1%}, 90th percentile {summary['p90']:.1%}")
    if (known := summary.get("median_at_observed_accept_length")) is not None:
        lines.append(f"error of the cost alone, at the accept length observed: median {known:.1%}")
    if summary.get("always_pays") is not None:
        lines.append(
            f"wins found {summary['wins_found']} of {summary['wins']}, losses found {summary['losses_found']} of "
            f"{summary['losses']}, undecided {summary['undecided']}; "
            f'"it always pays" is right on {summary["always_pays"]:.1%} and finds no loss'
        )
    return lines


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
