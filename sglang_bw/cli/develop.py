"""``patches new`` and ``patches export``: writing a patch in a scratch tree."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglang_bw.cli.console import err, out, print_json, steps
from sglang_bw.cli.options import BASE, JSON, LOCAL, PATCHES, series_of

if TYPE_CHECKING:
    from sglang_bw.fork.patchtree import Export, Target

_WHEEL = click.option("--wheel", type=click.Path(path_type=Path), help="Upstream's wheel as a file.")


@click.command()
@click.argument("topic")
@BASE
@LOCAL
@_WHEEL
@PATCHES
@JSON
def new(
    topic: str, base: str | None, local: Path | None, wheel: Path | None, root: Path | None, as_json: bool
) -> None:  # fmt: skip
    """Open a scratch tree on top of the series for a new patch, and print its path.

    Edit files there with your own tools, then run `sglang-bw patches export`. With --local DIR the patch becomes one
    of your own, on top of ours.
    """
    from sglang_bw.fork.patchtree import open_tree

    target = _target(root, base, local)
    with steps(as_json) as progress:
        tree = open_tree(target, topic, wheel=wheel, progress=progress)
    if as_json:
        print_json({"tree": str(tree), "topic": topic, "base": target.series.base})
        return
    out.print(str(tree), markup=False)
    err.print(f"edit files there, then: sglang-bw patches export{target.options}", markup=False, style="dim")


@click.command()
@BASE
@LOCAL
@click.option("--overwrite", is_flag=True, help="Patch files that were edited on disk give way to the tree.")
@click.option("--from-disk", is_flag=True, help="Start over from the patch files, and bring them into git's form.")
@_WHEEL
@PATCHES
@JSON
def export(
    base: str | None, local: Path | None, overwrite: bool, from_disk: bool, wheel: Path | None, root: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Write the series from the scratch tree: one patch a commit, byte for byte the same where nothing changed."""
    from sglang_bw.fork import patchtree

    if overwrite and from_disk:
        raise click.UsageError("--overwrite lets the tree win, --from-disk the patch files: give one of them")
    if wheel and not from_disk:
        raise click.UsageError("--wheel goes with --from-disk: the scratch tree has its release already")
    target = _target(root, base, local)
    with steps(as_json) as progress:
        if from_disk:
            done = patchtree.take_disk(target, wheel=wheel, progress=progress)
        else:
            done = patchtree.export(target, overwrite=overwrite, progress=progress)
    if as_json:
        print_json(export_facts(done))
    else:
        show_export(target, done)


def export_facts(done: Export) -> dict[str, Any]:
    """Return an export as JSON types."""
    return {
        "tree": str(done.tree),
        "series": list(done.order),
        "written": list(done.written),
        "removed": list(done.removed),
        "unfilled": list(done.unfilled),
    }


def show_export(target: Target, done: Export) -> None:
    """Print an export for people."""
    for name in done.written:
        out.print(f"wrote {target.folder / name}", markup=False)
    for name in done.removed:
        out.print(f"removed {target.folder / name}", markup=False)
    if not (done.written or done.removed):
        out.print(f"nothing changed: {len(done.order)} patches are what the scratch tree exports", markup=False)
    if done.unfilled:
        out.print("still to be filled in:", markup=False)
        for text in done.unfilled:
            out.print(f"  {text}", markup=False)
        amend, again = (
            f"git -C {shlex.quote(str(done.tree))} commit --amend",
            f"sglang-bw patches export{target.options}",
        )
        out.print(f"do it with `{amend}`, then `{again}` again", markup=False)
    elif done.written or done.removed:
        out.print(f"next: sglang-bw patches refresh{target.options}", style="dim", markup=False)


def _target(root: Path | None, base: str | None, local: Path | None) -> Target:
    from sglang_bw.fork.patchtree import Target

    return Target(series_of(root, base), local)
