"""A plan on a terminal: the verdict first, then memory, rules, what the engine changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table
from rich.text import Text

from sglang_bw.cli.console import out
from sglang_bw.host.gpus import GIB

if TYPE_CHECKING:
    from sglang_bw.plan.memory import Alternative, MemoryLedger
    from sglang_bw.plan.pays import Pays
    from sglang_bw.plan.plan import Plan
    from sglang_bw.plan.speculation import Cell

_STYLES = {
    "fits": "green", "tight": "yellow", "does not fit": "red", "refused": "red",
    "pays": "green", "loses": "red", "undecided": "yellow",
    "error": "red", "warning": "yellow", "note": "dim",
}  # fmt: skip
_MOST_OF_A_VALUE = 48


def show(plan: Plan) -> None:
    """Print a plan."""
    _head(plan)
    _findings(plan)
    _memory(plan.ledger)
    _demands(plan)
    _alternatives(plan.alternatives)
    _pays(plan)
    _changes(plan)
    for note in plan.notes:
        out.print(Text(f"note: {note}", style="dim"), soft_wrap=True)


def _head(plan: Plan) -> None:
    question, board = plan.question, plan.question.board
    fabric = f", {question.machine.fabric}" if question.machine.fabric else ""
    out.print(
        Text.assemble(
            (f"{question.recipe.id}: ", "bold"),
            (plan.verdict, _STYLES[plan.verdict]),
            f"  on {question.machine.count}x {board.name} ({board.arch}, {board.memory_mib:,} MiB{fabric}), "
            f"sglang {question.engine.version}",
        )
    )
    ran = "the engine's own resolution" if plan.resolution.source == "engine" else "restated formulas, not run"
    cached = ", cached" if plan.resolution.cached else ""
    weights = "weight headers" if plan.ledger.measured else "weights estimated from config.json"
    out.print(Text(f"from rules, {ran}{cached}, {weights}; {plan.seconds:.1f} s", style="dim"))


def _findings(plan: Plan) -> None:
    if refusal := plan.resolution.refusal:
        _entry("error", f"sglang {plan.resolution.engine}", refusal.message, f"the step {refusal.rule} says so", "")
    for translation in plan.translations:
        instead = " ".join(token for flag in translation.flags for token in flag.tokens())
        severity = "error" if translation.breaks else "warning"
        _entry(severity, f"--{translation.flag.name}", translation.reason, instead, "")
    for misfit in plan.misfits:
        _entry("warning", "the recipe's machine", misfit, "", "")
    for warning in plan.question.warnings:
        _entry("warning", "the start", warning, "", "")
    for finding in plan.findings:
        _entry(finding.severity, finding.rule, finding.reason, finding.fix, finding.reference)


def _entry(severity: str, name: str, reason: str, fix: str, reference: str) -> None:
    out.print(Text.assemble((f"{severity:8}", _STYLES[severity]), f"{name}: {reason}"))
    for line in (f"fix: {fix}" if fix else "", reference):
        if line:
            out.print(Text(f"        {line}", style="dim"))


def _memory(ledger: MemoryLedger) -> None:
    table = _table("memory of the fullest GPU", "", ("GiB", "right"), "")
    groups = {"load": "", "pool": "  ", "slack": "  "}
    for line in ledger.lines:
        style = "dim" if line.group == "slack" else ""
        mark = "~" if line.estimated else ""
        table.add_row(f"{groups[line.group]}{line.name}", f"{mark}{line.bytes / GIB:.2f}", line.note, style=style)
    table.add_row("left of the slack", f"{ledger.left / GIB:.2f}", "", end_section=True)
    out.print(table)
    settings = ledger.settings
    least = f"{ledger.least_fraction:.3f}" if ledger.least_fraction is not None else "none"
    chosen = " (the engine's default)" if settings.fraction_is_default else ""
    out.print(
        Text(
            f"--mem-fraction-static {settings.mem_fraction_static:.4g}{chosen}, smallest that works {least}; "
            f"KV pool {ledger.kv_tokens:,} tokens: {ledger.requests} requests of {ledger.context:,} tokens "
            f"(at most {ledger.max_requests} run at once)"
        )
    )
    for reason in ledger.reasons:
        out.print(Text(reason, style=_STYLES[ledger.verdict]))


def _demands(plan: Plan) -> None:
    table = _table("requests at the same time", "", ("context", "right"), ("asked", "right"), ("in the pool", "right"))
    for demand in plan.demands:
        style = "yellow" if demand.resident < demand.concurrency else ""
        row = (demand.name, f"{demand.context:,}", str(demand.concurrency), str(demand.resident))
        table.add_row(*row, style=style)
    if table.row_count:
        out.print(table)


def _alternatives(alternatives: Iterable[Alternative]) -> None:
    table = _table("instead", "", ("fraction", "right"), ("KV tokens", "right"), ("requests", "right"), "")
    for other in alternatives:
        name = Text.assemble(other.title, (f"  {other.flags}", "dim"))
        if (made := other.ledger) is None:
            table.add_row(name, "", "", "", other.problem.splitlines()[-1].strip())
            continue
        verdict = Text(made.verdict, style=_STYLES[made.verdict])
        if other.warned:
            verdict.append(f", but see {', '.join(other.warned)}", style=_STYLES["warning"])
        fraction = f"{made.settings.mem_fraction_static:.3f}"
        table.add_row(name, fraction, f"{made.kv_tokens:,}", str(made.requests), verdict)
    if table.row_count:
        out.print(table)


def _pays(plan: Plan) -> None:
    if (pays := plan.pays) is None:
        return
    widths = list(dict.fromkeys(cell.concurrency for cell in pays.cells))
    title = f"does speculation pay ({pays.steps} draft steps): speedup; accept length it needs, best number of steps"
    table = _table(title, ("context", "right"), *(f"{width} at once" for width in widths))
    for context in dict.fromkeys(cell.context for cell in pays.cells):
        cells = [pays.at(context, width) for width in widths]
        pool = plan.ledger.kv_tokens
        table.add_row(f"{context:,}", *(_cell(cell, pool) if cell else "" for cell in cells))
    out.print(table)
    out.print(Text(f"accept length {_lengths(pays)}: {pays.accept_source}"))
    for text in dict.fromkeys(cell.reason for cell in pays.cells if cell.reason):
        out.print(Text(f"undecided where {text}", style="dim"))
    out.print(Text(f"cost from {'; '.join(dict.fromkeys(cell.basis for cell in pays.cells))}", style="dim"))
    out.print(Text("(in brackets: more tokens than the KV pool holds at once)", style="dim"))


def _lengths(pays: Pays) -> str:
    """Return the accept length with its interval; where cells have lengths of their own, the range of them."""
    taken = sorted({cell.accept_length for cell in pays.cells}, key=lambda length: length.mid)
    if len(taken) > 1:
        return f"{taken[0].mid:.2f} to {taken[-1].mid:.2f}"
    return f"{taken[0].mid:.2f} ({taken[0].low:.2f} to {taken[0].high:.2f})"


def _cell(cell: Cell, pool: int) -> Text:
    verdict = str(cell.verdict)
    speed = f"{cell.speedup.mid:.2f} " if cell.speedup else ""
    text = Text.assemble(speed, (verdict, _STYLES[verdict]))
    if cell.context * cell.concurrency > pool:
        text = Text.assemble("(", text, ")")
    needs = f"needs {cell.break_even.mid:.2f}" if cell.break_even else ""
    best = f"best {cell.best_steps}" if cell.best_steps is not None else ""
    return Text.assemble(text, (f"\n{', '.join(part for part in (needs, best) if part)}", "dim"))


def _changes(plan: Plan) -> None:
    changes = plan.resolution.changes
    if not changes:
        return
    out.print(Text("what the engine makes of it", style="bold"))
    for change in changes:
        style = "yellow" if change.explicit else ""
        before = f"{_short(change.asked)} -> " if change.explicit else ""
        _change(f"{change.name}: {before}{_short(change.effective)}", change.rule, style)
    for name, (value, rule) in plan.resolution.environment.items():
        _change(f"{name}={_short(value)}", rule, "")
    for note in plan.resolution.notes:
        out.print(Text(f"engine: {note}", style="dim"))


def _change(text: str, rule: str, style: str) -> None:
    out.print(Text.assemble(("  " + text, style), (f"  by {rule.rpartition(': ')[2]}", "dim")))


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 4:
        return f"{len(value)} values, {value[0]} to {value[-1]}"
    text = str(value)
    return text if len(text) <= _MOST_OF_A_VALUE else f"{text[: _MOST_OF_A_VALUE - 3]}..."


def _table(title: str, *columns: str | tuple[str, Literal["right"]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        if isinstance(column, tuple):
            table.add_column(column[0], justify=column[1], header_style="dim", no_wrap=True)
        else:
            table.add_column(column, header_style="dim", overflow="fold")
    return table
