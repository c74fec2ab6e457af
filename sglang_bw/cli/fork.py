"""``build``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sglang_bw.cli.console import out, print_json, steps
from sglang_bw.cli.options import BASE, JSON, LOCAL, PATCHES, series_of

if TYPE_CHECKING:
    from sglang_bw.fork.series import Series


@click.command()
@BASE
@click.option("--python", "python", help="Python of the wheel, for example 3.12 (default: this one).")
@click.option("--platform", "machine", help="x86_64 or aarch64 (default: this machine).")
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
    from sglang_bw.fork.wheel import built_name

    series = series_of(root, base)
    python, machine = python or upstream.this_python(), machine or upstream.this_machine()
    source = wheel.name if wheel else upstream.pick_wheel(series.pins, python, machine)
    upstream.pinned_digest(series.pins, Path(source))
    if dry_run:
        version, patches = _planned(series, local)
        name = built_name(source, version)
        if as_json:
            print_json({"upstream": source, "patches": patches, "wheel": str(folder / name)})
        else:
            out.print(f"would build {folder / name}\nfrom {source} and {len(patches)} patches", markup=False)
        return
    started = time.monotonic()
    with steps(as_json) as progress:
        built = run(
            series.folder.parent,
            series.base,
            python=python,
            machine=machine,
            wheel=wheel,
            local=local,
            out=folder,
            progress=progress,
        )
    if as_json:
        print_json(
            {
                "wheel": str(built.path),
                "version": built.version,
                "digest": built.digest,
                "index": str(built.index),
                "patches": list(built.patches),
                "left_out": list(built.left_out),
            }
        )
        return
    out.print(f"built {built.path} in {time.monotonic() - started:.1f} s ({len(built.patches)} patches)", markup=False)
    out.print(f"content digest {built.digest}", markup=False)
    for path in built.left_out:
        out.print(f"left out (no part of a wheel): {path}", markup=False)
    out.print("\ninstall it with one of", style="dim")
    full = f'"sglang=={built.version}"'
    out.print("  sglang-bw install", markup=False)
    out.print(f"  pip install {full} --extra-index-url file://{built.index.resolve()}", markup=False)
    out.print(f"  uv pip install --link-mode copy {full} --index file://{built.index.resolve()}", markup=False)


def _planned(series: Series, local: Path | None) -> tuple[str, list[str]]:
    """Return version and patches of a build; only the build itself tells the tree that local patches make."""
    from sglang_bw.fork.local import load_for, planned_version

    if local is None:
        return series.pins.full_version, list(series.order)
    return planned_version(series.pins), [*series.order, *load_for(local, series.base).order]
