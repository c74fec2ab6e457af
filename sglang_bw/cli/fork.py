"""``build``."""

from __future__ import annotations

import shlex
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglang_bw.cli.console import out, print_json, steps
from sglang_bw.cli.interrupt import end_like_ctrl_c
from sglang_bw.cli.options import BASE, JSON, LOCAL, PATCHES, series_of

if TYPE_CHECKING:
    from sglang_bw.fork.build import BuiltWheel
    from sglang_bw.fork.series import Series


@click.command()
@BASE
@click.option("--python", "python", help="Python of the wheel, for example 3.12 (default: this one).")
@click.option("--platform", "machine", help="x86_64 or aarch64 (default: this machine).")
@click.option("--all", "everything", is_flag=True, help="Every wheel of the release: all its Pythons and machines.")
@click.option(
    "--wheel", type=click.Path(path_type=Path), help="Upstream's wheel as a file, for hosts without a network."
)
@click.option("--out", "folder", type=click.Path(path_type=Path), default=Path("dist"), show_default=True)
@click.option("--dry-run", is_flag=True, help="Say what would be built from what, and stop.")
@LOCAL
@PATCHES
@JSON
def build(
    base: str | None,
    python: str | None,
    machine: str | None,
    everything: bool,
    wheel: Path | None,
    folder: Path,
    dry_run: bool,
    local: Path | None,
    root: Path | None,
    as_json: bool,
) -> None:
    """Build the patched SGLang wheel into dist/, and a simple index beside it."""
    from sglang_bw.fork import upstream
    from sglang_bw.fork.build import build as run
    from sglang_bw.fork.build import build_all

    if everything and (python or machine or wheel):
        raise click.UsageError("--all builds every wheel: leave out --python, --platform and --wheel")
    series = series_of(root, base)
    if everything:
        sources = [Path(name) for name in sorted(series.pins.wheels)]
    elif wheel:
        sources = [wheel]
    else:
        here = python or upstream.this_python(), machine or upstream.this_machine()
        sources = [Path(upstream.pick_wheel(series.pins, *here))]
    for source in sources:
        upstream.pinned_digest(series.pins, source)
    if dry_run:
        planned = _plans(series, sources, folder, local)
        if as_json:
            print_json({"wheels": planned} if everything else planned[0])
        for one in () if as_json else planned:
            count = len(one["patches"])
            out.print(f"would build {one['wheel']}\nfrom {one['upstream']} and {count} patches", markup=False)
        return
    started = time.monotonic()
    end_like_ctrl_c(signal.SIGTERM)  # half a wheel and scratch folders are removed then
    with steps(as_json) as progress:
        at: dict[str, Any] = {"local": local, "out": folder, "progress": progress}
        if everything:
            built = build_all(series.folder.parent, series.base, **at)
        else:
            built = [run(series.folder.parent, series.base, python=python, machine=machine, wheel=wheel, **at)]
    if as_json:
        facts = [_facts(one) for one in built]
        print_json({"wheels": facts} if everything else facts[0])
        return
    _show(built, time.monotonic() - started, series)


def _plans(series: Series, sources: list[Path], folder: Path, local: Path | None) -> list[dict[str, Any]]:
    from sglang_bw.fork import lint
    from sglang_bw.fork.wheel import built_name

    lint.require_clean(series)  # as the build does
    version, patches = _planned(series, local)
    return [
        {"upstream": source.name, "patches": patches, "wheel": str(folder / built_name(source.name, version))}
        for source in sources
    ]


def _facts(built: BuiltWheel) -> dict[str, Any]:
    return {
        "wheel": str(built.path),
        "version": built.version,
        "digest": built.digest,
        "index": str(built.index),
        "patches": list(built.patches),
        "left_out": list(built.left_out),
    }


def _show(built: list[BuiltWheel], seconds: float, series: Series) -> None:
    from sglang_bw.fork.series import root_option

    for one in built:
        out.print(f"built {one.path} ({len(one.patches)} patches)", markup=False)
        out.print(f"content digest {one.digest}", markup=False)
    out.print(f"in {seconds:.1f} s", markup=False)
    last = built[-1]
    for path in last.left_out:
        out.print(f"left out (no part of a wheel): {path}", markup=False)
    out.print("\ninstall it with one of", style="dim")
    full, index = f'"sglang=={last.version}"', shlex.quote(last.index.resolve().as_uri())
    wheel = shlex.quote(str(last.path.resolve()))
    # A command is to be copied: it is not wrapped. The wheel itself says its base and its local patches.
    for command in (
        f"sglang-bw install --wheel {wheel}{root_option(series.folder.parent)}",
        f"pip install {full} --extra-index-url {index}",
        f"uv pip install --link-mode copy {full} --index {index}",
    ):
        out.print(f"  {command}", markup=False, soft_wrap=True)


def _planned(series: Series, local: Path | None) -> tuple[str, list[str]]:
    """Return version and patches of a build; only the build itself tells the tree that local patches make."""
    from sglang_bw.fork.local import load_for, planned_version

    if local is None:
        return series.pins.full_version, list(series.order)
    return planned_version(series.pins), [*series.order, *load_for(local, series).order]
