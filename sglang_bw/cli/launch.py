"""``serve``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglang_bw.cli import completion, host_checks, planning, refusals
from sglang_bw.cli.console import err, out, print_json
from sglang_bw.cli.journal import Journal
from sglang_bw.cli.options import ALLOW_STOCK, DEVICE, ENGINE_PYTHON, ENGINE_TREE, STARTUP_TIMEOUT
from sglang_bw.cli.refusals import Launch
from sglang_bw.cli.startup_line import StartupLine, spent
from sglang_bw.errors import EngineOutputError
from sglang_bw.host import fingerprint
from sglang_bw.host.gpus import parts
from sglang_bw.launch import command as commands
from sglang_bw.launch import device as devices
from sglang_bw.launch import engine as engines
from sglang_bw.launch import port as ports
from sglang_bw.launch import preflight, selection, server, warmup, weights
from sglang_bw.launch.command import Command
from sglang_bw.launch.engine import Engine
from sglang_bw.launch.journal import Attempt
from sglang_bw.launch.process import SignalRelay, shell_code
from sglang_bw.launch.server import Server
from sglang_bw.recipes import flags
from sglang_bw.recipes.flags import Flags
from sglang_bw.recipes.schema import DEVICES, Device, Hardware, Recipe

if TYPE_CHECKING:
    from sglang_bw.plan.speculation import Cell


class _ServeCommand(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hint = " Engine flags go behind '--': sglang-bw serve tiny -- --max-running-requests 4."
            raise click.UsageError(error.format_message() + hint, ctx=ctx) from error


def _not_empty(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    if value == "":  # as a path it would be the working directory
        raise click.BadParameter("it is empty.")
    return value


@click.command(cls=_ServeCommand, short_help="Start an EAGLE-3 server with one command.")
@click.argument("name", metavar="RECIPE|FILE.yaml|MODEL", callback=_not_empty, shell_complete=completion.recipes)
@click.argument("engine_flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- ENGINE FLAGS]")
@click.option(
    "--draft",
    "--draft-path",
    "draft",
    metavar="PATH|ID",
    callback=_not_empty,
    help="Draft of a model, or in place of the recipe's.",
)
@click.option("--model-path", metavar="PATH|ID", callback=_not_empty, help="Target weights in place of the recipe's.")
@click.option("--no-spec", is_flag=True, help="The baseline: the same recipe without speculation.")
@DEVICE
@click.option("--host", default=commands.DEFAULT_HOST, show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), default=commands.DEFAULT_PORT, show_default=True)
@click.option(
    "--gpus", metavar="0-3", callback=_not_empty, help="Use these only: numbers as in nvidia-smi, ranges, UUIDs."
)
@click.option("--force", "--yes", "force", is_flag=True, help="Go on where the plan, or a check of this host, refuses.")
@click.option("--dry-run", is_flag=True, help="Print the `sglang serve` line and its environment, start nothing.")
@ALLOW_STOCK
@click.option("--log", type=click.Path(dir_okay=False, path_type=Path), help="Where the engine's log goes.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line: ready, warm-up, exit.")
@click.option("--no-warmup", is_flag=True, help="Skip the requests that measure accept length and tok/s.")
@click.option("--strict", is_flag=True, help="Stop with exit code 35 when the warm-up's output is broken.")
@STARTUP_TIMEOUT
@ENGINE_PYTHON
@ENGINE_TREE
def serve(
    name: str,
    engine_flags: tuple[str, ...],
    draft: str | None,
    model_path: str | None,
    no_spec: bool,
    device: str,
    host: str,
    port: int,
    gpus: str | None,
    force: bool,
    dry_run: bool,
    allow_stock: bool,
    log: Path | None,
    as_json: bool,
    no_warmup: bool,
    strict: bool,
    startup_timeout: float,
    python: Path | None,
    engine_tree: Path | None,
) -> int:
    """Start the patched engine with EAGLE-3 and show its URL when it answers.

    The first argument is a recipe (`sglang-bw recipes list`), a recipe file, or a model id or path together with
    --draft. Engine flags behind `--` win over the recipe.

    SIGINT, SIGTERM and SIGHUP are passed on to the engine, a second one kills it. Ends with the engine's exit code;
    128 + N when signal N ended it, also when it was interrupted while loading.
    """
    extra = _parse(engine_flags)
    recipe = selection.select(name, model=model_path, draft=draft)
    if not (recipe.spec or no_spec or flags.has(extra, "speculative-algorithm")) and selection.is_model(name):
        raise click.UsageError("a model needs its draft: --draft PATH|ID; or --no-spec for plain decoding.")
    engine = engines.find(python, engine_tree)
    chosen = _device(device, extra, engine)
    environ = engine.environment()
    here = host_checks.gpus(chosen, gpus, look=not dry_run)
    visible = gpus or environ.get("CUDA_VISIBLE_DEVICES")
    machine = planning.machine(recipe, chosen, here, visible)
    version = engine.installation.version
    extra, told = planning.divided(name, extra, len(parts(gpus)) if gpus else 1)
    if told:
        err.print(f"note: {told}", markup=False)
    command = commands.build(
        recipe, machine, environ, host=host, port=port, speculate=not no_spec, extra=extra, version=version
    )
    if gpus:
        command = replace(command, env={**command.env, **preflight.visible(gpus, here)})
    if dry_run:
        if problem := refusals.only_for_gpus(recipe, command):
            err.print(f"note: {problem.message}; --device cuda prints the line for GPUs", style="yellow", markup=False)
        _print_dry_run(command, engine, as_json=as_json)
        return 0
    note = engine.check(recipe, allow_stock=allow_stock, force=force)
    weights.check_command(command)
    ports.check_free(command.host, command.port)
    planned = refusals.check(Launch(recipe, command, engine, planning.seen(here, visible)), force=force)
    may_leave_out = recipe.baseline_where_it_loses and not (no_spec or flags.has(extra, "speculative-algorithm"))
    if may_leave_out and (cell := refusals.loses(planned, recipe)):
        command = _baseline(recipe, command, machine, environ, extra, version)
        _say_baseline(cell)

    console = _Console(as_json=as_json)
    host_checks.check(command, here, engine, environ, force=force)
    log_path = (log or server.default_log(recipe.id, command.port)).absolute()
    console.begin(recipe, command, engine, log_path, note)
    journal = Journal(Attempt(recipe.id, command, engine.installation, fingerprint.look()))
    journal.announce()
    full_environ = devices.environment(chosen, {**environ, **command.env})
    with SignalRelay() as relay:
        running = server.start(command, command.argv(engine.python), full_environ, log_path, relay)
        with StartupLine(err) as line, journal.watching(running):
            running.await_ready(startup_timeout, line.update)
        console.ready(running)
        report = None if no_warmup else _warm_up(running, recipe, console)
        journal.started(running, report)
        if strict and report and report.broken:
            running.process.kill()
            running.process.wait()
            raise EngineOutputError(report.warnings[0], hint=f"Full log: {running.process.log}")
        code = running.process.wait() or 0
    console.end(running, code)
    journal.ended(running, code)
    return shell_code(code)


def _baseline(
    recipe: Recipe, command: Command, machine: Hardware, environ: Mapping[str, str], extra: Flags, version: str
) -> Command:
    """Return the same launch without speculation."""
    plain = commands.build(
        recipe, machine, environ, host=command.host, port=command.port, speculate=False, extra=extra, version=version
    )
    return replace(plain, env={**plain.env, **command.env})


def _say_baseline(cell: Cell) -> None:
    if cell.speedup and cell.break_even:
        err.print(
            f"speculation is left out: at {cell.context:,} tokens and {cell.concurrency} at once it would give "
            f"{cell.speedup.mid:.2f} of the plain speed (accept length {cell.accept_length.mid:.2f}, "
            f"{cell.break_even.mid:.2f} needed); `-- --speculative-algorithm EAGLE3` keeps it",
            markup=False,
        )


def _parse(tokens: tuple[str, ...]) -> Flags:
    try:
        return flags.parse(tokens)
    except flags.NotAFlagError as error:
        raise click.UsageError(
            f"{error.token!r} is no engine flag; one recipe or model, then options, then engine flags behind '--'."
        ) from error


def _device(wish: str, extra: Flags, engine: Engine) -> Device:
    wish = flags.value(extra, "device") or wish
    if wish == "auto":
        return devices.detect(engine_has_gpu_kernels=engine.has_gpu_kernels)
    if wish not in DEVICES:
        raise click.UsageError(f"the device {wish!r} is not known here: {' or '.join(DEVICES)}.")
    return wish


def _print_dry_run(command: Command, engine: Engine, *, as_json: bool) -> None:
    if engine.tree:
        command = replace(command, env={**command.env, "PYTHONPATH": str(engine.tree)})
    if as_json:
        print_json(
            {
                "argv": ["sglang", "serve", *flags.tokens(command.flags)],
                "env": dict(command.env),
                "url": command.url,
                "engine": engine.installation.as_json(),
            }
        )
    else:
        click.echo(command.pasteable())
    if problem := engine.installation.error():
        click.echo(f"note: {problem.message}", err=True)
        click.echo(f"hint: {problem.hint}", err=True)


def _warm_up(running: Server, recipe: Recipe, console: _Console) -> warmup.Report | None:
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


class _Console:
    """What `serve` says: sentences for people, or one JSON object a line."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def begin(self, recipe: Recipe, command: Command, engine: Engine, log: Path, note: str) -> None:
        spec = "no speculation"
        if command.speculates:
            names = ("algorithm", "num-steps", "eagle-topk", "num-draft-tokens")
            algorithm, steps, topk, tokens = (flags.value(command.flags, f"speculative-{n}", "auto") for n in names)
            spec = f"{algorithm}, {steps} steps, topk {topk}, {tokens} draft tokens"
        err.print(f"{recipe.id}: sglang {engine.installation.version}, {command.device}, {spec}", markup=False)
        err.print(f"log: {log}", markup=False)
        if note:
            err.print(f"warning: {note}", style="yellow", markup=False)

    def ready(self, running: Server) -> None:
        startup = running.startup
        if self.as_json:
            seconds = {phase.value: round(value, 2) for phase, value in startup.seconds.items()}
            self._line(
                event="ready",
                url=running.command.url,
                pid=running.process.pid,
                log=str(running.process.log),
                seconds=seconds,
            )
            return
        out.print(f"ready in {startup.elapsed():.1f} s ({spent(startup)})", markup=False)
        out.print(f"{running.command.url}  (OpenAI API below /v1; Ctrl-C stops it)", markup=False)

    def warmed_up(self, report: warmup.Report) -> None:
        if self.as_json:
            self._line(
                event="warm-up",
                accept_length=report.accept_length,
                tokens_per_second=round(report.tokens_per_second, 2),
                broken=report.broken,
                warnings=list(report.warnings),
            )
            return
        length = f"accept length {report.accept_length:.2f}, " if report.accept_length is not None else ""
        out.print(f"warm-up: {length}{report.tokens_per_second:.1f} tok/s (one request at a time)", markup=False)
        for text in report.warnings:
            self.warn(text)

    def warn(self, text: str) -> None:
        err.print(f"warning: {text}", style="yellow", markup=False)

    def end(self, running: Server, code: int) -> None:
        if self.as_json:
            self._line(event="exit", code=shell_code(code))
        if code != 0 and not running.relay.received:
            err.print(f"error: the engine ended with exit code {shell_code(code)}: {running.death()}", markup=False)
            err.print(f"hint: Full log: {running.process.log}", markup=False)

    @staticmethod
    def _line(**fields: Any) -> None:
        click.echo(json.dumps(fields))
