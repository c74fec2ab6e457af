"""``plan``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Know before the load what will not fit, not run or not pay.")
@click.option(
    "--replay",
    "table",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE.csv",
    help="Predict every row of a published table from its inputs, and compare.",
)
@click.option(
    "--accept-length-given",
    is_flag=True,
    help="With --replay: accept lengths in the file were known beforehand; read them.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")
def plan(table: Path, accept_length_given: bool, as_json: bool) -> None:
    """Know before the load what will not fit, not run or not pay."""
    from sglang_bw.cli.replay import run

    run(table, as_json=as_json, accept_length_given=accept_length_given)
