"""How `ledger` shows entries to people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.markup import escape
from rich.table import Table

from sglang_bw.cli.console import out
from sglang_bw.ledger.entry import Entry

_STYLES = {"failed": "red", "refused": "red", "invalid": "red", "slower": "yellow", "faster": "green", "ok": "green"}


def table(entries: Sequence[Entry]) -> Table:
    """Return entries as a table."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("id", "kind", "recipe", "result", "because of", "in short"):
        found.add_column(name, overflow="fold", no_wrap=name == "id")  # an id is for copying
    for entry in entries:
        short = (
            entry.evidence[0] if entry.origin == "reported" and entry.evidence else entry.summary or entry.hypothesis
        )
        style = _STYLES.get(entry.result, "")
        result = f"[{style}]{entry.result}[/]" if style else entry.result
        cells = (entry.id, entry.kind, entry.recipe or "")
        found.add_row(*map(escape, cells), result, escape(entry.failure or ""), escape(short[:160]))
    return found


def show(entry: Entry) -> None:
    """Print one entry."""
    rows: Iterable[tuple[str, str]] = (
        ("when", f"{entry.at:%Y-%m-%d %H:%M:%S} UTC"),
        ("recipe", entry.recipe or ""),
        ("hypothesis", entry.hypothesis),
        ("result", f"{entry.result}{f' ({entry.failure})' if entry.failure else ''}"),
        ("summary", entry.summary),
        ("fix", entry.fix),
        ("reported by" if entry.origin == "reported" else "source", entry.source),
        ("engine", entry.engine.version if entry.engine else ""),
        ("host", f"{entry.host.fingerprint}: {entry.host.cpu}, {', '.join(entry.host.gpus)}" if entry.host else ""),
        ("launch", entry.launch or ""),
        ("study", entry.study or ""),
        ("flags", " ".join(entry.argv)),
        *((f"changed {key}", f"{before} -> {after}") for key, (before, after) in entry.changes.items()),
        *((name, str(number)) for name, number in entry.numbers.items()),
        *(("file", artefact) for artefact in entry.artefacts),
        *((f"note of {one.at:%Y-%m-%d}", one.text) for one in entry.notes),
    )
    out.print(f"{entry.id}  {entry.kind}", style="bold", markup=False)
    for name, text in rows:
        if text:
            out.print(f"  {name}: {text}", markup=False)
    for line in entry.evidence:
        out.print(f"  | {line}", markup=False)


def group(title: str, entries: Sequence[Entry], *, none: str = "") -> None:
    """Print failures under a title, equal ones once."""
    out.print(title, style="bold", markup=False)
    if not entries:
        out.print(f"  {none}", markup=False)
    seen: dict[tuple[str, ...], int] = {}
    for entry in entries:
        says = entry.evidence[0] if entry.evidence else entry.summary
        key = (
            str(entry.failure or entry.result),
            says,
            entry.summary,
            entry.fix,
            entry.source or f"{entry.at:%Y-%m-%d}",
        )
        seen[key] = seen.get(key, 0) + 1
    for (failure, says, summary, fix, source), times in seen.items():
        count = f" ({times} times)" if times > 1 else ""
        out.print(f"  {failure}: {says}{count}", markup=False)
        for text in (f"why: {summary}" if summary != says else "", f"fix: {fix}" if fix else "", source):
            if text:
                out.print(f"      {text}", markup=False)
