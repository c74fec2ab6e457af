"""``watch``."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from dataclasses import asdict

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sglang_bw.cli.console import err, out
from sglang_bw.cli.options import api_key
from sglang_bw.cli.types import Real
from sglang_bw.errors import BwError, WatchError
from sglang_bw.host import fingerprint
from sglang_bw.launch.command import DEFAULT_PORT
from sglang_bw.launch.watch import METRICS_FLAG, Reading, Served, Watcher
from sglang_bw.ledger import costs
from sglang_bw.ledger.costs import RoundCost
from sglang_bw.ledger.store import Ledger

_BARS = " ▁▂▃▄▅▆▇█"
_HISTORY = 60


@click.command(short_help="Watch a running server.")
@click.option(
    "--url", default=f"http://127.0.0.1:{DEFAULT_PORT}", show_default=True, help="The server, without a path."
)
@api_key
@click.option("--interval", type=Real(min=0.1, max=86400), default=1.0, show_default=True, metavar="SECONDS")
@click.option("--once", is_flag=True, help="One look, then the end.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a look.")
def watch(url: str, api_key: str | None, interval: float, once: bool, as_json: bool) -> int:
    """Watch a running server: tok/s, accept length, draft steps, requests, KV cache, and what speculation gains now.

    Works without metrics, and says which flag adds what is missing. Ctrl-C ends it; the server goes on.
    """
    watcher = Watcher(url.rstrip("/"), api_key=api_key)
    served = watcher.connect()
    view = _View(watcher.url, served, _known_cost(served))
    with contextlib.suppress(KeyboardInterrupt):
        if as_json or once or not out.is_terminal:
            return _lines(watcher, view, interval, once=once, as_json=as_json)
        _live(watcher, view, interval)
    return 0


def _lines(watcher: Watcher, view: _View, interval: float, *, once: bool, as_json: bool) -> int:
    if not as_json:
        for text in view.heading():
            err.print(text, markup=False)
    while True:
        view.take(watcher.read())
        if as_json:
            click.echo(json.dumps(view.as_json()))
        else:
            out.print(view.line(), markup=False)
        if once:
            return 0
        time.sleep(interval)


def _live(watcher: Watcher, view: _View, interval: float) -> None:
    with Live(view.rendered(), console=out, auto_refresh=False) as live:
        while True:
            try:
                view.take(watcher.read())
            except WatchError as error:
                view.lost(error.message)
            live.update(view.rendered(), refresh=True)
            time.sleep(interval)


def _known_cost(served: Served) -> RoundCost | None:
    """Return what the ledger knows of a round's cost; it may not be there at all."""
    if served.algorithm is None:
        return None
    try:
        with Ledger() as ledger:
            runs = ledger.runs()
    except BwError:
        return None
    steps = None if served.adaptive else served.steps
    return costs.newest(runs, model=served.model, steps=steps, host=fingerprint.look().fingerprint)


class _View:
    """What is shown: the newest reading, and the speed of the last minute."""

    def __init__(self, url: str, served: Served, cost: RoundCost | None) -> None:
        self.url = url
        self.served = served
        self.cost = cost
        self.reading = Reading(0.0)
        self.speeds: deque[float] = deque(maxlen=_HISTORY)
        self.problem = ""

    def take(self, reading: Reading) -> None:
        self.reading, self.problem = reading, ""
        self.speeds.append(reading.tok_s or 0.0)

    def lost(self, problem: str) -> None:
        self.problem = problem

    @property
    def gain(self) -> float | None:
        """Speed over plain decoding, as estimated: accept length over the cost of a round."""
        now = self.reading
        if self.cost is None or now.accept_length is None or not now.running:
            return None
        return now.accept_length / self.cost.at(now.running)

    def heading(self) -> list[str]:
        served = self.served
        steps = f", {served.steps} steps" if served.steps is not None else ""
        spec = f"{served.algorithm}{steps}" if served.algorithm else "no speculation"
        lines = [
            f"{served.model} at {self.url}: sglang {served.version}, {spec}{', adaptive' if served.adaptive else ''}"
        ]
        if not served.has_metrics:
            more = (
                "the newest accept length and the steps that are chosen" if served.algorithm else "speeds by the second"
            )
            lines.append(f"metrics are off: a start with {METRICS_FLAG} adds {more}")
        return lines

    def rows(self) -> list[tuple[str, str]]:
        now, served = self.reading, self.served
        rows = [
            ("output", _text(now.tok_s, "{:.1f} tok/s")),
            ("requests", f"{_text(now.running, '{}')} running, {_text(now.queued, '{}')} queued"),
            ("KV cache", _text(now.kv_use, "{:.1%}")),
        ]
        if served.algorithm:
            span = "" if now.accept_is_recent else " since the start"
            steps = now.steps if now.steps is not None else served.steps
            rows += [
                ("accept length", _text(now.accept_length, "{:.2f}") + (span if now.accept_length is not None else "")),
                ("draft steps", _text(steps, "{:g}") + ("" if now.steps is not None else " as started")),
                ("speculation now", self._gain_text()),
            ]
        return rows

    def _gain_text(self) -> str:
        if self.gain is not None:
            assert self.cost is not None
            return f"{self.gain:.2f} times plain decoding, estimated with the cost of a round in {self.cost.run}"
        if self.cost is None:
            return "gain not known: `sglang-bw ab RECIPE --no-spec` measures the cost of a round"
        return "idle"

    def line(self) -> str:
        return ", ".join(f"{name} {text}" for name, text in self.rows())

    def as_json(self) -> dict[str, object]:
        found = asdict(self.reading) | {"gain": self.gain, "metrics": self.served.has_metrics}
        if self.reading.steps is None:
            found["steps"] = self.served.steps
        return {"model": self.served.model, **found}

    def rendered(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for name, text in self.rows():
            table.add_row(Text(name, style="dim"), Text(text))
        lines = [Text(text, style="bold" if number == 0 else "yellow") for number, text in enumerate(self.heading())]
        tail = [Text(self.problem, style="red")] if self.problem else []
        return Group(*lines, table, Text(_sparkline(self.speeds), style="green"), *tail)


def _sparkline(values: deque[float]) -> str:
    most = max(values, default=0.0) or 1.0
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] for value in values)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
