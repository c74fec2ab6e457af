"""``probe round``."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sglang_bw.cli.console import err, out, print_json, print_table
from sglang_bw.cli.interrupt import end_like_ctrl_c
from sglang_bw.cli.journal import probing
from sglang_bw.cli.probe import machine_of, progress
from sglang_bw.errors import OutputError
from sglang_bw.host import fingerprint, probes
from sglang_bw.launch import command as commands
from sglang_bw.launch import engine as engines
from sglang_bw.launch import secret, selection, server
from sglang_bw.launch.journal import engine_record
from sglang_bw.launch.probe import rounds, session, setups, sizes
from sglang_bw.launch.probe.journal import Probe
from sglang_bw.recipes import flags
from sglang_bw.recipes.flags import NotAFlagError
from sglang_bw.recipes.origin import of_flags
from sglang_bw.recipes.schema import Recipe, Warmup

if TYPE_CHECKING:
    from sglang_bw.launch.engine import Engine
    from sglang_bw.launch.probe.rounds import Line, Result
    from sglang_bw.launch.probe.setups import Setup
    from sglang_bw.recipes.flags import Flags
    from sglang_bw.recipes.hardware import Hardware

_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Options:
    """The options of the command, by their names there."""

    name: str | None
    engine_flags: tuple[str, ...]
    urls: tuple[str, ...]
    api_key: str | None
    draft: str | None
    steps: tuple[int, ...] | None
    lengths: tuple[float, ...] | None
    batches: tuple[int, ...] | None
    rounds: int
    repeats: int
    context: int
    device: str
    allow_stock: bool
    startup_timeout: float
    python: Path | None
    engine_tree: Path | None
    log: Path | None
    path: Path | None
    dry_run: bool
    as_json: bool

    def check(self) -> None:
        """Refuse what makes no sense together."""
        if bool(self.name) == bool(self.urls):
            raise click.UsageError("name either a recipe (or a model with --draft) or servers with --url.")
        if self.urls and (self.steps or self.lengths or self.engine_flags or self.draft):
            raise click.UsageError("a running server has its steps, draft and flags: they do not go with --url.")
        alone = {
            "--device": self.device != "auto",
            "--log": self.log,
            "--python": self.python,
            "--engine-tree": self.engine_tree,
            "--allow-stock": self.allow_stock,
        }
        if self.urls and (given := [option for option, value in alone.items() if value]):
            raise click.UsageError(f"nothing is started with --url: {', '.join(given)} would do nothing.")
        if self.batches and min(self.batches) < 1:
            raise click.UsageError("a batch has at least one request.")

    def plan(self, batches: tuple[int, ...], texts: tuple[str, ...]) -> session.Plan:
        """Return what every server is asked."""
        return session.Plan(batches, self.rounds, self.repeats, self.context, texts, self.startup_timeout)


def run(options: Options) -> None:
    """Measure, store and show."""
    options.check()
    _ask(options) if options.urls else _start(options)


def _ask(options: Options) -> None:
    plan = options.plan(options.batches or _BATCHES, Warmup().prompts)
    host = fingerprint.take()
    result = rounds.Result(host, "", "", "")
    place = options.path or probes.place("round", host.key, "url")
    if options.dry_run:
        urls = list(map(secret.without_userinfo, options.urls))
        if options.as_json:
            print_json({"batches": plan.batches, "urls": urls, "out": str(place)})
        else:
            out.print(f"would measure {', '.join(urls)} at batch {_numbers(plan.batches)}", markup=False)
        return
    probes.try_out(place)
    with _probing(Probe(result, None, fingerprint.look(), None, place), result, options), progress() as tell:
        session.ask_all(options.urls, plan, result, api_key=options.api_key, tell=tell, keep=_keeper(place))


def _start(options: Options) -> None:
    recipe = selection.select(options.name or "", draft=options.draft)
    engine = engines.find(options.python, options.engine_tree)
    machine = machine_of(recipe, options.device, engine)
    extra = _flags(options.engine_flags)
    folder = options.path.absolute().parent if options.path else probes.folder()
    wanted = setups.setups(recipe, options.steps or (), options.lengths or (), folder, goodput=_has_goodput(engine))
    batches = options.batches or sizes.batches(
        wanted[0].command(recipe, machine, os.environ, commands.DEFAULT_PORT, extra)
    )
    plan = options.plan(batches, recipe.warmup.prompts)
    if options.dry_run:
        _say(wanted, recipe, machine, extra, plan, as_json=options.as_json)
        return
    note = engine.check(recipe, allow_stock=options.allow_stock)
    _measure(options, recipe, engine, machine, extra, wanted, plan, note)


def _measure(
    options: Options,
    recipe: Recipe,
    engine: Engine,
    machine: Hardware,
    extra: Flags,
    wanted: list[Setup],
    plan: session.Plan,
    note: str,
) -> None:
    host = fingerprint.take()
    drafting = wanted[-1].command(recipe, machine, os.environ, commands.DEFAULT_PORT, extra)
    version, launch = engine.installation.version or "", of_flags(drafting.flags)
    result = rounds.Result(host, recipe.id, version, machine.device, launch)
    place = options.path or probes.place("round", host.key, recipe.id, machine.device)
    probes.try_out(place)
    log = (options.log or server.default_log(f"probe-{recipe.id}", 0)).absolute()
    left = session.Pace(len(wanted), len(wanted) * len(plan.batches)).says()
    err.print(f"{host.title}; servers to start: {len(wanted)}; {left} when a start takes 90 s", markup=False)
    err.print(f"log: {log}", markup=False)
    if note:
        err.print(f"warning: {note}", style="yellow", markup=False)
    probe = Probe(result, recipe.id, fingerprint.look(), engine_record(engine.installation), place)
    with _probing(probe, result, options), progress() as tell:
        session.start_all(
            wanted, recipe, engine, machine, plan, result, extra=extra, log=log, tell=tell, keep=_keeper(place)
        )


@contextmanager
def _probing(probe: Probe, result: Result, options: Options) -> Iterator[None]:
    """Show and record what is measured meanwhile.

    :raises RoundFitError: it is no cost of a round.
    """
    end_like_ctrl_c(signal.SIGTERM)  # the engine is ended then, and the ledger told
    with probing(probe):
        try:
            yield
        except OutputError:
            _show(result, as_json=options.as_json)  # at least
            raise
        _show(result, as_json=options.as_json)
        if probe.kept == probe.place:
            err.print(f"stored: {probe.place}", markup=False)
        if error := result.error():
            raise error


def _keeper(place: Path) -> Callable[[Result], None]:
    """Return what stores a result; one that may not be believed leaves an earlier one in its place."""
    return lambda found: probes.store(place, found.as_json(), whole=found.complete and found.error() is None)


def _flags(tokens: tuple[str, ...]) -> Flags:
    try:
        return flags.parse(tokens)
    except NotAFlagError as error:
        raise click.UsageError(f"{error.token!r} is no engine flag; they stand behind '--'.") from error


def _has_goodput(engine: Engine) -> bool:
    """Tell whether the engine's off state can be plain decoding."""
    folder = engine.installation.location
    return folder is not None and (folder / "sglang/srt/speculative/goodput_params.py").is_file()


