"""How `doctor` prints what it found: the worst first, each with what it costs and how to fix it."""

from __future__ import annotations

import re
import textwrap
from itertools import groupby

from rich.text import Text

from sglang_bw.cli.console import out
from sglang_bw.host.doctor import Diagnosis
from sglang_bw.host.finding import Finding, Verdict

_STYLES = {Verdict.FAIL: "bold red", Verdict.WARN: "yellow", Verdict.UNSEEN: "cyan", Verdict.OK: "green"}
_LABEL = 7
_COMMAND = re.compile(r"`[^`]*`")
_NARROW, _WIDE = 60, 120
_GLUE = "\N{NO-BREAK SPACE}"


def show(diagnosis: Diagnosis) -> None:
    """Print a diagnosis for people."""
    width = min(max(out.width, _NARROW), _WIDE)
    counts = [f"{len(diagnosis.of(verdict))} {verdict.value}" for verdict in Verdict]
    out.print(", ".join(counts), style=_STYLES[diagnosis.worst], markup=False)
    for verdict in (Verdict.FAIL, Verdict.WARN):
        for finding in diagnosis.of(verdict):
            out.print()
            _problem(finding, width)
    _section("not seen", diagnosis.of(Verdict.UNSEEN), width)
    _section("ok", diagnosis.of(Verdict.OK), width)
    if len(matrix := diagnosis.between.matrix()) > 2:
        out.print("\npaths between GPUs", style="bold", markup=False)
        widths = [max(len(row[column]) for row in matrix) for column in range(len(matrix[0]))]
        for row in matrix:
            cells = (cell.ljust(size) for cell, size in zip(row, widths, strict=True))
            out.print("  " + "  ".join(cells).rstrip(), markup=False)


def _problem(finding: Finding, width: int) -> None:
    label = finding.verdict.value.upper().ljust(_LABEL)
    head = _wrapped(f"{finding.group}, {finding.name}: {finding.says}", width, _LABEL)
    out.print(Text.assemble((label, _STYLES[finding.verdict]), head[_LABEL:]))
    for name, text in (("costs", finding.costs), ("fix", finding.fix)):
        if text:
            lines = _wrapped(text, width, 2 * _LABEL)
            out.print(Text.assemble(" " * _LABEL, (name.ljust(_LABEL), "bold"), lines[2 * _LABEL :]))


def _section(title: str, findings: list[Finding], width: int) -> None:
    """Print findings that ask for nothing: a heading a group, then a line each."""
    if not findings:
        return
    verdict = findings[0].verdict
    out.print(f"\n{title}", style=_STYLES[verdict], markup=False)
    for group, members in groupby(findings, key=lambda finding: finding.group):
        out.print(f"  {group}", style="bold", markup=False)
        for finding in members:
            hint = f" ({finding.fix})" if finding.fix else ""
            out.print(_wrapped(f"    {finding.name}: {finding.says}{hint}", width, 6, first=0), markup=False)


def _wrapped(text: str, width: int, indent: int, *, first: int | None = None) -> str:
    """Wrap text with a hanging indent; a command between backquotes stays on one line, to be copied."""
    glued = _COMMAND.sub(lambda match: match[0].replace(" ", _GLUE), text)
    lines = textwrap.wrap(
        glued, width, initial_indent=" " * (indent if first is None else first), subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False, drop_whitespace=True,
    )  # fmt: skip
    return "\n".join(lines).replace(_GLUE, " ")
