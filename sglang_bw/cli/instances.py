"""``status``, ``logs`` and ``stop``: the servers that `serve` has started here."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path

import click

from sglang_bw.cli.console import err, out, print_json, print_table
from sglang_bw.cli.options import JSON
from sglang_bw.cli.types import Real
from sglang_bw.errors import ServerStaysError, UnknownServerError
from sglang_bw.launch import instances
from sglang_bw.launch.instances import Instance, State
from sglang_bw.ledger.query import Query
from sglang_bw.ledger.store import Ledger

_POLL_S = 0.2
_KILL_S = 30.0


@click.command(short_help="The servers that were started here.")
@JSON
def status(as_json: bool) -> None:
    """List the servers that `serve` has started here: ready, starting, silent (it does not answer) or dead.

    One that died by itself stays in the list with the cause, until `stop` or the next start of that name.
    """
    found = [(one, one.state()) for one in instances.everything()]
    if as_json:
        print_json([_as_json(one, state) for one, state in found])
        return
    if not found:
        err.print("no server was started here; `sglang-bw serve RECIPE --detach` starts one", markup=False)
        return
    rows = [["name", "state", "since", "url", "engine", "pid"], *(_row(one, state) for one, state in found)]
    print_table(rows, left=(0, 1, 2, 3, 4))
    for one, state in found:
        if state is State.DEAD:
            out.print(f"{one.name}: {_why(one)}; `sglang-bw logs {one.name}`", markup=False)


@click.command(short_help="The log of a server that was started here.")
@click.argument("name")
@click.option("-f", "--follow", is_flag=True, help="Go on until the server ends, or Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, help="So many of the last.")
@click.option("--path", "only_path", is_flag=True, help="Print where the log is.")
def logs(name: str, follow: bool, lines: int, only_path: bool) -> None:
    """Print the engine's log of a server: its name in `status`, or a recipe, whose last start is meant then."""
    try:
        server: Instance | None = instances.find(name)
        path = Path(server.record.log) if server else Path()
    except UnknownServerError:
        server, path = None, _of_last_start(name)
    if only_path:
        out.print(str(path), markup=False)
        return
    try:
        _show(path, lines, server if follow else None)
    except BrokenPipeError:  # nothing is wrong with the log: `head` has enough
        out.on_broken_pipe()
    except OSError as error:
        raise UnknownServerError(f"the log {path} cannot be read: {error.strerror}") from error


@click.command(short_help="Stop servers that were started here.")
@click.argument("names", nargs=-1, metavar="[NAME...]")
@click.option("--all", "every", is_flag=True, help="All of them.")
@click.option(
    "--grace",
    type=Real(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="For requests that run; then everything of it is killed.",
)
def stop(names: tuple[str, ...], every: bool, grace: float) -> None:
    """Stop servers: they may finish what they do, and are killed after a grace, down to the last process.

    The record of a dead one is removed. A process that merely has the pid of an old server is never touched.
    """
    if bool(names) == every:
        raise click.UsageError("name the servers (`sglang-bw status`), or --all.")
    wanted = instances.everything() if every else [instances.find(name) for name in dict.fromkeys(names)]
    stays = [one.name for one in wanted if not _stop(one, grace)]
    if stays:
        raise ServerStaysError(
            f"{', '.join(stays)} cannot be ended",
            hint="A process that waits for a device cannot be killed: `nvidia-smi` and `dmesg` may say more.",
        )


def _stop(server: Instance, grace: float) -> bool:
    """Stop one; return whether it is gone."""
    was_alive = server.is_alive
    process = server.record.process
    # `serve` passes the first signal on to the engine and answers the second by killing its family. Without `serve` its
    # keeper does that.
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGTERM, _KILL_S), (signal.SIGKILL, _KILL_S)):
        if not process.send(number) or _gone(server, seconds):
            break
    if process.is_alive or not _gone(server, _KILL_S):
        return False
    server.remove()
    out.print(f"{server.name}: {'stopped' if was_alive else 'was dead; its record is removed'}", markup=False)
    return True


def _gone(server: Instance, seconds: float) -> bool:
    """Wait for the end of `serve` and of the engine."""
    deadline = time.monotonic() + seconds
    with err.status(f"stopping {server.name}") if err.is_terminal else contextlib.nullcontext():
        while server.record.process.is_alive or server.engine_runs:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
    return True


def _of_last_start(name: str) -> Path:
    """Return the log of a recipe's last start, which the ledger remembers.

    :raises UnknownServerError: the ledger has none, or the file is gone.
    """
    with Ledger() as ledger:
        entries = ledger.select(Query(recipe=name, kind="start"))
    logs_of = [Path(place) for entry in entries for place in entry.artefacts]
    if found := [path for path in logs_of if path.is_file()]:
        return found[-1]
    raise UnknownServerError(
        f"no server {name!r} was started here, and the ledger knows no log of it",
        hint="`sglang-bw status` lists the servers, `sglang-bw ledger list` what was started before.",
    )


def _show(path: Path, lines: int, follow: Instance | None) -> None:
    with path.open(encoding="utf-8", errors="replace") as file:
        sys.stdout.writelines(deque(file, maxlen=lines))
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            while follow:
                ended = not follow.is_alive  # before the last look, so that nothing is lost
                sys.stdout.write(file.read())
                sys.stdout.flush()
                if ended:
                    return
                time.sleep(_POLL_S)


def _row(server: Instance, state: State) -> list[str]:
    record = server.record
    shown = f"{state.value}: {record.phase}" if state is State.STARTING else state.value
    since = record.ended.at if record.ended else record.ready_at or record.started_at
    alive = str(record.process.pid) if state is not State.DEAD else "-"
    return [record.name, shown, _ago(since), record.url, record.engine, alive]


def _ago(moment: datetime) -> str:
    seconds = max(0, int((datetime.now(UTC) - moment).total_seconds()))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _why(server: Instance) -> str:
    ended = server.record.ended
    return f"ended with exit code {ended.code}: {ended.why}" if ended else "it was killed, and nobody wrote down why"


def _as_json(server: Instance, state: State) -> dict[str, object]:
    return {**server.record.model_dump(mode="json"), "state": state.value}