def _say(
    wanted: list[Setup], recipe: Recipe, machine: Hardware, extra: Flags, plan: session.Plan, *, as_json: bool
) -> None:
    lines = [
        (setup.title, setup.command(recipe, machine, os.environ, commands.DEFAULT_PORT, extra).pasteable())
        for setup in wanted
    ]
    if as_json:
        print_json({"batches": plan.batches, "servers": [{"title": title, "command": line} for title, line in lines]})
        return
    for title, line in lines:
        out.print(f"# {title}, batch {_numbers(plan.batches)}\n{line}", markup=False)


def _numbers(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _show(result: Result, *, as_json: bool) -> None:
    if as_json:
        print_json(result.as_json())
        return
    table = [["batch", "steps", "T_dec ms", "T_round ms", "R = break-even", "spread", "off line", "accept lengths", ""]]
    for line in sorted(result.lines(), key=lambda line: (line.batch, line.steps)):
        table.append(_row(result, line))
    measured = {line.batch for line in result.lines()}
    for batch, point in sorted(result.plain.items()):
        if batch not in measured:
            numbers = [str(batch), "-", f"{1e3 * point.seconds:.2f}", "-", "-", f"{100 * point.spread:.0f} %"]
            table.append([*numbers, "-", "-", "plain decoding only"])
    print_table(table, left=(8,))
    out.print(
        f"prompts of at most {result.context} tokens; break-even: the accept length that R has to be paid with",
        markup=False,
    )
    if result.noisy():
        out.print(
            f"repeats differ by more than {100 * rounds.NOISY:.0f} %: something else used the machine; R is no more "
            "exact than they are; more --rounds and --repeats help",
            markup=False,
        )
    if any(line.simulated for line in result.lines()):
        out.print(f"simulated: {rounds.COLD_DRAFT}", markup=False)


def _row(result: Result, line: Line) -> list[str]:
    plain, ratio = result.plain.get(line.batch), result.ratio(line)
    never = " never pays" if ratio is not None and line.steps and ratio >= line.steps + 1 else ""
    origin = "simulated" if line.simulated else "as served"
    return [
        str(line.batch),
        str(line.steps),
        f"{1e3 * plain.seconds:.2f}" if plain else "-",
        f"{1e3 * line.seconds:.2f}",
        f"{ratio:.2f}" if ratio is not None else "-",
        f"{100 * result.spread(line):.0f} %",
        f"{100 * line.residual:.1f} %" if line.residual is not None else "-",
        ", ".join(f"{point.accept_length:.2f}" for point in line.points),
        origin + never,
    ]
