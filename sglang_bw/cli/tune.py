"""``tune``."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import platformdirs

from sglang_bw.cli import completion
from sglang_bw.cli.console import err
from sglang_bw.cli.interrupt import end_like_ctrl_c
from sglang_bw.cli.journal import Journal
from sglang_bw.cli.options import ALLOW_STOCK, DEVICE, ENGINE_PYTHON, ENGINE_TREE
from sglang_bw.cli.typed import Typed
from sglang_bw.cli.types import LIMIT, Duration, Numbers, Share
from sglang_bw.errors import BwError, OutputError, TuneError
from sglang_bw.launch import command as commands
from sglang_bw.launch import device as devices
from sglang_bw.launch import engine as engines
from sglang_bw.launch import port as ports
from sglang_bw.launch import remote_code, selection, weights
from sglang_bw.launch.command import DEFAULT_HOST, Command
from sglang_bw.launch.engine import Engine
from sglang_bw.launch.journal import Attempt, launch_digest
from sglang_bw.ledger.store import Ledger
from sglang_bw.recipes import lookup
from sglang_bw.recipes.hardware import Device, Hardware
from sglang_bw.recipes.schema import Recipe

if TYPE_CHECKING:
    from sglang_bw.experiment.space import Choice, Space

_FIRST_PORT = 30100


@click.command(short_help="Search for the settings of a recipe that serve fastest here.")
@click.argument("name", metavar="RECIPE|FILE.yaml|MODEL", shell_complete=completion.recipes)
@click.option("--draft", metavar="PATH|ID", help="Draft of a model, or in place of the recipe's.")
@click.option(
    "--space", "wanted", multiple=True, metavar="KEY=V1,V2", help="Search this setting; without any, the usual ones."
)
@click.option("--metric", type=click.Choice(["tok/s", "goodput"]), default="tok/s", show_default=True)
@click.option("--ttft", type=LIMIT, metavar="SECONDS", help="Limit of a good request: time to first token.")
@click.option("--tpot", type=LIMIT, metavar="SECONDS", help="Limit of a good request: time per output token.")
@click.option("--budget", type=Duration(), default="2h", show_default=True, help="No trial begins after this.")
@click.option(
    "--trial-budget", type=Duration(), default="15m", show_default=True, help="Longest measurement of one trial."
)
@click.option("--trials", type=click.IntRange(min=1), default=64, show_default=True, help="At most so many.")
@click.option("--within", type=Share(), default="3%", show_default=True, help="Half-width of an interval.")
@click.option("--concurrency", type=Numbers(), default="1", show_default=True)
@click.option("--prompts", default="chat", show_default=True, metavar="FILE|SET", shell_complete=completion.prompts)
@click.option("--count", type=click.IntRange(min=1), help="Use the first prompts only.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=128, show_default=True)
@DEVICE
@click.option(
    "--together/--one-at-a-time", "together", default=None, help="Both servers at once; the default on a CPU."
)
@click.option("--study", metavar="NAME", help="Name of the search; the same search goes on under its own name.")
@click.option("--retry", is_flag=True, help="Start again what has failed on this host before.")
@click.option("--force", is_flag=True, help="Go on where a check of this host refuses.")
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
    from sglang_bw.cli import host_checks
    from sglang_bw.cli import tune_view as view
    from sglang_bw.experiment import space as spaces

    recipe = selection.select(name, draft=draft)
    engine = engines.find(options["python"], options["engine_tree"])
    launcher = _Launcher(recipe, engine, options["device"])
    own = launcher.build({}, _FIRST_PORT)
    usual = spaces.usual(own.flags, has_gpus=launcher.device == "cuda")
    space = spaces.Space(tuple(map(spaces.parse, options["wanted"]))) if options["wanted"] else usual
    spaces.check(space, ())
    study = options["study"]
    if study is not None and (study in ("", ".", "..") or "/" in study or not study.isprintable()):
        raise click.UsageError(f"{study!r} is no name of a study: it names a folder, too.")
    if options["metric"] == "goodput" and options["ttft"] is None and options["tpot"] is None:
        raise click.UsageError("--metric goodput needs a limit: --ttft or --tpot.")
    if options["dry_run"]:
        view.print_plan(space, launcher.refused(space), as_json=options["as_json"])
        return 0
    output = options["output"] or Path(f"{recipe.id}-tuned.yaml")
    if output.suffix not in lookup.SUFFIXES:
        raise click.UsageError(f"-o {output}: the name of a recipe file ends in {' or '.join(lookup.SUFFIXES)}.")
    if not os.access(output.absolute().parent, os.W_OK):  # it is written after hours
        raise OutputError(f"cannot write {output}: no folder to write to", hint="Name another file: -o FILE.")
    engine.check(recipe, allow_stock=options["allow_stock"])
    weights.check_command(own)
    typed = Typed(name, draft=draft, python=options["python"], tree=options["engine_tree"])
    if problem := launcher.forbids(own):  # a choice that the plan refuses is a result, the recipe as it is none
        raise TuneError(
            f"the plan refuses the recipe as it is: {problem}", hint=f"`{typed.plan(launcher.seen)}` shows it all."
        )
    remote_code.demand(own, launcher.environ)
    host_checks.check(own, launcher.here, engine, launcher.environ, force=options["force"])
    end_like_ctrl_c(signal.SIGTERM, signal.SIGHUP)
    return _search(recipe, launcher, space, {**options, "output": output})


class _Launcher:
    """From a choice to a command, and to what the plan says of it."""

    def __init__(self, recipe: Recipe, engine: Engine, wish: str) -> None:
        from sglang_bw.cli import planning
        from sglang_bw.host import nvml

        self.recipe, self.engine = recipe, engine
        self.device: Device = (
            devices.detect(engine_has_gpu_kernels=engine.has_gpu_kernels) if wish == "auto" else _device(wish)
        )
        self.here = nvml.read(nvml.load()) if self.device == "cuda" else None
        self.machine: Hardware = planning.machine(recipe, self.device, self.here)
        self.seen = planning.seen(self.here)
        self.environ = engine.environment()

    def build(self, choice: Choice, port: int) -> Command:
        from sglang_bw.experiment import space as spaces

        version = self.engine.installation.version
        plain = commands.build(self.recipe, self.machine, self.environ, host=DEFAULT_HOST, port=port, version=version)
        extra, speculates = spaces.flags_of(choice, plain.flags)
        made = commands.build(
            self.recipe, self.machine, self.environ,
            host=DEFAULT_HOST, port=port, speculate=speculates, extra=extra, version=version,
        )  # fmt: skip
        return remote_code.with_records(made)

    def forbids(self, command: Command) -> str:
        from sglang_bw.cli import planning, refusals

        try:
            launch = refusals.Launch(self.recipe, command, planning.planned(self.engine), self.seen, self.environ)
            refusals.check(launch, force=False)
        except BwError as error:
            return error.message
        return ""

    def refused(self, space: Space) -> dict[str, str]:
        """Return which single changes the plan would not start, and why."""
        from sglang_bw.experiment import space as spaces

        found = {spaces.says(one): self.forbids(self.build(one, _FIRST_PORT)) for one in space.neighbours()}
        return {says: problem for says, problem in found.items() if problem}


def _device(wish: str) -> Device:
    return "cuda" if wish == "cuda" else "cpu"


def _search(recipe: Recipe, launcher: _Launcher, space: Space, options: dict[str, Any]) -> int:
    from sglang_bw.cli import tune_view as view
    from sglang_bw.experiment import prompts, tuned
    from sglang_bw.experiment import tune as tuning
    from sglang_bw.experiment.bench import ServerBench
    from sglang_bw.experiment.client import Sampling
    from sglang_bw.experiment.settings import Settings
    from sglang_bw.experiment.verdict import Limits
    from sglang_bw.host import fingerprint

    host = fingerprint.look()
    limits = Limits(ttft_s=options["ttft"], tpot_s=options["tpot"])
    asked = prompts.load(options["prompts"]).first(options["count"])
    own = launcher.build({}, _FIRST_PORT)
    launch = launch_digest(launcher.engine.installation, own)
    Journal(Attempt(recipe.id, own, launcher.engine.installation, host)).announce()
    identity = _digest(options, launch, asked.digest, host.fingerprint)
    study = options["study"] or f"{recipe.id}-{space.digest}-{identity}"
    first = ports.next_free(DEFAULT_HOST, _FIRST_PORT) or _FIRST_PORT
    second = ports.next_free(DEFAULT_HOST, first) or first + 1
    settings = Settings(
        prompts=asked,
        sampling=Sampling(max_tokens=options["max_tokens"]),
        concurrencies=options["concurrency"],
        within=options["within"],
        budget_s=options["trial_budget"],
        limits=limits,
    )
    if own.speculates:
        settings.refuse_noise("A")
    together = launcher.device == "cpu" if options["together"] is None else options["together"]
    with Ledger() as ledger:
        bench = ServerBench(
            recipe.id, launcher.engine, host, ledger, launcher.build, launcher.forbids, settings, (first, second),
            platformdirs.user_state_path("sglang-bw") / "tune" / study, options["startup_timeout"], view.say_start,
            view.TuneProgress(), together, options["retry"],
        )  # fmt: skip
        search = tuning.Tuning(
            study, space, bench, ledger, options["metric"], limits, options["within"], options["budget"],
            options["trials"], lambda one, count: view.say_trial(one, count, min(space.size - 1, options["trials"])),
            identity,
        )  # fmt: skip
        view.say_study(study, space)
        try:
            tried = search.run()
        except KeyboardInterrupt:
            view.say_stopped(len(search.tried))
            tried, stopped = tuning.ranked(search.tried.values()), True
        else:
            stopped = False
        finally:
            bench.close()
        winner = tuning.best(tried)
        run = ledger.run(ledger.find(winner.entry)) if winner else None
    view.print_result(study, tried, winner, as_json=options["as_json"])
    if winner and run:
        output = options["output"]
        _write(output, tuned.text(tuned.recipe(recipe, winner, tried, run, launcher.device), study))
        err.print(f"written: {output}; `sglang-bw serve {shlex.quote(str(output))}` serves it", markup=False)
    if not stopped and tried and not any(one.score for one in tried):
        raise TuneError(
            "none of the choices could be measured",
            hint=f"`sglang-bw ledger list --study {shlex.quote(study)}` says why.",
        )
    return 130 if stopped else 0


def _digest(options: dict[str, Any], *more: str) -> str:
    """Return the same for the same search in the same space.

    :param more: digests of what is not in the options: the launch with its engine, the prompts, the host.
    """
    names = ("metric", "ttft", "tpot", "concurrency", "max_tokens", "within")
    content = [*more, *(str(options[name]) for name in names)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def _write(output: Path, text: str) -> None:
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror}", hint="Name another file: -o FILE.") from error
