"""``patches``: list, show, check and record a series, a local one on top included."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglang_bw.cli import completion
from sglang_bw.cli.console import out, print_json, steps
from sglang_bw.cli.develop import export, export_facts, new, show_export
from sglang_bw.cli.interrupt import end_like_ctrl_c
from sglang_bw.cli.options import BASE, JSON, LOCAL, PATCHES, local_of, series_of

if TYPE_CHECKING:
    from rich.table import Table

    from sglang_bw.fork.mail import Patch


@click.group()
def patches() -> None:
    """List, show, check and record the patches of a series."""
    end_like_ctrl_c(signal.SIGTERM)  # scratch folders go then


@patches.command("list")
@BASE
@click.option("--markdown", is_flag=True, help="The table as the README has it.")
@LOCAL
@PATCHES
@JSON
def list_patches(base: str | None, markdown: bool, local: Path | None, root: Path | None, as_json: bool) -> None:
    """List the patches with their upstream status; with --local yours as well."""
    from sglang_bw.fork.mail import markdown_table, read_patch

    if markdown and as_json:
        raise click.UsageError("--markdown and --json are two forms of the list: give one of them")
    series = series_of(root, base)
    own = local_of(local)
    found = [read_patch(path) for path in series.files]
    added = own.patches if own else ()
    if markdown:
        out.print(markdown_table([*found, *added]), markup=False)
        return
    if as_json:
        print_json(
            {
                "base": series.base,
                "version": series.pins.full_version,
                "patches": [_row(patch) for patch in found],
                "local_patches": [_row(patch) for patch in added],
            }
        )
        return
    out.print(_table(f"SGLang {series.base}, series {series.pins.local}", found))
    if own:
        out.print(_table(f"local patches on top, from {own.folder}", added))


def _table(title: str, patches: Sequence[Patch]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("patch", "upstream", "verified on", "why"):
        table.add_column(column, overflow="fold")
    for patch in patches:
        table.add_row(patch.name, patch.trailer("Upstream-Status"), patch.trailer("Verified-On"), patch.trailer("Why"))
    return table


@patches.command()
@click.argument("name", shell_complete=completion.patches)
@BASE
@LOCAL
@PATCHES
@JSON
def show(name: str, base: str | None, local: Path | None, root: Path | None, as_json: bool) -> None:
    """Show one patch: NAME is its number, its file name or a part of it."""
    from rich.syntax import Syntax

    from sglang_bw.fork.mail import description, read_patch

    series = series_of(root, base)
    own = local_of(local)
    files = [*series.files, *(own.files if own else ())]
    matches = _named(name, files)
    if len(matches) != 1:
        known = "\n  ".join(str(path if own else path.name) for path in matches or files)
        raise click.UsageError(f"{name!r} fits {len(matches)} patches of {series.base}. Known:\n  {known}")
    patch = read_patch(matches[0])
    if as_json:
        row = {"file": patch.name, "subject": patch.subject, "description": description(patch), "sha256": patch.sha256}
        print_json(row | _trailers(patch) | {"diff": patch.diff.decode("utf-8", "replace")})
        return
    out.print(patch.subject, style="bold", markup=False)
    out.print(f"\n{patch.body}\n", markup=False)
    out.print(Syntax(patch.diff.decode("utf-8", "replace"), "diff", theme="ansi_dark", word_wrap=True))


def _named(name: str, files: Sequence[Path]) -> list[Path]:
    """Return the files that a name fits: digits are a number first, and else a part of a file's name."""
    numbered = [path for path in files if name.isdecimal() and _number(path) == int(name)]
    return numbered or [path for path in files if name in path.name]


def _number(path: Path) -> int | None:
    digits = path.name.partition("-")[0]
    return int(digits) if digits.isdecimal() else None


def _row(patch: Patch) -> dict[str, Any]:
    return {"file": patch.name, "subject": patch.subject, **_trailers(patch)}


def _trailers(patch: Patch) -> dict[str, Any]:
    return {"trailers": [list(pair) for pair in patch.trailers]}


@patches.command()
@BASE
@LOCAL
@PATCHES
@JSON
def lint(base: str | None, local: Path | None, root: Path | None, as_json: bool) -> None:
    """Check a series (without --base: every series; with --local: yours) and report every finding."""
    from sglang_bw.errors import LintError, LocalSeriesError
    from sglang_bw.fork import lint as checks
    from sglang_bw.fork import local as local_checks
    from sglang_bw.fork.local import LocalSeries
    from sglang_bw.fork.series import Series, bases, newest_base, patches_root

    found = patches_root(root)
    findings: list[str] = []
    if local:
        findings = local_checks.lint(LocalSeries.load(local), base or newest_base(found))
    else:
        for version in [base] if base else bases(found) or [newest_base(found)]:
            findings += [f"{version}: {text}" for text in checks.lint(Series.load(found, version))]
    error, page = (LocalSeriesError, "own-patches") if local else (LintError, "patch-format")
    if as_json:
        print_json({"findings": findings})
        if findings:
            raise SystemExit(error.exit_code)
        return
    if findings:
        raise error(findings, hint=f"docs/{page}.md describes the format")
    out.print("the series is clean")


@patches.command()
@BASE
@click.option("--wheel", type=click.Path(path_type=Path), help="Upstream's wheel as a file.")
@click.option("--release", is_flag=True, help="Make this tree the next released one, +bw.N.")
@LOCAL
@PATCHES
@JSON
def refresh(
    base: str | None, wheel: Path | None, release: bool, local: Path | None, root: Path | None, as_json: bool
) -> None:  # fmt: skip
    """Apply the series and record its tree id and file hashes in upstream.toml.

    What an open scratch tree has and no patch file yet is exported first. With --local nothing is recorded: yours
    are applied after ours, and the version they make is told.
    """
    from sglang_bw.fork import patchtree
    from sglang_bw.fork.refresh import refresh as run
    from sglang_bw.fork.refresh import try_local

    if local and release:
        raise click.UsageError("--release is for the series itself: local patches are never released")
    target = patchtree.Target(series_of(root, base), local)
    with steps(as_json) as progress:
        exported = patchtree.export(target, progress=progress) if patchtree.has_edits(target) else None
        series = series_of(root, base)
        if local:
            version, applied = try_local(series, local, wheel=wheel, progress=progress)
            facts: dict[str, Any] = {"version": version, "tree": applied.tree, "patched": applied.digests}
        else:
            pins, applied = run(series, wheel=wheel, release=release, progress=progress)
            facts = {"version": pins.full_version, "tree": pins.tree, "patched": pins.patched}
    if as_json:
        print_json(facts | ({"exported": export_facts(exported)} if exported else {}))
        return
    if exported:
        show_export(target, exported)
    count = len(applied.changes)
    out.print(f"{series.base}: tree {facts['tree']}, {count} files, version {facts['version']}", markup=False)


patches.add_command(new)
patches.add_command(export)
