"""The line that shows how far a start has come: live on a terminal, one line a phase elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from sglang_bw.launch.startup import Phase, Startup

REFRESH_PER_SECOND = 5


class StartupLine:
    """Shows a :class:`Startup` while it goes on."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.startup: Startup | None = None
        self._compiled: set[str] = set()
        self._spinner = Spinner("dots")
        self._live = Live(
            self, console=console, refresh_per_second=REFRESH_PER_SECOND, transient=True, redirect_stdout=False
        )

    def __enter__(self) -> StartupLine:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, startup: Startup, begun: list[Phase]) -> None:
        """Take in the state; called several times a second."""
        self.startup = startup
        if not self.console.is_terminal:
            for phase in begun:
                self.console.print(f"{startup.elapsed():6.1f} s  {phase.value}")
            if (name := startup.compiling) and name not in self._compiled:
                self._compiled.add(name)
                self.console.print(f"{startup.elapsed():6.1f} s  {compiling(name)}", markup=False)

    def __rich__(self) -> Table:
        """Return the line: spinner, phases with their seconds, the newest line of the log."""
        line = Table.grid(padding=(0, 1))
        line.add_column(no_wrap=True)
        line.add_column(no_wrap=True)
        line.add_column(no_wrap=True, overflow="ellipsis", style="dim")
        if self.startup:
            name = self.startup.compiling
            now = compiling(name) if name else self.startup.last_line
            line.add_row(self._spinner, Text(spent(self.startup)), Text(now))
        return line


def compiling(name: str) -> str:
    """Return what to say while a kernel is compiled."""
    return f"compiling {name}, for this and all later starts"


def spent(startup: Startup) -> str:
    """Return the phases so far with their seconds: ``starting 12 s · loading 3 s``."""
    phases = [phase for phase in Phase if phase is not Phase.READY]
    shown = [phase for phase in phases if phase in startup.seconds or phase is startup.phase]
    return " · ".join(f"{phase.value} {startup.elapsed(phase):.0f} s" for phase in shown)
