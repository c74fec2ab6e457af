"""Start the servers of `probe round` one after the other and measure each; or measure servers that run already."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sglang_bw.errors import EngineStartError, ProbeError
from sglang_bw.launch import command as commands
from sglang_bw.launch import device as devices
from sglang_bw.launch import port as ports
from sglang_bw.launch import server, weights
from sglang_bw.launch.engine import Engine
from sglang_bw.launch.probe import load
from sglang_bw.launch.probe.load import Client
from sglang_bw.launch.probe.rounds import Point, Result
from sglang_bw.launch.probe.setups import Setup
from sglang_bw.launch.process import SignalRelay
from sglang_bw.recipes import flags
from sglang_bw.recipes.flags import Flags
from sglang_bw.recipes.hardware import Hardware
from sglang_bw.recipes.schema import Recipe

_STOP_S = 20.0
# Before the first start is over nobody knows how long one takes: a small model on a GPU, graphs captured.
_START_GUESS_S = 90.0
_CELL_GUESS_S = 10.0


@dataclass(frozen=True)
class Plan:
    """What every server is asked.

    :ivar rounds: decode rounds that are timed, beyond those that cancel out.
    :ivar context: tokens of a prompt, about; 0 for the texts as they are.
    """

    batches: tuple[int, ...]
    rounds: int = 64
    repeats: int = 3
    context: int = 0
    texts: tuple[str, ...] = ()
    startup_timeout_s: float = 1800.0


@dataclass
class Pace:
    """How long starts and cells have taken, and so how long the rest will."""

    servers: int
    cells: int
    starts: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)

    def left_s(self) -> float:
        """Return the seconds to expect."""
        start = sum(self.starts) / len(self.starts) if self.starts else _START_GUESS_S
        cell = sum(self.measured) / len(self.measured) if self.measured else _CELL_GUESS_S
        return (self.servers - len(self.starts)) * start + (self.cells - len(self.measured)) * cell

    def says(self) -> str:
        """Return it for people."""
        left = self.left_s()
        return f"about {left:.0f} s left" if left < 90 else f"about {left / 60:.0f} min left"


def start_all(
    setups: Sequence[Setup],
    recipe: Recipe,
    engine: Engine,
    machine: Hardware,
    plan: Plan,
    result: Result,
    *,
    extra: Flags,
    log: Path,
    tell: Callable[[str], None],
    keep: Callable[[Result], None],
) -> None:
    """Measure one server after the other; the result is kept after each.

    :raises EngineStartError: one of them does not start.
    :raises ProbeError: one of them does not answer as it should.
    :raises KeyboardInterrupt: a signal came.
    """
    pace = Pace(len(setups), len(setups) * len(plan.batches))
    for number, setup in enumerate(setups, 1):
        head = f"{number}/{len(setups)} {setup.title}"
        began = time.monotonic()
        say = _saying(head, pace, tell)
        with _running(setup, recipe, engine, machine, plan, extra, log, say) as running:
            pace.starts.append(time.monotonic() - began)
            result.servers.append(
                {
                    "title": setup.title,
                    "flags": flags.tokens(running.command.shown_flags),
                    "env": running.command.shown_env,
                    "start_seconds": round(pace.starts[-1], 1),
                }
            )
            client = Client(running.command.url, api_key=running.command.api_key)
            try:
                _cells(client, setup.steps, True, plan, result, say, pace)
            except ProbeError as error:
                if running.relay.received:
                    raise KeyboardInterrupt from error
                raise
        keep(result)
    result.complete = True
    keep(result)


def ask_all(
    urls: Sequence[str],
    plan: Plan,
    result: Result,
    *,
    api_key: str | None = None,
    tell: Callable[[str], None],
    keep: Callable[[Result], None],
) -> None:
    """Measure servers that somebody else has started, each as what it says it is.

    :raises ProbeError: one does not answer, or changes its draft steps while it serves.
    """
    clients = [Client(url, api_key=api_key) for url in urls]
    served = [client.served() for client in clients]
    for client, found in zip(clients, served, strict=True):
        if found.adaptive:
            raise ProbeError(
                f"{client.url} changes its draft steps by itself (--speculative-adaptive)",
                hint="measure a server with fixed steps, or name the recipe: `sglang-bw probe round RECIPE`.",
            )
        if found.most is not None and max(plan.batches) > found.most:
            raise ProbeError(
                f"{client.url} decodes at most {found.most} requests at once, not {max(plan.batches)}",
                hint="smaller --batches, or a server with a larger --max-running-requests.",
            )
    pace = Pace(0, len(urls) * len(plan.batches))
    for client, found in zip(clients, served, strict=True):
        title = "plain decoding" if found.steps is None else f"{found.steps} steps"
        result.servers.append({"title": title, "url": client.url, "model": found.model, "version": found.version})
        say = _saying(f"{client.url} ({title})", pace, tell)
        _cells(client, found.steps, None if found.steps else False, plan, result, say, pace)
        keep(result)
    result.complete = True
    keep(result)


def _cells(
    client: Client,
    steps: int | None,
    simulated: bool | None,
    plan: Plan,
    result: Result,
    say: Callable[[str], None],
    pace: Pace,
) -> None:
    for batch in plan.batches:
        began = time.monotonic()
        texts = load.prompts(plan.texts, batch, plan.context)
        cell = load.measure(
            client,
            texts,
            rounds=plan.rounds,
            repeats=plan.repeats,
            tell=_saying(f"batch {batch}", None, say),
        )
        pace.measured.append(time.monotonic() - began)
        result.context = max(result.context, cell.context)
        if steps is None:
            result.plain[batch] = Point(batch, 1.0, cell.seconds, cell.spread, simulated=False)
        else:
            point = Point(batch, cell.accept_length, cell.seconds, cell.spread, simulated)
            result.rounds.setdefault((steps, batch), []).append(point)


@contextmanager
def _running(
    setup: Setup,
    recipe: Recipe,
    engine: Engine,
    machine: Hardware,
    plan: Plan,
    extra: Flags,
    log: Path,
    say: Callable[[str], None],
) -> Iterator[server.Server]:
    port = ports.next_free(commands.DEFAULT_HOST, commands.DEFAULT_PORT) or commands.DEFAULT_PORT
    command = setup.command(recipe, machine, engine.environment(), port, extra)
    weights.check_command(command)
    environ = devices.environment(machine.device, {**engine.environment(), **command.env})
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with SignalRelay() as relay:
        running = server.start(command, engine.python, environ, log, relay)
        try:
            running.await_ready(plan.startup_timeout_s, lambda startup, _begun: say(startup.phase.value))
            yield running
        except EngineStartError as error:
            error.message = f"{setup.title}: {error.message}"
            raise
        finally:
            running.process.send(signal.SIGTERM)
            if running.process.wait(_STOP_S) is None:
                running.process.kill()
                running.process.wait()


def _saying(head: str, pace: Pace | None, tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return what puts a head before every line, and the time that is left behind it."""
    return lambda text: tell(f"{head}: {text}; {pace.says()}" if pace else f"{head}, {text}")
