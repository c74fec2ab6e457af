"""Where the tool prints: tables and progress for people, JSON for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

# Neither highlighting nor emoji: what is printed is printed as it is.
out = Console(highlight=False, emoji=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON, the only thing on standard output."""
    out.print(json.dumps(value, indent=2, default=str), markup=False)


def print_table(table: list[list[str]], *, left: tuple[int, ...] = ()) -> None:
    """Print rows of cells, columns aligned to the right except some."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        out.print("  ".join(cells).rstrip(), markup=False)


@contextmanager
def steps(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show what is being done now, with the seconds since the start."""
    if quiet or not err.is_terminal:
        yield (lambda step: None) if quiet else (lambda step: err.print(f"- {step}", markup=False))
        return
    started = time.monotonic()
    with err.status("starting") as status:
        yield lambda step: status.update(f"{step} [dim]({time.monotonic() - started:.0f} s)[/dim]")
