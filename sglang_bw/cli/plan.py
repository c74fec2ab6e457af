"""``plan``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.markup import escape

from sglang_bw.cli import completion, planning
from sglang_bw.cli.console import err, print_json
from sglang_bw.cli.options import ENGINE_PYTHON, ENGINE_TREE
from sglang_bw.cli.typed import check_place
from sglang_bw.recipes import flags

if TYPE_CHECKING:
    from collections.abc import Callable


_FILE = click.Path(path_type=Path)


class _Positive(click.IntRange):
    name = "whole number"


@click.command(short_help="What will not fit, not run or not pay, before anything is loaded.")
@click.argument("name", metavar="[RECIPE|FILE.yaml|MODEL]", required=False, shell_complete=completion.recipes)
@click.argument("engine_flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- ENGINE FLAGS]")
@click.option(
    "--gpus",
    metavar='8x"RTX PRO 6000"',
    help="The machine; the recipe's own when not given.",
    shell_complete=completion.machines,
)
@click.option("--fabric", type=click.Choice(["pcie", "nvlink"]), help="How the GPUs are joined; the board's usual way.")
@click.option("--context", type=_Positive(min=1), metavar="TOKENS", help="Tokens of the requests that shall fit.")
@click.option("--concurrency", type=_Positive(min=1), metavar="N", help="Requests at the same time.")
@click.option("--draft", metavar="PATH|ID", help="Draft of a model, or in place of the recipe's.")
@click.option("--model-path", metavar="PATH|ID", help="Target in place of the recipe's.")
@click.option("--no-spec", is_flag=True, help="The baseline: without speculation.")
@click.option("--engine", "version", metavar="VERSION", help="Plan for this release instead of the installed one.")
@click.option("--no-resolve", is_flag=True, help="Do not ask the engine: rules and restated formulas, under 2 s.")
@click.option("--fetch-headers", is_flag=True, help="Read configuration and weight headers from the hub, a few MB.")
@click.option(
    "--accept-log", type=_FILE, metavar="FILE", help="Accept lengths of your traffic: engine log, or JSON lines."
)
@click.option("--decode", type=_FILE, metavar="FILE.csv", help="Plain decoding here: context,concurrency,tok_s.")
@click.option(
    "--probe-round",
    type=_FILE,
    metavar="FILE.json",
    help="Result of `probe round`; the stored one of this host if left out.",
)
@click.option(
    "--probe-allreduce",
    type=_FILE,
    metavar="FILE.json",
    help="Result of `probe allreduce`; the stored one of this host if left out.",
)
@click.option("--replay", type=_FILE, metavar="FILE.csv", help="Predict every row of a published table, and compare.")
@click.option("--accept-length-given", is_flag=True, help="With --replay: accept lengths in the file are inputs.")
@click.option("--force", is_flag=True, help="End with exit code 0 whatever the plan says.")
@ENGINE_PYTHON
@ENGINE_TREE
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")
def plan(
    name: str | None,
    engine_flags: tuple[str, ...],
    gpus: str | None,
    fabric: str | None,
    context: int | None,
    concurrency: int | None,
    draft: str | None,
    model_path: str | None,
    no_spec: bool,
    version: str | None,
    no_resolve: bool,
    fetch_headers: bool,
    accept_log: Path | None,
    decode: Path | None,
    probe_round: Path | None,
    probe_allreduce: Path | None,
    replay: Path | None,
    accept_length_given: bool,
    force: bool,
    python: Path | None,
    engine_tree: Path | None,
    as_json: bool,
) -> None:
    """Know before the load what will not fit, not run or not pay. No GPU and no weights are needed.

    Takes a recipe, a recipe file, or a model id or path. Engine flags behind `--` win over the recipe.

    Exit codes: 50 does not fit, 51 a rule or the engine refuses, 52 contradicts the machine or an unknown model,
    53 the engine gave no answer, 54 a recipe for another engine; 55 and 56 an unknown board, damaged model files.
    """
    if replay:
        _replay(replay, name, as_json=as_json, accept_length_given=accept_length_given)
        return
    if name is None:
        raise click.UsageError("name a recipe, a recipe file or a model; or a table with --replay FILE.csv.")
    from sglang_bw.cli import reductions
    from sglang_bw.cli.plan_view import show
    from sglang_bw.plan import plan as plans
    from sglang_bw.plan.pays import Measured

    check_place("plan", engine_flags)
    try:
        extra = flags.parse(engine_flags)
    except flags.NotAFlagError as error:
        raise click.UsageError(f"{error.token!r} is no engine flag; engine flags go behind '--'.") from error
    question = planning.question(
        planning.Wish(
            name=name,
            model=model_path,
            draft=draft,
            gpus=gpus,
            fabric=fabric,
            context=context,
            concurrency=concurrency,
            speculate=not no_spec,
            version=version,
            python=python,
            tree=engine_tree,
            fetch=fetch_headers,
            extra=extra,
        )
    )
    question, probe_round = planning.with_round(question, probe_round)
    if probe_allreduce:
        question = reductions.with_named(question, probe_allreduce)
    elif probe_round is None:  # which has its all-reduces in it
        question, probe_allreduce = reductions.with_stored(question)
    measured = Measured(accept_log, decode, probe_round, probe_allreduce)
    with _progress() as tell:
        made = plans.make(question, ask="no" if no_resolve else "run", force=force, measured=measured, tell=tell)
    if as_json:
        print_json(made.as_json())
    else:
        show(made)
    if (problem := made.error()) and not force:
        raise problem


def _replay(path: Path, name: str | None, *, as_json: bool, accept_length_given: bool) -> None:
    if name is not None:
        raise click.UsageError("--replay goes with a table alone, not with a recipe or model.")
    from sglang_bw.cli.replay import run

    run(path, as_json=as_json, accept_length_given=accept_length_given)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    if not err.is_terminal:
        yield lambda _line: None
        return
    with err.status("reading the model's headers") as status:
        yield lambda line: status.update(f"[dim]{escape(line)}[/dim]")
