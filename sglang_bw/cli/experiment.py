"""``ab``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sglang_bw.cli import completion
from sglang_bw.cli.options import ALLOW_STOCK, DEVICE, ENGINE_PYTHON, ENGINE_TREE, STARTUP_TIMEOUT, api_key
from sglang_bw.cli.types import Duration, LimitsType, Numbers, Real, Share
from sglang_bw.experiment import prompts as prompt_sets
from sglang_bw.launch import command as commands


@click.command(short_help="Measure a baseline and a treatment, with an interval.")
@click.argument("name", metavar="[RECIPE|FILE.yaml|MODEL]", required=False, shell_complete=completion.recipes)
@click.argument("engine_flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- ENGINE FLAGS OF BOTH]")
@click.option("--vs", metavar="RECIPE", help="Baseline: another recipe.", shell_complete=completion.recipes)
@click.option("--no-spec", is_flag=True, help="Baseline: the same recipe without speculation.")
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Treatment: the recipe with an engine flag, or an ENVIRONMENT variable, set.",
)
@click.option("--url", "urls", multiple=True, metavar="URL", help="Twice: two running servers, first the baseline.")
@click.option("--draft", metavar="PATH|ID", help="Draft of a model, or in place of the recipe's.")
@click.option(
    "--prompts",
    "prompt_name",
    default="chat",
    show_default=True,
    metavar="SET|FILE",
    shell_complete=completion.prompts,
    help=f"{', '.join(prompt_sets.names())}, or a JSONL file.",
)
@click.option("--count", type=click.IntRange(min=1), help="Only the first prompts of the set.")
@click.option("--concurrency", type=Numbers(), default="1", show_default=True, help="Requests open at a time: 1,4,16.")
@click.option(
    "--rounds", type=click.IntRange(min=2), help="So many rounds, whatever the interval is, if --budget allows."
)
@click.option("--within", type=Share(), default="3%", show_default=True, help="Half-width of the interval to reach.")
@click.option("--budget", type=Duration(), default="30m", show_default=True, help="Time to measure in.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Of an answer.")
@click.option("--temperature", type=Real(min=0), default=0.0, show_default=True)
@click.option("--seed", type=int, help="Of the engine's sampling.")
@click.option("--ignore-eos", is_flag=True, help="Answers of exactly --max-tokens.")
@click.option(
    "--goodput", "limits", type=LimitsType(), metavar="LIMITS", help="Limits of a good request: ttft=0.5,tpot=0.05."
)
@DEVICE
@click.option(
    "--port",
    type=click.IntRange(1, 65534),
    default=commands.DEFAULT_PORT,
    show_default=True,
    help="Of A; B gets the next one.",
)
@click.option(
    "--side-by-side/--one-at-a-time",
    "together",
    default=None,
    help="Both arms up at once, or in turns. On a CPU the first, on GPUs the second.",
)
@click.option(
    "--record", type=click.Path(dir_okay=False, path_type=Path), help="Where the run is written, line by line."
)
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
@click.option("--dry-run", is_flag=True, help="Show both arms and the load, start nothing.")
@click.option("--allow-random", is_flag=True, help="Measure speculation on random tokens all the same.")
@ALLOW_STOCK
@click.option("--force", "--yes", "force", is_flag=True, help="Go on where the plan refuses an arm.")
@click.option("--no-flush", is_flag=True, help="Leave the prefix cache as it is between blocks.")
@api_key
@click.option("--request-timeout", type=Real(min=1), default=120.0, show_default=True, metavar="SECONDS")
@STARTUP_TIMEOUT
@ENGINE_PYTHON
@ENGINE_TREE
def ab(**asked: Any) -> None:
    """Measure a baseline (A) and a treatment (B) and say how much faster B is, with a 95 % interval.

    One of --vs, --no-spec and --set says what the two arms are; or --url twice names running servers. Blocks of the
    same prompts alternate A B B A until the interval is within --within or the budget ends. Every finished block is
    written to the record.
    """
    from sglang_bw.cli import comparison  # client and statistics take half a second to import: not for a Tab or --help

    comparison.run(**asked)
