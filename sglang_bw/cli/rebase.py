"""``rebase``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglang_bw.cli import completion
from sglang_bw.cli.console import out, print_json, steps
from sglang_bw.cli.interrupt import end_like_ctrl_c
from sglang_bw.cli.options import LOCAL, PATCHES

if TYPE_CHECKING:
    from sglang_bw.fork.rebase.report import Report

# Exit codes of --check.
NEW_AND_CLEAN = 43
NEW_AND_NEEDS_A_PERSON = 44

_STYLES = {"clean": "green", "offset": "green", "merged": "cyan", "partly merged": "yellow", "inapplicable": "dim"}


@click.command()
@click.argument("new", required=False)
@click.option(
    "--from", "base", help="Base to move (default: the newest older than NEW).", shell_complete=completion.bases
)
@click.option("--wheel", type=click.Path(path_type=Path), help="NEW's wheel as a file, for hosts without a network.")
@click.option("--continue", "action", flag_value="continue", help="Go on: take what you made of the patch in the tree.")
@click.option("--skip", "action", flag_value="skip", help="Leave the patch that needs you out of the new series.")
@click.option("--abort", "action", flag_value="abort", help="Throw the open rebase away; patches/ stays as it is.")
@click.option("--check", "action", flag_value="check", help="What would newer releases (or NEW) give? Writes nothing.")
@click.option("--test", is_flag=True, help="Run the patches' tests on both engines before anything is written.")
@click.option("--keep-going", is_flag=True, help="Leave patches that need a person out, and write the rest.")
@click.option("--append", is_flag=True, help="NEW has a series: put the patches that it lacks on top.")
@click.option("--dry-run", is_flag=True, help="Report on NEW and write nothing.")
@click.option("--markdown", is_flag=True, help="The report as markdown.")
@LOCAL
@click.option(
    "--out", "place", type=click.Path(path_type=Path), help="Folder for your moved patches (default: NEW in DIR)."
)
@PATCHES
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")
def rebase(
    new: str | None,
    base: str | None,
    wheel: Path | None,
    action: str | None,
    test: bool,
    keep_going: bool,
    append: bool,
    dry_run: bool,
    markdown: bool,
    local: Path | None,
    place: Path | None,
    root: Path | None,
    as_json: bool,
) -> None:
    """Move the series to the SGLang release NEW, forwards or back.

    With --local DIR your own patches move, on top of ours; ours go first where NEW has no series yet.
    """
    from sglang_bw.fork.rebase import job
    from sglang_bw.fork.rebase.own import Own
    from sglang_bw.fork.series import patches_root

    _require_sense(new, base, action, wheel)
    _require_sense_of_local(local, place, action)
    end_like_ctrl_c(signal.SIGTERM)  # tests that run, and scratch folders, end then
    found = patches_root(root)
    options = job.Options(test=test, keep_going=keep_going, append=append, dry_run=dry_run)
    own = Own(local, place) if local else None
    if action == "abort":
        versions = job.abort(found, own, new)
        _say({"aborted": versions}, f"the rebase from {versions[0]} to {versions[1]} is gone", as_json)
        return
    with steps(as_json) as progress:
        if action == "check":
            _show_check(job.check(found, new, base, wheel, progress), as_json, markdown)
        if own and action in ("continue", "skip"):
            reports = [job.go_on_own(found, own, progress, skip=action == "skip", new=new)]
        elif own:
            reports = job.start_own(found, new or "", base, own, options, progress)
        elif action in ("continue", "skip"):
            reports = [job.go_on(found, wheel, progress, test=test, skip=action == "skip", new=new)]
        else:
            reports = [job.start(found, new or "", base, wheel, options, progress)]
    _end(reports, as_json, markdown)


def _end(reports: list[Report], as_json: bool, markdown: bool) -> None:
    """Show what was moved, the last of it deciding how the command ends."""
    from sglang_bw.errors import RebaseStoppedError
    from sglang_bw.fork.rebase import job

    *before, report = reports
    if as_json:
        print_json(report.as_json() | ({"before": [one.as_json() for one in before]} if before else {}))
        if report.needs_a_person and not report.is_dry:
            raise SystemExit(RebaseStoppedError.exit_code)
        return
    for one in reports:
        _show(one, False, markdown)
    job.require_finished(report)


# What an open rebase knows already, or what writes nothing has no use for: silently ignored, it would mislead.
_KNOWN = ("base", "append", "keep_going", "dry_run")
_POINTLESS = {
    "continue": _KNOWN,
    "skip": _KNOWN,
    "abort": (*_KNOWN, "wheel", "test", "place", "markdown"),
    "check": ("append", "keep_going", "test"),
}


def _require_sense(new: str | None, base: str | None, action: str | None, wheel: Path | None) -> None:
    if action is None and not new:
        raise click.UsageError("name the release to move to, for example `sglang-bw rebase 0.5.24`")
    if odd := _given(*_POINTLESS.get(action or "", ())):
        raise click.UsageError(f"--{action} does not go with {', '.join(odd)}: leave it out")
    if action == "check" and wheel and not new:
        raise click.UsageError("--wheel is the wheel of one release: name it")
    if new and new == base:
        raise click.UsageError(f"{new} is where --from says that the series is: name another release")
    if len(_given("as_json", "markdown")) > 1:
        raise click.UsageError("--markdown and --json are two forms of the report: give one of them")


def _given(*names: str) -> list[str]:
    """Return those of this command's options that were given, as a user writes them."""
    context = click.get_current_context()
    return [param.opts[0] for param in context.command.params if param.name in names and context.params[param.name]]


