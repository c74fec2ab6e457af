"""``bundle``."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglang_bw.cli import completion
from sglang_bw.cli.console import err, out, print_json
from sglang_bw.cli.engine import report_of
from sglang_bw.cli.options import BASE, JSON, PATCHES

if TYPE_CHECKING:
    from sglang_bw.bundle.make import Bundle
    from sglang_bw.bundle.plan import Plan
    from sglang_bw.bundle.wheels import Chosen

_LARGEST = 15


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    from sglang_bw.bundle.archive import parse_size

    try:
        return parse_size(value) if value else None
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


@click.command()
@click.argument("recipes", nargs=-1, metavar="[RECIPE]...", shell_complete=completion.recipes)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Which set of dependencies; needed to make one.")
@click.option("--python", "python", metavar="X.Y", help="Python of the target, for example 3.12 (default: this one).")
@click.option("--machine", type=click.Choice(["x86_64", "aarch64"]), help="Machine of the target (default: this one).")
@click.option(
    "--split", callback=_size, metavar="SIZE", help="Cut the archive into parts of this size, for example 60M."
)
@click.option("--without", multiple=True, metavar="NAME", help="Leave this package out; patterns work ('nvidia-*').")
@click.option("--model", "models", multiple=True, type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Take this model folder along, for example a draft.")  # fmt: skip
@click.option("--wheel", type=click.Path(path_type=Path), help="The built engine (default: from dist/, else built).")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), default=Path("dist"), show_default=True,
              help="Folder that the bundle's folder is written to.")  # fmt: skip
@click.option("--verify", "verified", type=click.Path(path_type=Path), metavar="FILE|DIR",
              help="Check a bundle, or one part of it, and stop.")  # fmt: skip
@click.option("--expect", metavar="SHA256", help="With --verify: the digest that the bundle must have.")
@click.option("--dry-run", is_flag=True, help="Choose the wheels, say what would be fetched, and stop.")
@BASE
@PATCHES
@JSON
def bundle(root: Path | None, output: Path, split: int | None, verified: Path | None, expect: str | None,
           dry_run: bool, as_json: bool, **asked: Any) -> None:  # fmt: skip
    """Make a bundle for a host without a network: engine, dependencies, tool, recipes, checksums, install.sh.

    On the host: `sh install.sh --into DIR --expect SHA256`.
    """
    if verified:
        if dry_run or split or any(asked.values()):
            raise click.UsageError("--verify checks a bundle that is there; what is for making one does not go with it")
        _verify(verified, expect, as_json=as_json)
        return
    if expect:
        raise click.UsageError("--expect goes with --verify; a bundle that is made prints its digest")
    if not asked["device"]:
        raise click.UsageError("say --device cuda or --device cpu: what the target has is not seen from here")
    from sglang_bw.bundle.make import choose, make
    from sglang_bw.bundle.plan import Request, plan_bundle
    from sglang_bw.fork.series import patches_root

    plan = plan_bundle(patches_root(root), Request(**asked))
    started = time.monotonic()
    with report_of(quiet=as_json) as report:
        report.step(f"{plan.name}: {len(plan.packages)} locked packages")
        for note in plan.notes:
            report.step(f"note: {note}")
        chosen = choose(plan, report)
        made = None if dry_run else make(plan, chosen, output, split, report)
    if made:
        _show(made, time.monotonic() - started, as_json=as_json)
    else:
        _show_plan(plan, chosen, as_json=as_json)


def _verify(path: Path, expect: str | None, *, as_json: bool) -> None:
    from sglang_bw.bundle.reader import verify

    with report_of(quiet=as_json) as report:
        found = verify(path, report, expect)
    manifest = found.manifest
    if as_json:
        print_json(
            {
                "whole": True,
                "part": found.part or None,
                "files": found.files,
                "bytes": found.size,
                "digest": found.digest or None,
                "manifest": manifest.model_dump(mode="json") if manifest else None,
            }
        )
    elif manifest:
        out.print(f"whole: {manifest.name}, {found.files} files, {found.size / 1e6:.0f} MB", markup=False)
        out.print(f"digest {found.digest}", markup=False)
        if manifest.left_out:
            names = ", ".join(package.name for package in manifest.left_out)
            out.print(f"left out: {names}", markup=False)
    else:
        out.print(f"whole: {found.part}, {found.size / 1e6:.0f} MB, one part of a bundle", markup=False)


def _show_plan(plan: Plan, chosen: tuple[Chosen, ...], *, as_json: bool) -> None:
    total, unknown = sum(wheel.size for wheel in chosen), sum(not wheel.size for wheel in chosen)
    if as_json:
        wheels = [{"name": w.name, "version": w.version, "file": w.file, "bytes": w.size or None} for w in chosen]
        left_out = [{"name": package.name, "version": package.version} for package in plan.left_out]
        print_json({"name": plan.name, "bytes": total, "notes": plan.notes, "wheels": wheels, "left_out": left_out})
        return
    _show_largest((wheel.file, wheel.size) for wheel in chosen)
    more = f" and {unknown} of unknown size" if unknown else ""
    out.print(f"\nwould fetch {len(chosen)} wheels, {total / 1e6:.0f} MB{more}", markup=False)
    out.print(f"and add sglang {plan.version} and this tool", markup=False)
    out.print("dry run: nothing was fetched or written", markup=False)


def _show(made: Bundle, seconds: float, *, as_json: bool) -> None:
    size = sum(part.size for part in made.parts)
    if as_json:
        print_json(
            {
                "folder": str(made.folder),
                "digest": made.digest,
                "bytes": size,
                "parts": [{"file": part.file, "bytes": part.size, "sha256": part.sha256} for part in made.parts],
                "manifest": made.manifest.model_dump(mode="json"),
            }
        )
        return
    _show_largest((wheel.file, wheel.size) for wheel in made.manifest.wheels)
    count = f"{len(made.parts)} parts" if len(made.parts) > 1 else made.parts[0].file
    out.print(f"\nmade {made.folder} in {seconds:.0f} s: {count}, {size / 1e6:.0f} MB", markup=False)
    out.print(f"digest {made.digest}", markup=False)
    out.print("\ncopy the folder to the host, and there:", style="dim")
    out.print(f"  sh {shlex.quote(made.folder.name)}/install.sh --into DIR --expect {made.digest}", markup=False)


def _show_largest(files: Any) -> None:
    for name, size in sorted(files, key=lambda item: -item[1])[:_LARGEST]:
        err.print(f"{size / 1e6:9.1f} MB  {name}", markup=False)
