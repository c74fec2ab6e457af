"""The part of `ab` that makes two arms of what was asked, and measures them."""

from __future__ import annotations

import re
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import click
import platformdirs
import yaml

from sglang_bw.cli import planning
from sglang_bw.cli.ab_report import AbProgress, print_outcome, print_plan
from sglang_bw.cli.console import print_json
from sglang_bw.cli.journal import remember
from sglang_bw.errors import InvalidRunError
from sglang_bw.experiment import ab as experiment
from sglang_bw.experiment import arm as arms
from sglang_bw.experiment import prompts as prompt_sets
from sglang_bw.experiment.ab import Experiment, Pair, Settings
from sglang_bw.experiment.arm import Arm, ArmPlan, Name
from sglang_bw.experiment.client import Sampling
from sglang_bw.experiment.verdict import Limits
from sglang_bw.host import nvml
from sglang_bw.launch import command as commands
from sglang_bw.launch import device as devices
from sglang_bw.launch import engine as engines
from sglang_bw.launch import selection, weights
from sglang_bw.launch import server as servers
from sglang_bw.launch.command import Command
from sglang_bw.launch.engine import Engine
from sglang_bw.ledger.record import RunFile, RunRecord, read
from sglang_bw.recipes import flags
from sglang_bw.recipes.flags import Flags
from sglang_bw.recipes.schema import Device, Recipe

_ENV_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


def run(
    name: str | None,
    engine_flags: tuple[str, ...],
    vs: str | None,
    no_spec: bool,
    sets: tuple[str, ...],
    urls: tuple[str, ...],
    api_key: str | None,
    as_json: bool,
    dry_run: bool,
    together: bool | None,
    record: Path | None,
    startup_timeout: float,
    **options: Any,
) -> None:
    """Measure what `ab` was asked for, show it, and raise when the run must not be used.

    :raises BwError: the arms cannot be started or measured, or the run is not valid.
    """
    settings = _settings(options)
    _check_usage(name, vs, sets, urls, no_spec=no_spec)
    engine = None if urls else engines.find(options["python"], options["engine_tree"])
    plans = _servers(urls, api_key) if engine is None else _arms(engine, name or "", vs, sets, engine_flags, options)
    known = arms.planned(plans[0], engine), arms.planned(plans[1], engine)
    head = experiment.head(plans, known, settings, recipe=name)
    if dry_run:
        print_json(head.model_dump(mode="json")) if as_json else print_plan(head)
        return
    if engine:
        _check(engine, plans, name or "", vs, allow_stock=options["allow_stock"])
    if together is None:
        together = not any(plan.command and plan.command.device == "cuda" for plan in plans)
    path = (record or platformdirs.user_state_path("sglang-bw") / "runs" / f"{head.id}.jsonl").absolute()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended like Ctrl-C: the outcome is written

    with ExitStack() as stack:
        progress = stack.enter_context(AbProgress(head, path))

        def start(plan: ArmPlan) -> Arm:
            if engine is None:
                return Arm(plan, None)
            return arms.start(plan, engine, servers.default_log(head.id, _port(plan)), startup_timeout, progress.start)

        pair = Pair(plans, start, together=together)
        file = RunFile(path)
        stack.callback(remember, path)  # a run that ends early is remembered, too
        Experiment(head, pair, settings, file, progress).run()
    found = read(path)
    print_json(found.model_dump(mode="json")) if as_json else print_outcome(found)
    _judge(found, path)


def _settings(options: dict[str, Any]) -> Settings:
    sampling = Sampling(
        max_tokens=options["max_tokens"],
        temperature=options["temperature"],
        ignore_eos=options["ignore_eos"],
        seed=options["seed"],
        timeout_s=options["request_timeout"],
    )
    return Settings(
        prompts=prompt_sets.load(options["prompt_name"]).first(options["count"]),
        sampling=sampling,
        concurrencies=options["concurrency"],
        rounds=options["rounds"],
        within=options["within"],
        budget_s=options["budget"],
        limits=options["limits"] or Limits(),
        flush=not options["no_flush"],
        allow_random=options["allow_random"],
    )


def _check_usage(
    name: str | None, vs: str | None, sets: tuple[str, ...], urls: tuple[str, ...], *, no_spec: bool
) -> None:
    ways = [option for option, given in (("--vs", vs), ("--no-spec", no_spec), ("--set", sets)) if given]
    if urls:
        if len(urls) != 2 or name or ways:
            raise click.UsageError("--url is given twice, first the baseline, and without a recipe.")
    elif name is None:
        raise click.UsageError("a recipe is missing; or two running servers: --url A --url B.")
    elif len(ways) != 1:
        raise click.UsageError("say what to compare with: one of --vs RECIPE, --no-spec, --set KEY=VALUE.")


