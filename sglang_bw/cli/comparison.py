"""The part of `ab` that starts two arms and measures them."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import platformdirs

from sglang_bw.cli import arms as ab_arms
from sglang_bw.cli import host_checks, refusals
from sglang_bw.cli.ab_report import AbProgress, print_outcome, print_plan
from sglang_bw.cli.arms import Asked
from sglang_bw.cli.console import print_json
from sglang_bw.cli.interrupt import end_like_ctrl_c
from sglang_bw.cli.journal import Journal, remember
from sglang_bw.errors import BwError, InvalidRunError
from sglang_bw.experiment import arm as arms
from sglang_bw.experiment import head as heads
from sglang_bw.experiment import prompts as prompt_sets
from sglang_bw.experiment.ab import Experiment
from sglang_bw.experiment.arm import Arm, ArmPlan
from sglang_bw.experiment.client import Sampling
from sglang_bw.experiment.pair import Pair
from sglang_bw.experiment.settings import Settings
from sglang_bw.experiment.verdict import Limits
from sglang_bw.launch import engine as engines
from sglang_bw.launch import instances, remote_code, weights
from sglang_bw.launch import port as ports
from sglang_bw.launch import server as servers
from sglang_bw.launch.engine import Engine
from sglang_bw.launch.journal import Attempt
from sglang_bw.ledger.record import Host, RunRecord
from sglang_bw.ledger.runfile import RunFile, read


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
    asked = ab_arms.started(engine, name or "", vs, sets, engine_flags, options) if engine else None
    plans = (asked[0].plan, asked[1].plan) if asked else ab_arms.servers(urls, api_key)
    for plan in plans:
        if plan.command and plan.command.speculates:
            settings.refuse_noise(plan.name)
    head = heads.head(plans, engine, settings, recipe=plans[1].recipe)
    if dry_run:
        print_json(head.model_dump(mode="json")) if as_json else print_plan(head)
        return
    if together is None:
        together = not any(plan.command and plan.command.device == "cuda" for plan in plans)
    if engine and asked:
        said: set[str] = set()
        _check_ports(plans, together=together)
        for arm in asked:
            _check(engine, arm, head.host, said, allow_stock=options["allow_stock"], force=options["force"])
    path = (record or platformdirs.user_state_path("sglang-bw") / "runs" / f"{head.id}.jsonl").absolute()
    end_like_ctrl_c(signal.SIGTERM, signal.SIGHUP)  # the outcome is written then

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


def _check_ports(plans: tuple[ArmPlan, ArmPlan], *, together: bool) -> None:
    """Make sure that each arm will be able to listen: B would find out when A has been loaded."""
    taken = [(plan.command.host, plan.command.port) for plan in plans if plan.command]
    if together and len(set(taken)) < len(taken):
        raise click.UsageError(f"both arms would listen on port {taken[0][1]}: `--port` before '--' gives B the next.")
    for host, port in taken:
        ports.check_free(host, port)
        instances.check_port(host, port)


def _check(engine: Engine, arm: Asked, host: Host, said: set[str], *, allow_stock: bool, force: bool) -> None:
    """Refuse before the load what `serve` would refuse, and say what has failed here before.

    :param said: warnings that the other arm had; both share most of them.
    """
    recipe, command = arm.launch.recipe, arm.launch.command
    try:
        engine.check(recipe, allow_stock=allow_stock, force=force)
        weights.check_command(command)
        refusals.check(arm.launch, force=force, said=said)
        remote_code.demand(command, engine.environment())
        here = host_checks.gpus(command.device, None, look=True)
        host_checks.check(command, here, engine, engine.environment(), force=force)
    except BwError as error:
        error.message = f"arm {arm.plan.name} ({arm.plan.says}): {error.message}"
        raise
    Journal(Attempt(recipe.id, command, engine.installation, host)).announce()


def _port(plan: ArmPlan) -> int:
    return plan.command.port if plan.command else 0


def _judge(run: RunRecord, path: Path) -> None:
    outcome = run.outcome
    if outcome and not outcome.valid:
        reason = outcome.warnings[-1] if outcome.warnings else "see the record"
        raise InvalidRunError(f"the run is not valid: {reason}", hint=f"Its record is {path}.")
