"""``build`` and ``patches``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from sglang_bw.cli.console import out, print_json, steps

PATCHES = click.option(
    "--patches",
    "root",
    type=click.Path(path_type=Path),
    help="Directory with one folder per base (default: the checkout's).",
)
_BASE = click.option("--base", help="SGLang release (default: the newest with a series).")
_JSON = click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")


def _series(root: Path | None, base: str | None) -> Any:
    from sglang_bw.fork.series import Series, newest_base, patches_root

    found = patches_root(root)
    return Series.load(found, base or newest_base(found))


@click.command()
@_BASE
@click.option("--python", "python", help="Python of the wheel, for example 3.12 (default: this one).")
@click.option("--platform", "machine", help="x86_64 or aarch64 (default: this machine).")
@click.option(
    "--wheel", type=click.Path(path_type=Path), help="Upstream's wheel as a file, for hosts without a network."
)
@click.option("--out", "folder", type=click.Path(path_type=Path), default=Path("dist"), show_default=True)
@click.option("--dry-run", is_flag=True, help="Say what would be built from what, and stop.")
@PATCHES
@_JSON
def build(
    base: str | None,
    python: str | None,
    machine: str | None,
    wheel: Path | None,
    folder: Path,
    dry_run: bool,
    root: Path | None,
    as_json: bool,
) -> None:
    """Build the patched SGLang wheel into dist/, and a simple index beside it."""
    from sglang_bw.fork import upstream
    from sglang_bw.fork.build import build as run
    from sglang_bw.fork.wheel import built_name

    series = _series(root, base)
    python, machine = python or upstream.this_python(), machine or upstream.this_machine()
    source = wheel.name if wheel else upstream.pick_wheel(series.pins, python, machine)
    upstream.pinned_digest(series.pins, Path(source))
    if dry_run:
        name = built_name(source, series.pins.full_version)
        plan = {"upstream": source, "patches": list(series.order), "wheel": str(folder / name)}
        if as_json:
            print_json(plan)
        else:
            out.print(f"would build {folder / name}\nfrom {source} and {len(series.order)} patches", markup=False)
        return
    started = time.monotonic()
    with steps(as_json) as progress:
        built = run(
            series.folder.parent,
            series.base,
            python=python,
            machine=machine,
            wheel=wheel,
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


@click.group()
def patches() -> None:
    """List, show, check and record the patches of a series."""


@patches.command("list")
@_BASE
@click.option("--markdown", is_flag=True, help="The table as the README has it.")
@PATCHES
@_JSON
def list_patches(base: str | None, markdown: bool, root: Path | None, as_json: bool) -> None:
    """List the patches with their upstream status."""
    from rich.table import Table

    from sglang_bw.fork.mail import markdown_table, read_patch

    series = _series(root, base)
    found = [read_patch(path) for path in series.files]
    if markdown:
        out.print(markdown_table(found), markup=False)
        return
    if as_json:
        rows = [{"file": patch.name, "subject": patch.subject, **_trailers(patch)} for patch in found]
        print_json({"base": series.base, "version": series.pins.full_version, "patches": rows})
        return
    table = Table(title=f"SGLang {series.base}, series {series.pins.local}", title_justify="left")
    for column in ("patch", "upstream", "verified on", "why"):
        table.add_column(column, overflow="fold")
    for patch in found:
        table.add_row(patch.name, patch.trailer("Upstream-Status"), patch.trailer("Verified-On"), patch.trailer("Why"))
    out.print(table)


@patches.command()
@click.argument("name")
@_BASE
@PATCHES
@_JSON
def show(name: str, base: str | None, root: Path | None, as_json: bool) -> None:
    """Show one patch: NAME is its number, its file name or a part of it."""
    from rich.syntax import Syntax

    from sglang_bw.fork.mail import description, read_patch

    series = _series(root, base)
    matches = [path for path in series.files if name in path.name]
    if len(matches) != 1:
        known = "\n  ".join(path.name for path in matches or series.files)
        raise click.UsageError(f"{name!r} fits {len(matches)} patches of {series.base}. Known:\n  {known}")
    patch = read_patch(matches[0])
    if as_json:
        row = {"file": patch.name, "subject": patch.subject, "description": description(patch), "sha256": patch.sha256}
        print_json(row | _trailers(patch) | {"diff": patch.diff.decode("utf-8", "replace")})
        return
    out.print(patch.subject, style="bold", markup=False)
    out.print(f"\n{patch.body}\n", markup=False)
    out.print(Syntax(patch.diff.decode("utf-8", "replace"), "diff", theme="ansi_dark", word_wrap=True))


def _trailers(patch: Any) -> dict[str, Any]:
    return {"trailers": [list(pair) for pair in patch.trailers]}


@patches.command()
@_BASE
@PATCHES
@_JSON
def lint(base: str | None, root: Path | None, as_json: bool) -> None:
    """Check a series (without --base: every series) and report every finding."""
    from sglang_bw.errors import LintError
    from sglang_bw.fork import lint as checks
    from sglang_bw.fork.series import Series, bases, newest_base, patches_root

    found = patches_root(root)
    findings: list[str] = []
    for version in [base] if base else bases(found) or [newest_base(found)]:
        findings += [f"{version}: {text}" for text in checks.lint(Series.load(found, version))]
    if as_json:
        print_json({"findings": findings})
        if findings:
            raise SystemExit(LintError.exit_code)
        return
    if findings:
        raise LintError(findings, hint="docs/patch-format.md describes the format")
    out.print("the series is clean")


@patches.command()
@_BASE
@click.option("--wheel", type=click.Path(path_type=Path), help="Upstream's wheel as a file.")
@click.option("--release", is_flag=True, help="Make this tree the next released one, +bw.N.")
@PATCHES
@_JSON
def refresh(base: str | None, wheel: Path | None, release: bool, root: Path | None, as_json: bool) -> None:
    """Apply the series and record its tree id and file hashes in upstream.toml."""
    from sglang_bw.fork.refresh import refresh as run

    series = _series(root, base)
    with steps(as_json) as progress:
        pins, applied = run(series, wheel=wheel, release=release, progress=progress)
    if as_json:
        print_json({"version": pins.full_version, "tree": pins.tree, "patched": pins.patched})
    else:
        out.print(f"{series.folder.name}: tree {pins.tree}, {len(applied.changes)} files, version {pins.full_version}")
