"""Start the servers of `probe round` one after the other and measure each; or measure servers that run already."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sglang_bw.errors import EngineStartError, ProbeError
from sglang_bw.host import probes
from sglang_bw.launch import command as commands
from sglang_bw.launch import device as devices
from sglang_bw.launch import port as ports
from sglang_bw.launch import server, weights
from sglang_bw.launch.engine import Engine
from sglang_bw.launch.probe import load, sizes
from sglang_bw.launch.probe.load import Client, Served
from sglang_bw.launch.probe.rounds import Point, Result
from sglang_bw.launch.probe.setups import Setup
from sglang_bw.launch.process import SignalRelay
from sglang_bw.recipes import flags
from sglang_bw.recipes.flags import Flags
from sglang_bw.recipes.hardware import Hardware
from sglang_bw.recipes.schema import Recipe

_STOP_S = 20.0
_DEATH_S = 2.0
_PORTS = 1000
# How far a simulated accept length may be off: few rounds draw it from two whole numbers.
_SIMULATED_WITHIN = 0.2
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
    """Measure one server after the other; the result is kept after each batch.

    :raises ModelFilesError: the model or a draft is not there, before anything is started.
    :raises EngineStartError: one of them does not start.
    :raises ProbeError: one of them does not answer as it should, or would let requests wait.
    :raises KeyboardInterrupt: the user has enough; the engine has been killed.
    """
    for setup in setups:
        command = setup.command(recipe, machine, engine.environment(), commands.DEFAULT_PORT, extra)
        weights.check_command(command)
        _check_most(setup.title, sizes.number(command, "max-running-requests"), plan)
    pace = Pace(len(setups), len(setups) * len(plan.batches))
    for number, setup in enumerate(setups, 1):
        began = time.monotonic()
        say = _saying(f"{number}/{len(setups)} {setup.title}", pace, tell)
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
                _check_most(setup.title, client.served().most, plan)
                _cells(client, setup.steps, True, plan, result, say, pace, keep, setup.accept_length)
            except ProbeError as error:
                raise _explained(error, setup, running) from error
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

    :raises ProbeError: one does not answer, changes its draft steps while it serves, or serves something else than
        the others.
    """
    clients = [Client(url, api_key=api_key) for url in urls]
    served = []
    for client in clients:
        tell(f"asking {client.url} what it serves")
        served.append(found := client.served())
        if found.adaptive:
            raise ProbeError(
                f"{client.url} changes its draft steps by itself (--speculative-adaptive)",
                hint="measure a server with fixed steps, or name the recipe: `sglang-bw probe round RECIPE`.",
            )
        _check_most(client.url, found.most, plan)
    _check_alike(clients, served)
    result.engine, result.device = served[0].version, served[0].device
    pace = Pace(0, len(urls) * len(plan.batches))
    for client, found in zip(clients, served, strict=True):
        title = "plain decoding" if found.steps is None else f"{found.steps} steps"
        result.servers.append({"title": title, "url": client.url, "model": found.model, "version": found.version})
        say = _saying(f"{client.url} ({title})", pace, tell)
        _cells(client, found.steps, None if found.steps else False, plan, result, say, pace, keep)
    result.complete = True
    keep(result)


def _check_most(who: str, most: int | None, plan: Plan) -> None:
    """Refuse a batch of which a part would wait: its time would be that of two batches."""
    if most is not None and max(plan.batches) > most:
        raise ProbeError(
            f"{who} decodes at most {most} requests at once, not {max(plan.batches)}",
            hint="smaller --batches, or a server with a larger --max-running-requests.",
        )


def _check_alike(clients: Sequence[Client], served: Sequence[Served]) -> None:
    """Refuse what cannot be put over each other."""
    first, *others = served
    for client, found in zip(clients[1:], others, strict=True):
        for what in ("model", "version", "device"):
            if (mine := getattr(found, what)) != (its := getattr(first, what)):
                raise ProbeError(
                    f"{client.url} has another {what} than {clients[0].url}: {mine}, not {its}",
                    hint="R is the cost of a round over a plain step of the same model on the same engine.",
                )
    if sum(found.steps is None for found in served) > 1:
        raise ProbeError("more than one of the servers decodes plainly", hint="one of them is enough for R.")


def _cells(
    client: Client,
    steps: int | None,
    simulated: bool | None,
    plan: Plan,
    result: Result,
    say: Callable[[str], None],
    pace: Pace,
    keep: Callable[[Result], None],
    forced: float | None = None,
) -> None:
    """Measure one server at every batch.

    :param forced: the accept length that it simulates.
    """
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
        elif forced and abs(cell.accept_length / forced - 1) > _SIMULATED_WITHIN:
            raise ProbeError(
                f"{steps} steps at batch {batch} emitted {cell.accept_length:.2f} tokens a round, not the {forced:g} "
                "that were to be simulated",
                hint="the engine does not know SGLANG_SIMULATE_ACC_LEN, or the context is at its end.",
            )
        else:
            point = Point(batch, cell.accept_length, cell.seconds, cell.spread, simulated)
            result.rounds.setdefault((steps, batch), []).append(point)
        keep(result)


def _explained(error: ProbeError, setup: Setup, running: server.Server) -> ProbeError:
    """Return the error, or what was behind it: the engine is gone."""
    if running.process.wait(_DEATH_S) is None:
        return error
    return ProbeError(
        f"{setup.title}: the engine died while it was measured: {running.death()}",
        hint=f"Full log: {running.process.log}",
    )


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
    # Two probes that start together look for a port at different places.
    above = commands.DEFAULT_PORT + os.getpid() % _PORTS
    port = ports.next_free(commands.DEFAULT_HOST, above) or commands.DEFAULT_PORT
    command = setup.command(recipe, machine, engine.environment(), port, extra)
    for path, content in setup.files.items():
        probes.write(path, dict(content))
    environ = devices.environment(machine.device, {**engine.environment(), **command.env})
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # The relay is not entered: Ctrl-C is this program's, which then ends the engine in its own way.
    running = server.start(command, engine.python, environ, log, SignalRelay())
    try:
        running.await_ready(plan.startup_timeout_s, lambda startup, _begun: say(startup.phase.value))
        yield running
    except EngineStartError as error:
        error.message = f"{setup.title}: {error.message}"
        raise
    except KeyboardInterrupt:
        running.process.kill()
        raise
    finally:
        running.process.send(signal.SIGTERM)
        if running.process.wait(_STOP_S) is None:
            running.process.kill()
            running.process.wait()


def _saying(head: str, pace: Pace | None, tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return what puts a head before every line, and the time that is left behind it."""
    return lambda text: tell(f"{head}: {text}; {pace.says()}" if pace else f"{head}, {text}")
