"""``serve``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglang_bw.cli import completion, detached, emit, foreground, host_checks, planning, refusals
from sglang_bw.cli.console import err, print_json
from sglang_bw.cli.foreground import Checked
from sglang_bw.cli.options import ALLOW_STOCK, DEVICE, ENGINE_PYTHON, ENGINE_TREE, STARTUP_TIMEOUT
from sglang_bw.cli.preparation import Options, Prepared, consent, prepare
from sglang_bw.cli.refusals import Launch
from sglang_bw.cli.types import Place
from sglang_bw.errors import UnsafeLaunchError
from sglang_bw.launch import command as commands
from sglang_bw.launch import instances, remote_code, safety, secret, server, weights
from sglang_bw.launch import port as ports
from sglang_bw.launch.command import PASTED_CONFIG, Command
from sglang_bw.launch.engine import Engine
from sglang_bw.recipes import flags

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
@click.option(
    "--api-key-file",
    type=Place(dir_okay=False, path_type=Path),
    help="The key that requests need; else SGLANG_BW_API_KEY. It never stands on a command line.",
)
@click.option("--open", "is_open", is_flag=True, help="Listen to the network without a key.")
@click.option("--nodes", type=click.IntRange(1, 256), help="Machines that serve it together; else the recipe's.")
@click.option("--node-rank", type=click.IntRange(min=0), help="Which of them this one is, from 0.")
@click.option("--head", metavar="ADDR:PORT", callback=_not_empty, help="Where node 0 is found by the others.")
@click.option(
    "--pin", is_flag=True, help="Trust the code of the recipe's models at the commits found, and remember them."
)
@click.option("--force", "--yes", "force", is_flag=True, help="Go on where the plan, or a check of this host, refuses.")
@click.option("--dry-run", is_flag=True, help="Print the `sglang serve` line and its environment, start nothing.")
@ALLOW_STOCK
@click.option("--log", type=Place(dir_okay=False, path_type=Path), help="Where the engine's log goes.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line: ready, warm-up, exit.")
@click.option("--no-warmup", is_flag=True, help="Skip the requests that measure accept length and tok/s.")
@click.option("--strict", is_flag=True, help="Stop with exit code 35 when the warm-up's output is broken.")
@click.option("--detach", is_flag=True, help="Leave the server running by itself; `status`, `logs` and `stop` find it.")
@click.option("--no-wait", is_flag=True, help="With --detach: do not wait until it serves.")
@click.option("--emit", type=click.Choice(emit.FORMS), help="Write a deployment file of it, start nothing.")
@click.option("-o", "--output", type=Place(path_type=Path), metavar="DIR", help="With --emit: where to; else printed.")
@click.option("--image", callback=_not_empty, help="With --emit: the container image.")
@click.option("--no-check", is_flag=True, help="With --emit: leave out the plan's checks.")
@STARTUP_TIMEOUT
@ENGINE_PYTHON
@ENGINE_TREE
def serve(**options: Any) -> int:
    """Start the patched engine with EAGLE-3 and show its URL when it answers.

    The first argument is a recipe (`sglang-bw recipes list`), a recipe file, or a model id or path together with
    --draft. Engine flags behind `--` win over the recipe.

    SIGINT, SIGTERM and SIGHUP are passed on to the engine, a second one kills it. Ends with the engine's exit code;
    128 + N when signal N ended it, also when it was interrupted while loading.
    """
    wish = Options(**options)
    wish.check()
    prepared = prepare(wish)
    if wish.dry_run:
        _print_dry_run(prepared, wish)
        return 0
    if wish.emit:
        return emit.run(prepared, wish)
    launch = _checked(prepared, wish)
    return detached.run(launch, wish) if wish.detach else foreground.run(launch, wish)


def _checked(prepared: Prepared, wish: Options) -> Checked:
    """Refuse what cannot work, and fetch what is missing.

    :raises BwError: why it is refused.
    """
    recipe, command, engine = prepared.recipe, prepared.command, prepared.engine
    note = engine.check(recipe, allow_stock=wish.allow_stock, force=wish.force)
    environ = {**prepared.environ, **command.env}
    said = [note, safety.check_open(command, allowed=wish.is_open)]
    weights.check_command(command)
    ports.check_free(command.host, command.port)
    instances.check_port(command.host, command.port)
    seen = planning.seen(prepared.here, prepared.visible)
    asked = Launch(recipe, command, planning.planned(engine), seen, prepared.environ, wish.typed)
    planned = refusals.check(asked, force=wish.force)
    stays = wish.no_spec or flags.has(prepared.extra, "speculative-algorithm")
    if recipe.baseline_where_it_loses and not stays and (cell := refusals.loses(planned, recipe)):
        command = prepared.baseline()
        _say_baseline(cell)
    # After the plan, which may refuse for a better reason; before anything is fetched.
    trusted = remote_code.settle(command, environ, consent(wish))
    command = trusted.applied(command)
    for told in trusted.told:
        err.print(f"warning: {told}", style="yellow", markup=False)
    host_checks.check(command, prepared.here, engine, prepared.environ, force=wish.force)
    said += remote_code.elsewhere(command, environ)
    log = (wish.log or server.default_log(recipe.id, command.port)).absolute()
    return Checked(recipe, command, engine, dict(prepared.environ), log, tuple(filter(None, said)))


def _say_baseline(cell: Cell) -> None:
    if cell.speedup and cell.break_even:
        err.print(
            f"speculation is left out: at {cell.context:,} tokens and {cell.concurrency} at once it would give "
            f"{cell.speedup.mid:.2f} of the plain speed (accept length {cell.accept_length.mid:.2f}, "
            f"{cell.break_even.mid:.2f} needed); `-- --speculative-algorithm EAGLE3` keeps it",
            markup=False,
        )


def _print_dry_run(prepared: Prepared, wish: Options) -> None:
    prepared = _with_commits(prepared, wish)
    command, engine = prepared.command, prepared.engine
    if problem := refusals.only_for_gpus(prepared.recipe, command):
        err.print(f"note: {problem.message}; --device cuda prints the line for GPUs", style="yellow", markup=False)
    one_of_many = prepared.nodes == 1 or wish.node_rank is not None
    nodes = [command] if one_of_many else [prepared.on_node(rank) for rank in range(prepared.nodes)]
    nodes = [_with_tree(node, engine) for node in nodes]
    if wish.as_json:
        described = [_described(node, engine) for node in nodes]
        print_json(described[0] if one_of_many else {"nodes": described})
    else:
        for node in nodes:
            click.echo(node.pasteable())
    if command.has_secrets:
        click.echo(
            f"note: {PASTED_CONFIG} is a file that you write, mode 0600, with {_lines(command)}; "
            "`serve` does that by itself",
            err=True,
        )
    if missing := engine.installation.error():
        click.echo(f"note: {missing.message}", err=True)
        click.echo(f"hint: {missing.hint}", err=True)


def _lines(command: Command) -> str:
    """Return the lines of the file that a pasted command reads its secrets from."""
    said = [f"`{name}: {'KEY' if name.endswith('key') else 'VALUE'}`" for name in secret.of(command.flags)]
    return f"the line{'s' if len(said) > 1 else ''} {' and '.join(said)}"


def _with_commits(prepared: Prepared, wish: Options) -> Prepared:
    """Say whose code would run; without --pin a missing commit is told, and the line printed as it is."""
    try:
        trusted = remote_code.settle(prepared.command, {**prepared.environ, **prepared.command.env}, consent(wish))
    except UnsafeLaunchError as error:
        if wish.pin:
            raise
        err.print(f"note: `serve` will refuse this: {error.message}", style="yellow", markup=False)
        err.print(f"hint: {error.hint}", markup=False)
        return prepared
    for told in trusted.told:
        err.print(f"note: {told}", style="yellow", markup=False)
    return prepared.settled(trusted)


def _with_tree(command: Command, engine: Engine) -> Command:
    return replace(command, env={**command.env, "PYTHONPATH": str(engine.tree)}) if engine.tree else command


def _described(command: Command, engine: Engine) -> dict[str, Any]:
    return {
        "argv": ["sglang", "serve", *command.pasteable_flags],
        "env": command.shown_env,
        "url": command.url,
        "engine": engine.installation.as_json(),
    }
