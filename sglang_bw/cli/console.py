"""Where the tool prints: tables and progress for people, JSON for programs."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import console as rich_console
from rich.segment import Segment

from sglang_bw.errors import OutputError

# C0 and C1 but for newline and tab, and surrogates, which are no text: a terminal would obey the first, and no output
# takes the second.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_MARK = "\ufffd"
# 128 + SIGPIPE, as in shells.
_BROKEN_PIPE = 141
_FILE_WIDTH = 140


def clean(text: str) -> str:
    """Return text that a terminal only shows: much of what is printed came from servers, logs and files."""
    return _UNSAFE.sub(_MARK, text)


class Console(rich_console.Console):
    """A console for texts from outside: styles are its own, control characters in a text are replaced."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; what is said beside the output, such as progress, is no reason to end a server for.

        :raises OutputError: the output goes to a full disk, or the like.
        """
        try:
            super().print(*objects, **options)
        except OSError as error:
            self._to_nowhere()
            if not self.stderr:
                raise OutputError(f"cannot write to standard output: {error.strerror or error}") from error

    def on_broken_pipe(self) -> None:
        """End as other programs do when nobody reads on, such as ``head``."""
        self._to_nowhere()
        if not self.stderr:
            raise SystemExit(_BROKEN_PIPE)

    def _to_nowhere(self) -> None:
        """Drop what the interpreter would try to write once more at its end."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    def render(
        self, renderable: rich_console.RenderableType, options: rich_console.ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render, as everything that is printed is."""
        for segment in super().render(renderable, options):
            # Rich takes carriage returns out of texts; one that is left is the end of a line that will be overwritten.
            keep = segment.control or segment.text == "\r"
            yield segment if keep else Segment(clean(segment.text), segment.style)


# Neither highlighting nor emoji: what is printed is printed as it is.
out = Console(highlight=False, emoji=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


def widen_for_file() -> None:
    """Give tables room where the output is no terminal: a file has no width of its own, and rich's 80 breaks them."""
    if not out.is_terminal:
        out.width = max(out.width, _FILE_WIDTH)


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