def _servers(urls: tuple[str, ...], api_key: str | None) -> tuple[ArmPlan, ArmPlan]:
    for url in urls:
        if not re.match(r"https?://[^/]", url):
            raise click.UsageError(f"{url!r} is no address such as http://127.0.0.1:30000.")
    a, b = (url.rstrip("/") for url in urls)
    return ArmPlan("A", f"server {a}", a, api_key=api_key), ArmPlan("B", f"server {b}", b, api_key=api_key)


def _arms(
    engine: Engine,
    name: str,
    vs: str | None,
    sets: tuple[str, ...],
    engine_flags: tuple[str, ...],
    options: dict[str, Any],
) -> tuple[ArmPlan, ArmPlan]:
    recipe = selection.select(name, draft=options["draft"])
    try:
        both = flags.parse(engine_flags)
    except flags.NotAFlagError as error:
        raise click.UsageError(f"{error.token!r} is no engine flag.") from error
    build = _Builder(engine, options["device"], options["port"], both)
    if vs is not None:
        base = selection.select(vs)
        return build.arm("A", base, base.id), build.arm("B", recipe, recipe.id)
    if sets:
        changes = dict(map(_change, sets))
        said = f"{recipe.id} with {', '.join(sets)}"
        return build.arm("A", recipe, recipe.id), build.arm("B", recipe, said, changes=changes)
    if recipe.spec is None:
        raise click.UsageError(f"{recipe.id} has no speculation to leave out: give a --draft, or use --set.")
    return (
        build.arm("A", recipe, f"{recipe.id} without speculation", speculate=False),
        build.arm("B", recipe, recipe.id),
    )


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.removeprefix("--").partition("=")
    if not (key and equals):
        raise click.UsageError(f"{text!r} is no KEY=VALUE such as cuda-graph-max-bs-decode=64.")
    return key, value if _ENV_NAME.fullmatch(key) else yaml.safe_load(value)


class _Builder:
    """Makes the commands of both arms, on ports side by side."""

    def __init__(self, engine: Engine, device: str, port: int, both: Flags) -> None:
        self.engine = engine
        found = devices.detect(engine_has_gpu_kernels=engine.has_gpu_kernels) if device == "auto" else device
        self.device = cast(Device, found)
        self.port = port
        self.both = both

    def arm(
        self, name: Name, recipe: Recipe, says: str, *, speculate: bool = True, changes: dict[str, Any] | None = None
    ) -> ArmPlan:
        port = self.port + (name == "B")
        changed = {key: value for key, value in (changes or {}).items() if not _ENV_NAME.fullmatch(key)}
        extra = flags.merge(self.both, flags.from_mapping(changed))
        environ = self.engine.environment()
        command = commands.build(
            recipe,
            planning.machine(recipe, self.device, nvml.read(nvml.load()) if self.device == "cuda" else None),
            environ,
            port=port,
            speculate=speculate,
            extra=extra,
            version=self.engine.installation.version,
        )
        command = _without(command, [key for key, value in changed.items() if value in (False, None)])
        env = {key: value for key, value in (changes or {}).items() if _ENV_NAME.fullmatch(key)}
        command = replace(command, env={**command.env, **env})
        asked = {key: str(value) for key, value in changed.items()}
        return ArmPlan(name, says, command.url, command, asked, command.api_key)


def _without(command: Command, keys: list[str]) -> Command:
    dropped = {flags.Flag(key).key for key in keys}
    return replace(command, flags=tuple(flag for flag in command.flags if flag.key not in dropped))


def _check(engine: Engine, plans: tuple[ArmPlan, ArmPlan], name: str, vs: str | None, *, allow_stock: bool) -> None:
    """Refuse before the load what `serve` would refuse."""
    for recipe in {name, vs} - {None}:
        engine.check(selection.select(str(recipe)), allow_stock=allow_stock)
    for plan in plans:
        if plan.command:
            weights.check_command(plan.command)


def _port(plan: ArmPlan) -> int:
    return plan.command.port if plan.command else 0


def _judge(run: RunRecord, path: Path) -> None:
    outcome = run.outcome
    if outcome and not outcome.valid:
        reason = outcome.warnings[-1] if outcome.warnings else "see the record"
        raise InvalidRunError(f"the run is not valid: {reason}", hint=f"Its record is {path}.")
