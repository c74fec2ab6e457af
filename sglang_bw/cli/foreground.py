"""The part of `serve` that starts a launch here and stays with it until it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sglang_bw.cli.console import err
from sglang_bw.cli.journal import Journal
from sglang_bw.cli.preparation import Options
from sglang_bw.cli.serve_console import ServeConsole
from sglang_bw.cli.startup_line import StartupLine
from sglang_bw.errors import BwError, EngineOutputError, OutputError
from sglang_bw.host import fingerprint
from sglang_bw.launch import device as devices
from sglang_bw.launch import instances, server, warmup
from sglang_bw.launch.command import Command
from sglang_bw.launch.engine import Engine
from sglang_bw.launch.instances import Instance, Process
from sglang_bw.launch.journal import Attempt
from sglang_bw.launch.notify import SPARE_S, going_on, notify
from sglang_bw.launch.process import SignalRelay, shell_code
from sglang_bw.launch.server import Server
from sglang_bw.launch.startup import Phase, Startup
from sglang_bw.recipes.schema import Recipe


@dataclass(frozen=True)
class Checked:
    """A launch that nothing speaks against.

    :ivar notes: what was let through, and what the user should know of it.
    """

    recipe: Recipe
    command: Command
    engine: Engine
    environ: dict[str, str]
    log: Path
    notes: tuple[str, ...]


def run(launch: Checked, options: Options, instance: Instance | None = None) -> int:
    """Start the engine and wait for its end; return the exit code.

    :param instance: the record, where it is made already.
    :raises EngineStartError: it did not become ready.
    :raises EngineOutputError: its output is broken, with ``--strict``.
    """
    command = launch.command
    console = ServeConsole(as_json=options.as_json)
    console.begin(launch.recipe, command, launch.engine, launch.log, launch.notes)
    journal = Journal(Attempt(launch.recipe.id, command, launch.engine.installation, fingerprint.look()))
    journal.announce()
    environ = devices.environment(command.device, {**launch.environ, **command.env})
    with SignalRelay() as relay, _registered(launch, instance, keep_failure=options.no_wait) as registered:
        running = server.start(command, launch.engine.python, environ, launch.log, relay)
        registered.update(engine_process=Process.of(running.process.pid))
        going_on(options.startup_timeout + SPARE_S, "loading")
        with StartupLine(err) as line, journal.watching(running):
            running.await_ready(options.startup_timeout, _telling(line, registered))
        console.ready(running, detached=options.detach)
        registered.update(phase=Phase.READY.value, ready_at=datetime.now(UTC))
        notify("READY=1", f"STATUS=serving {command.url}")
        # Only node 0 answers requests.
        report = None if options.no_warmup or command.node_rank else _warm_up(running, launch.recipe, console)
        journal.started(running, report)
        if options.strict and report and report.broken:
            running.process.kill()
            running.process.wait()
            raise EngineOutputError(report.warnings[0], hint=f"Full log: {running.process.log}")
        registered.update(settled=True)
        code = running.process.wait() or 0
        notify("STOPPING=1")
        if code != 0 and not relay.received:
            registered.died(shell_code(code), running.death())
    console.end(running, code)
    journal.ended(running, code)
    return shell_code(code)


class _Registered:
    """The launch's record, where one can be written: a read-only state directory is no reason not to serve."""

    def __init__(self, instance: Instance | None) -> None:
        self.instance = instance
        self.is_kept = False

    def update(self, **changes: object) -> None:
        if self.instance:
            with contextlib.suppress(OSError):
                self.instance.update(**changes)

    def died(self, code: int, why: str) -> None:
        """Keep the record of a server that ended by itself: `status` tells of it."""
        self.is_kept = True
        self.update(ended={"code": code, "why": why, "at": datetime.now(UTC)})


def register(launch: Checked, *, detached: bool) -> Instance:
    """Make the record of a launch.

    :raises PortInUseError: another server that was started here took the port since it was checked.
    :raises OutputError: it cannot be written.
    """
    command = launch.command
    try:
        return instances.create(
            launch.recipe.id,
            command.host,
            command.port,
            url=command.url,
            device=command.device,
            engine=launch.engine.installation.version,
            speculates=command.speculates,
            needs_key=command.api_key is not None,
            detached=detached,
            log=str(launch.log),
        )
    except OSError as error:
        raise OutputError(f"no server can be registered below {instances.root()}: {error.strerror}") from error


@contextlib.contextmanager
def _registered(launch: Checked, instance: Instance | None, *, keep_failure: bool) -> Iterator[_Registered]:
    """Keep the record up to date, and remove it at the end.

    :param keep_failure: nobody waits for the start, so that `status` has to tell of its failure.
    """
    if instance is None:
        try:
            instance = register(launch, detached=False)
        except OutputError as error:
            err.print(f"warning: `sglang-bw status` will not know it: {error.message}", style="yellow", markup=False)
    registered = _Registered(instance)
    try:
        yield registered
    except BwError as error:
        if keep_failure:
            registered.died(error.exit_code, error.message)
        raise
    finally:
        if instance and not registered.is_kept:
            instance.remove()


def _telling(line: StartupLine, registered: _Registered) -> Callable[[Startup, list[Phase]], None]:
    def tell(startup: Startup, begun: list[Phase]) -> None:
        line.update(startup, begun)
        for phase in begun:
            registered.update(phase=phase.value)
            notify(f"STATUS={phase.value}")

    return tell


def _warm_up(running: Server, recipe: Recipe, console: ServeConsole) -> warmup.Report | None:
    """Measure and warn; a fault of the warm-up itself leaves the server alone, and gives ``None``."""
    import httpx

    command = running.command
    try:
        report = warmup.run(command.url, recipe.warmup, speculates=command.speculates, api_key=command.api_key)
    except (httpx.HTTPError, LookupError, TypeError, ValueError, AttributeError) as error:
        if not running.relay.received and running.process.poll() is None:
            console.warn(f"The warm-up failed: {type(error).__name__}: {error}")
        return None
    console.warmed_up(report)
    return report