def _require_sense_of_local(local: Path | None, place: Path | None, action: str | None) -> None:
    if place and not local:
        raise click.UsageError("--out is the place of a local series: name it with --local DIR")
    if local and (_given("wheel", "test", "append") or action == "check"):
        raise click.UsageError(
            "--local moves your patches between bases that have a series: leave out --wheel, --test, --append and"
            " --check (--dry-run reports and writes nothing)"
        )


def _say(value: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        print_json(value)
    else:
        out.print(text, markup=False)


def _show_check(reports: list[Report], as_json: bool, markdown: bool) -> None:
    """Print what newer releases would give and exit with the code that says it."""
    needs = any(report.needs_a_person for report in reports)
    code = NEW_AND_NEEDS_A_PERSON if needs else NEW_AND_CLEAN if reports else 0
    if as_json:
        print_json({"releases": [report.as_json() for report in reports], "needs_a_person": needs})
    elif not reports:
        out.print("no release is newer than the newest base")
    for report in [] if as_json else reports:
        _show(report, False, markdown)
    raise SystemExit(code)


def _show(report: Report, as_json: bool, markdown: bool) -> None:
    if as_json:
        print_json(report.as_json())
    elif markdown:
        out.print(report.as_markdown(), markup=False)
    else:
        _table(report)


def _table(report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    from sglang_bw.fork.rebase.report import word_of

    table = Table(title=f"SGLang {report.base} to {report.new}", title_justify="left")
    for column in ("patch", "word", "what says so"):
        table.add_column(column, overflow="fold")
    for outcome in report.outcomes:
        style = _STYLES.get(outcome.word.value, "red")
        table.add_row(outcome.patch.removesuffix(".patch"), Text(word_of(outcome), style), Text(outcome.says))
    out.print(table)
    out.print(f"{report.summary} ({report.seconds:.1f} s)", markup=False)
    if report.stopped:
        _conflicts(report)
    if report.folder:
        out.print(
            f"wrote {report.folder}; a build of it gave {report.wheel}, content digest {report.digest}", markup=False
        )
    if report.folder and not report.is_local:
        out.print(f"tests: {report.tested} patches" if report.tested else "tests: not run (--test)", markup=False)
    out.print("\nnext", style="dim")
    for step in report.next_steps:
        out.print(f"  {step}", markup=False)


def _conflicts(report: Report) -> None:
    stopped = report.stopped
    assert stopped is not None
    out.print(f"\n{stopped.patch}: {stopped.word}", style="bold", markup=False)
    for hunk in stopped.hunks:
        says = f": {hunk.says}" if hunk.says else ""
        proof = f" ({hunk.proof})" if hunk.proof else ""
        out.print(f"  hunk {hunk.number} {hunk.path}:{hunk.line} {hunk.where}: {hunk.word}{says}{proof}", markup=False)
    for conflict in stopped.conflicts:
        out.print(f"\n  {conflict.path}:{conflict.line}: {conflict.why}", style="yellow", markup=False)
        for side, text in (("upstream", conflict.theirs), ("patch", conflict.ours)):
            for line in text.splitlines():
                out.print(f"    {side:>8} | {line}", markup=False)
