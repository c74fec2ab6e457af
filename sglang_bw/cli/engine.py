"""``install`` and ``verify``."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape
from rich.status import Status

from sglang_bw.cli.console import err, out, print_json
from sglang_bw.cli.interrupt import end_like_ctrl_c
from sglang_bw.cli.options import BASE, LOCAL, PYTHON

if TYPE_CHECKING:
    from sglang_bw.errors import BwError
    from sglang_bw.fork.install_plan import Request
    from sglang_bw.fork.installers import Report
    from sglang_bw.fork.verify import Installation

_SHOWN = 20
_JSON = click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")


class _ConsoleReport:
    """Steps as lines, what goes on within a step as one live line on a terminal."""

    def __init__(self, status: Status | None) -> None:
        self._status = status
        self._started = time.monotonic()
        self._step = ""

    def step(self, text: str) -> None:
        self._step = text
        err.print(f"- {text}", markup=False)
        self.detail("")

    def detail(self, text: str) -> None:
        if self._status:
            seconds = time.monotonic() - self._started
            line = f"{self._step} ({seconds:.0f} s)  {text}"
            self._status.update(f"[dim]{escape(line[: err.width - 4])}[/dim]")


class _NoReport:
    def step(self, text: str) -> None:
        pass

    def detail(self, text: str) -> None:
        pass


@contextmanager
def report_of(*, quiet: bool = False) -> Iterator[Report]:
    """Show the steps of an install, and what goes on within one."""
    if quiet:
        yield _NoReport()
        return
    if not err.is_terminal:
        yield _ConsoleReport(None)
        return
    with err.status("") as status:
        yield _ConsoleReport(status)


@click.command()
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
              help="Which set of dependencies.")  # fmt: skip
@PYTHON
@click.option("--rollback", is_flag=True, help="Put stock SGLang back; nothing else is touched.")
@click.option(
    "--wheel", type=click.Path(path_type=Path), help="The built wheel (default: from dist/, else it is built)."
)
@click.option("--find-links", type=click.Path(path_type=Path), help="Take the built wheel from this directory.")
@BASE
@click.option("--torch-index", metavar="URL", help="Index of a CPU-only torch; its files have no pinned hashes.")
@click.option("--installer", type=click.Choice(["pip", "uv"]), default="pip", show_default=True)
@click.option("--no-driver-check", is_flag=True, help="Install the CUDA set where there is no driver (image builds).")
@LOCAL
@click.option("--patches", "root", type=click.Path(path_type=Path), help="Directory with one folder per base.")
@click.option("--dry-run", is_flag=True, help="Check everything, say what would be done, and stop.")
@_JSON
def install(rollback: bool, root: Path | None, dry_run: bool, as_json: bool, **asked: Any) -> None:
    """Install the patched engine and its locked dependencies, or with --rollback stock SGLang, then verify."""
    from sglang_bw.fork.install_plan import Request
    from sglang_bw.fork.series import patches_root

    _check_usage(rollback=rollback, **asked)
    check_driver = not asked.pop("no_driver_check")
    request = Request(**asked, check_driver=check_driver)
    run = _roll_back if rollback else _install
    run(patches_root(root), request, dry_run=dry_run, as_json=as_json)


def _check_usage(*, rollback: bool, **asked: Any) -> None:
    if rollback and (asked["wheel"] or asked["find_links"] or asked["torch_index"] or asked["local"]):
        raise click.UsageError(
            "--rollback installs upstream's own wheel: leave out --wheel, --find-links, --torch-index, --local"
        )
    if asked["wheel"] and asked["find_links"]:
        raise click.UsageError("--wheel names the file, --find-links a place to look for it: give one of them")
    if asked["torch_index"] and asked["device"] == "cuda":
        raise click.UsageError("--torch-index is for a CPU-only torch: leave it out, or take --device cpu")


def _install(root: Path, request: Request, *, dry_run: bool, as_json: bool) -> None:
    from sglang_bw.fork.install import install as carry_out
    from sglang_bw.fork.install_plan import plan_install

    plan = plan_install(root, request)
    facts = {
        "python": str(plan.environment.executable),
        "device": plan.device,
        "version": plan.version,
        "nothing_to_do": plan.nothing_to_do,
        "steps": plan.steps,
        "replaces": plan.replaced,
        "notes": plan.notes,
    }
    if not as_json:
        _announce(f"{plan.environment.executable} (Python {plan.environment.python}), device {plan.device}", plan.steps)
        for name, (old, new) in sorted(plan.replaced.items()):
            err.print(f"  replaces {name} {old} with {new}", markup=False)
        for note in plan.notes:
            err.print(f"note: {note}", markup=False)
    if dry_run:
        _say_dry_run(facts, as_json=as_json)
        return
    if plan.nothing_to_do and not as_json:
        count = len(plan.lock.packages)
        out.print(f"nothing to do: the engine is the built one, and {count} locked packages are there", markup=False)
    end_like_ctrl_c(signal.SIGTERM)  # the installer is ended then
    with report_of() as report:
        found = carry_out(plan, report)
    _finish(facts, found, error=found.error(), as_json=as_json)


def _roll_back(root: Path, request: Request, *, dry_run: bool, as_json: bool) -> None:
    from sglang_bw.fork.rollback import plan_rollback, roll_back

    plan = plan_rollback(root, request)
    facts = {
        "python": str(plan.environment.executable),
        "version": plan.version,
        "nothing_to_do": plan.nothing_to_do,
        "steps": plan.steps,
        "notes": plan.notes,
    }
    if not as_json:
        _announce(f"{plan.environment.executable} (Python {plan.environment.python}), back to stock", plan.steps)
        for note in plan.notes:
            err.print(f"note: {note}", markup=False)
    if dry_run:
        _say_dry_run(facts, as_json=as_json)
        return
    if plan.nothing_to_do and not as_json:
        out.print(f"nothing to do: stock SGLang {plan.version} is there", markup=False)
    end_like_ctrl_c(signal.SIGTERM)
    with report_of() as report:
        found = roll_back(plan, report)
    _finish(facts, found, error=None, as_json=as_json)


def _announce(where: str, steps: list[str]) -> None:
    err.print(f"into {where}", markup=False)
    for number, step in enumerate(steps, 1):
        err.print(f"  {number}. {step}", markup=False)


def _say_dry_run(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(facts)
    else:
        out.print("dry run: every check passed, nothing was downloaded or changed", markup=False)


def _finish(facts: dict[str, Any], found: Installation, *, error: BwError | None, as_json: bool) -> None:
    if as_json:
        print_json({**facts, "verify": found.as_json()})
    else:
        show_engine(found)
    if error:
        raise error


@click.command()
@PYTHON
@click.option("--tree", type=click.Path(path_type=Path), help="Look at this unpacked wheel instead.")
@_JSON
def verify(python: Path | None, tree: Path | None, as_json: bool) -> None:
    """Say which engine is installed, and whether its files are the recorded ones.

    Exit code 0: the patched engine, intact. 20: none installed. 21: stock. 22: edited, incomplete or shadowed.
    """
    from sglang_bw.fork.verify import inspect

    found = inspect(python, tree=tree)
    if as_json:
        print_json(found.as_json())
    else:
        show_engine(found)
    if error := found.error():
        raise error


def show_engine(found: Installation) -> None:
    """Print what was found, for people."""
    colour = "green" if found.intact else "yellow" if found.state in ("intact", "stock") else "red"
    series = f", base {found.base}, series {found.series}" if found.series else ""
    out.print(f"[{colour}]{found.state.value}[/{colour}]: sglang {escape(found.version or '-')}{escape(series)}")
    if found.location:
        out.print(f"in {found.location}", markup=False)
    if found.sources:
        out.print(f"installed from sources: {found.sources}", markup=False)
    if found.patches:
        _show_patches(found)
    for kind, path in found.problems[:_SHOWN]:
        out.print(f"  {kind}: {path}", markup=False)
    if len(found.problems) > _SHOWN:
        out.print(f"  and {len(found.problems) - _SHOWN} more (--json lists all)", markup=False)
    if found.shadowed_by:
        out.print(f"shadowed: Python imports {found.shadowed_by} instead", markup=False)
    if found.added:
        some = ", ".join(found.added[:3]) + (", ..." if len(found.added) > 3 else "")
        out.print(f"{len(found.added)} files of nobody's record in sglang/: {some}", markup=False)


def _show_patches(found: Installation) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("patch", overflow="fold")
    table.add_column("upstream status", overflow="fold")
    for patch in found.patches:
        table.add_row(escape(patch.file), escape(patch.upstream_status))
    for patch in found.local.patches if found.local else ():
        table.add_row(escape(patch.file), "local: no part of the series")
    out.print(table)
