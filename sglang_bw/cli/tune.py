"""``tune``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import platformdirs
from rich.markup import escape
from rich.table import Table

from sglang_bw.cli import completion
from sglang_bw.cli.console import err, out, print_json
from sglang_bw.cli.options import ALLOW_STOCK, DEVICE, ENGINE_PYTHON, ENGINE_TREE
from sglang_bw.errors import BwError, OutputError, TuneError
from sglang_bw.launch import command as commands
from sglang_bw.launch import device as devices
from sglang_bw.launch import engine as engines
from sglang_bw.launch import port as ports
from sglang_bw.launch import selection, weights
from sglang_bw.launch.command import DEFAULT_HOST, Command
from sglang_bw.launch.engine import Engine
from sglang_bw.ledger.store import Ledger
from sglang_bw.recipes.hardware import Device, Hardware
from sglang_bw.recipes.schema import Recipe

if TYPE_CHECKING:
    from sglang_bw.experiment.space import Choice, Space
    from sglang_bw.experiment.tune import Tried
    from sglang_bw.launch.startup import Phase, Startup

_FIRST_PORT = 30100
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


class Duration(click.ParamType[float]):
    """``90s``, ``30m``, ``2h``; a bare number is seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(value).strip())
        if not match:
            self.fail(f"{value!r} is no time; write for example 90s, 30m or 2h.", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


class _Numbers(click.ParamType[tuple[int, ...]]):
    name = "1,4,16"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is no list of numbers; write for example 1,4,16.", param, ctx)
        return tuple(sorted({int(part) for part in parts}))


@click.command(short_help="Search for the settings of a recipe that serve fastest here.")
@click.argument("name", metavar="RECIPE|FILE.yaml|MODEL", shell_complete=completion.recipes)
@click.option("--draft", metavar="PATH|ID", help="Draft of a model, or in place of the recipe's.")
@click.option(
    "--space", "wanted", multiple=True, metavar="KEY=V1,V2", help="Search this setting; without any, the usual ones."
)
@click.option("--metric", type=click.Choice(["tok/s", "goodput"]), default="tok/s", show_default=True)
@click.option("--ttft", type=float, metavar="SECONDS", help="Limit of a good request: time to first token.")
@click.option("--tpot", type=float, metavar="SECONDS", help="Limit of a good request: time per output token.")
@click.option("--budget", type=Duration(), default="2h", show_default=True, help="No trial begins after this.")
@click.option(
    "--trial-budget", type=Duration(), default="15m", show_default=True, help="Longest measurement of one trial."
)
@click.option("--trials", type=click.IntRange(min=1), default=64, show_default=True, help="At most so many.")
@click.option(
    "--within", type=click.FloatRange(0.001, 0.5), default=0.03, show_default=True, help="Half-width of an interval."
)
@click.option("--concurrency", type=_Numbers(), default="1", show_default=True)
@click.option("--prompts", default="chat", show_default=True, metavar="FILE|SET", shell_complete=completion.prompts)
@click.option("--count", type=click.IntRange(min=1), help="Use the first prompts only.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=128, show_default=True)
@DEVICE
@click.option(
    "--together/--one-at-a-time", "together", default=None, help="Both servers at once; the default on a CPU."
)
@click.option("--study", metavar="NAME", help="Name of the search; the same search goes on under its own name.")
@click.option("--retry", is_flag=True, help="Start again what has failed on this host before.")
@ALLOW_STOCK
@ENGINE_PYTHON
@ENGINE_TREE
@click.option("--startup-timeout", type=Duration(), default="30m", show_default=True)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="The recipe file that is written."
)
@click.option("--dry-run", is_flag=True, help="Say what would be searched, start nothing.")
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")
def tune(name: str, draft: str | None, **options: Any) -> int:
    """Search for settings that serve faster than the recipe as it is, each compared with it in alternating blocks.

    What the plan refuses, and what has failed on this host before, is not started; a failed start is a result. Ctrl-C
    ends it, and the same command goes on where it stopped. It ends with a recipe file and a table of what was tried.
    """
    from sglang_bw.experiment import space as spaces

    recipe = selection.select(name, draft=draft)
    engine = engines.find(options["python"], options["engine_tree"])
    launcher = _Launcher(recipe, engine, options["device"])
    own = launcher.build({}, _FIRST_PORT)
    usual = spaces.usual(own.flags, has_gpus=launcher.device == "cuda")
    space = spaces.Space(tuple(map(spaces.parse, options["wanted"]))) if options["wanted"] else usual
    spaces.check(space, ())
    if options["metric"] == "goodput" and options["ttft"] is None and options["tpot"] is None:
        raise click.UsageError("--metric goodput needs a limit: --ttft or --tpot.")
    if options["dry_run"]:
        _print_plan(space, launcher, as_json=options["as_json"])
        return 0
    engine.check(recipe, allow_stock=options["allow_stock"])
    weights.check_command(own)
    return _search(recipe, launcher, space, options)


class _Launcher:
    """From a choice to a command, and to what the plan says of it."""

    def __init__(self, recipe: Recipe, engine: Engine, wish: str) -> None:
        from sglang_bw.cli import planning
        from sglang_bw.host import nvml

        self.recipe, self.engine = recipe, engine
        self.device: Device = (
            devices.detect(engine_has_gpu_kernels=engine.has_gpu_kernels) if wish == "auto" else _device(wish)
        )
        here = nvml.read(nvml.load()) if self.device == "cuda" else None
        self.machine: Hardware = planning.machine(recipe, self.device, here)
        self.seen = planning.seen(here)
        self.environ = engine.environment()

    def build(self, choice: Choice, port: int) -> Command:
        from sglang_bw.experiment import space as spaces

        version = self.engine.installation.version
        plain = commands.build(self.recipe, self.machine, self.environ, host=DEFAULT_HOST, port=port, version=version)
        extra, speculates = spaces.flags_of(choice, plain.flags)
        return commands.build(
            self.recipe, self.machine, self.environ,
            host=DEFAULT_HOST, port=port, speculate=speculates, extra=extra, version=version,
        )  # fmt: skip

    def forbids(self, command: Command) -> str:
        from sglang_bw.cli import refusals

        try:
            refusals.check(refusals.Launch(self.recipe, command, self.engine, self.seen), force=False)
        except BwError as error:
            return error.message
        return ""


def _device(wish: str) -> Device:
    return "cuda" if wish == "cuda" else "cpu"


def _search(recipe: Recipe, launcher: _Launcher, space: Space, options: dict[str, Any]) -> int:
    from sglang_bw.experiment import prompts, tuned
    from sglang_bw.experiment import tune as tuning
    from sglang_bw.experiment.ab import Settings
    from sglang_bw.experiment.bench import ServerBench
    from sglang_bw.experiment.client import Sampling
    from sglang_bw.experiment.verdict import Limits
    from sglang_bw.host import fingerprint

    host = fingerprint.look()
    limits = Limits(ttft_s=options["ttft"], tpot_s=options["tpot"])
    study = options["study"] or f"{recipe.id}-{host.fingerprint[:6]}-{_digest(space, options)}"
    first = ports.next_free(DEFAULT_HOST, _FIRST_PORT) or _FIRST_PORT
    second = ports.next_free(DEFAULT_HOST, first) or first + 1
    settings = Settings(
        prompts=prompts.load(options["prompts"]).first(options["count"]),
        sampling=Sampling(max_tokens=options["max_tokens"]),
        concurrencies=options["concurrency"],
        within=options["within"],
        budget_s=options["trial_budget"],
        limits=limits,
    )
    together = launcher.device == "cpu" if options["together"] is None else options["together"]
    with Ledger() as ledger:
        bench = ServerBench(
            recipe.id, launcher.engine, host, ledger, launcher.build, launcher.forbids, settings, (first, second),
            platformdirs.user_state_path("sglang-bw") / "tune" / study, options["startup_timeout"], _say_start,
            _Progress(), together, options["retry"],
        )  # fmt: skip
        search = tuning.Tuning(
            study, space, bench, ledger, options["metric"], limits, options["within"], options["budget"],
            options["trials"], lambda one, count: _tell(one, count, min(space.size - 1, options["trials"])),
        )  # fmt: skip
        err.print(f"study {study}: {space.size} combinations; Ctrl-C stops, the same command goes on", markup=False)
        try:
            tried = search.run()
        except KeyboardInterrupt:
            err.print(f"stopped after {len(search.tried)} trials; the same command goes on", markup=False)
            tried, stopped = tuning.ranked(search.tried.values()), True
        else:
            stopped = False
        finally:
            bench.close()
        winner = tuning.best(tried)
        run = ledger.run(ledger.find(winner.entry)) if winner else None
    _print_result(study, tried, winner, as_json=options["as_json"])
    if winner and run:
        output = options["output"] or Path(f"{recipe.id}-tuned.yaml")
        _write(output, tuned.text(tuned.recipe(recipe, winner, tried, run, launcher.device), study))
        err.print(f"written: {output}; `sglang-bw serve {output}` serves it", markup=False)
    if not stopped and tried and not any(one.score for one in tried):
        raise TuneError(
            "none of the choices could be measured", hint=f"`sglang-bw ledger list --study {study}` says why."
        )
    return 130 if stopped else 0


def _digest(space: Space, options: dict[str, Any]) -> str:
    from sglang_bw.experiment.space import Setting

    names = ("metric", "ttft", "tpot", "concurrency", "prompts", "count", "max_tokens", "within")
    more = tuple(Setting(name, (str(options[name]),)) for name in names)
    return replace(space, settings=(*space.settings, *more)).digest


class _Progress:
    """Tells of blocks and rounds on one line of a terminal; elsewhere of rounds only."""

    def __init__(self) -> None:
        self._block = ""

    def block(self, name: str, round_number: int, concurrency: int, total: int) -> None:
        kind = "warm-up" if round_number < 0 else f"round {round_number + 1}"
        self._block = f"  {kind}, {name}, concurrency {concurrency}: {{}}/{total}"

    def answered(self, count: int) -> None:
        if err.is_terminal:
            err.print(self._block.format(count), end="\r", markup=False)

    def round_over(self, rounds: int, ratios: Sequence[tuple[int, float, float]]) -> None:
        found = ", ".join(f"{ratio:.3f} +-{half:.3f} at {concurrency}" for concurrency, ratio, half in ratios)
        if found:
            err.print(f"  round {rounds}: {found}", markup=False)


def _say_start(name: str, _startup: Startup, begun: list[Phase]) -> None:
    for phase in begun:
        err.print(f"  {name}: {phase.value}", markup=False)


def _tell(one: Tried, count: int, most: int) -> None:
    from sglang_bw.experiment import space as spaces

    score = (
        f"{one.score.value:.3f} [{one.score.low:.3f}, {one.score.high:.3f}]"
        if one.score
        else f"{one.result}: {one.why}"
    )
    err.print(f"{count}/{most}  {spaces.says(one.choice)}: {score}", markup=False)


def _print_plan(space: Space, launcher: _Launcher, *, as_json: bool) -> None:
    from sglang_bw.experiment import space as spaces

    refused = {}
    for choice in space.neighbours():
        if problem := launcher.forbids(launcher.build(choice, _FIRST_PORT)):
            refused[spaces.says(choice)] = problem
    if as_json:
        settings = {setting.name: list(setting.values) for setting in space.settings}
        print_json({"settings": settings, "combinations": space.size, "refused": refused})
        return
    for setting in space.settings:
        out.print(f"{setting.name}: {', '.join(setting.values)}", markup=False)
    out.print(f"{space.size} combinations", markup=False)
    for choice_says, problem in refused.items():
        out.print(f"refused by the plan: {choice_says}: {problem.splitlines()[-1].strip()}", markup=False)


def _print_result(study: str, tried: Sequence[Tried], winner: Tried | None, *, as_json: bool) -> None:
    from sglang_bw.experiment import space as spaces

    if as_json:
        print_json(
            {"study": study, "best": asdict(winner) if winner else None, "tried": [asdict(one) for one in tried]}
        )
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("settings", "speed over the recipe", "result", "why", "entry"):
        table.add_column(column, overflow="fold")
    for one in tried:
        score = f"{one.score.value:.3f} [{one.score.low:.3f}, {one.score.high:.3f}]" if one.score else ""
        why = "" if one.score else one.why[:160]
        table.add_row(*map(escape, (spaces.says(one.choice), score, one.result, why, one.entry)))
    out.print(table)
    words = (
        f"best: {spaces.says(winner.choice)}" if winner else "nothing is faster than the recipe as it is beyond chance"
    )
    out.print(words, markup=False)


def _write(output: Path, text: str) -> None:
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror}", hint="Name another file: -o FILE.") from error
