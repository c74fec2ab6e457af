"""``upgrade``: one base to another, or back."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglang_bw.cli import completion
from sglang_bw.cli.console import out, print_json
from sglang_bw.cli.engine import report_of, show_engine
from sglang_bw.cli.interrupt import end_like_ctrl_c
from sglang_bw.cli.options import JSON, LOCAL, PATCHES, PYTHON

if TYPE_CHECKING:
    from sglang_bw.fork.changes import PatchChanges
    from sglang_bw.fork.upgrade import UpgradePlan
    from sglang_bw.recipes.effects import Effects


@click.command()
@click.argument("to", required=False, shell_complete=completion.bases)
@PYTHON
@click.option("--recipe", "recipes", multiple=True, type=click.Path(path_type=Path), metavar="FILE",
              help="A recipe of yours (default: those in the working directory and your configuration).")  # fmt: skip
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Default: as it is now.")
@click.option("--wheel", type=click.Path(path_type=Path), help="The built wheel (default: from dist/, or built).")
@click.option("--find-links", type=click.Path(path_type=Path), help="Take the built wheel from this directory.")
@LOCAL
@click.option("--drop-local", is_flag=True, help="Let the local patches of the installed engine go.")
@click.option("--torch-index", metavar="URL", help="Index of a CPU-only torch; its files have no pinned hashes.")
@click.option("--installer", type=click.Choice(["pip", "uv"]), default="pip", show_default=True)
@click.option("--no-driver-check", is_flag=True, help="Install the CUDA set where there is no driver.")
@PATCHES
@click.option("--dry-run", is_flag=True, help="Say what would change and how to return, and stop.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@JSON
def upgrade(
    to: str | None, recipes: tuple[Path, ...], drop_local: bool, no_driver_check: bool, root: Path | None,
    dry_run: bool, yes: bool, as_json: bool, **asked: Any,
) -> None:  # fmt: skip
    """Take an environment to another engine: TO is a base (0.5.23) or a full version (0.5.23+bw.1).

    First it lists dropped, changed and new patches, flags and evidence of your recipes that no longer hold, and how
    to return. Without TO, the newest base is taken; an older one is a downgrade.
    """
    from sglang_bw.fork.install_plan import Request
    from sglang_bw.fork.installers import tidy
    from sglang_bw.fork.series import patches_root
    from sglang_bw.fork.upgrade import plan_upgrade
    from sglang_bw.fork.upgrade import upgrade as carry_out
    from sglang_bw.recipes.effects import effects, user_recipes

    if asked["wheel"] and asked["find_links"]:
        raise click.UsageError("--wheel names the file, --find-links a place to look for it: give one of them")
    request = Request(**asked, check_driver=not no_driver_check)
    plan = plan_upgrade(patches_root(root), request, to, drop_local=drop_local)
    found = [effects(path, plan.before.base, plan.install.series.base) for path in recipes or user_recipes()]
    facts = _facts(plan, found)
    if not as_json and not plan.install.nothing_to_do:
        _announce(plan, found)
    if dry_run or plan.install.nothing_to_do:
        _say_done(plan, facts, dry_run=dry_run, as_json=as_json)
        if not dry_run:
            with report_of() as report:
                tidy(plan.install.environment, report)
        return
    if not yes:
        _ask(plan, as_json=as_json)
    end_like_ctrl_c(signal.SIGTERM)  # the installer is ended then
    with report_of() as report:
        there = carry_out(plan, report)
    if as_json:
        print_json({**facts, "verify": there.as_json()})
        return
    show_engine(there)
    _show_return(plan)


def _ask(plan: UpgradePlan, *, as_json: bool) -> None:
    if as_json or not sys.stdin.isatty():
        raise click.UsageError("nobody can be asked here: look at it with --dry-run, then say --yes")
    click.confirm(f"{plan.word} to {plan.install.version}?", abort=True, err=True)


def _say_done(plan: UpgradePlan, facts: dict[str, Any], *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_json(facts)
    elif plan.install.nothing_to_do:
        out.print(f"nothing to do: sglang {plan.before.version} is there, intact", markup=False)
    elif dry_run:
        out.print("dry run: every check passed, nothing was downloaded or changed", markup=False)


def _facts(plan: UpgradePlan, recipes: list[Effects]) -> dict[str, Any]:
    return {
        "python": str(plan.install.environment.executable),
        "what": plan.word,
        "from": plan.before.version,
        "from_state": plan.before.state.value,
        "to": plan.install.version,
        "device": plan.install.device,
        "steps": plan.install.steps,
        "replaces": plan.install.replaced,
        "patches": plan.patches.as_json(),
        "local_patches": plan.local.as_json(),
        "recipes": [effects.as_json() for effects in recipes],
        "return": {"commands": list(plan.back.commands), "note": plan.back.note},
    }


def _announce(plan: UpgradePlan, recipes: list[Effects]) -> None:
    install = plan.install
    out.print(f"{plan.word}: sglang {plan.before.version} -> {install.version}", style="bold", markup=False)
    out.print(f"in {install.environment.executable} (device {install.device})", markup=False)
    if plan.before.problems:
        files = ", ".join(path for _, path in plan.before.problems[:3])
        out.print(f"not as it was installed, and lost: {files}{_more(plan.before.problems, 3)}", markup=False)
    _show_patches("patches", plan.patches)
    _show_patches("local patches", plan.local)
    _show_recipes(recipes)
    if install.replaced:
        listed = [f"{name} {old} -> {new}" for name, (old, new) in sorted(install.replaced.items())]
        out.print(f"\npackages that change: {', '.join(listed[:6])}{_more(listed, 6)}", markup=False)
    for note in install.notes:
        out.print(f"note: {note}", markup=False)
    _show_return(plan)
    out.print("\nsteps", style="bold")
    for number, step in enumerate(install.steps, 1):
        out.print(f"  {number}. {step}", markup=False)


def _show_patches(title: str, changes: PatchChanges) -> None:
    rows = [("dropped", patch.file, patch.why) for patch in changes.dropped]
    rows += [("changed", new.file, f"{old.sha256[:8]} -> {new.sha256[:8]}") for old, new in changes.changed]
    rows += [("new", patch.file, patch.why) for patch in changes.added]
    if not rows and not changes.kept:
        return
    out.print(f"\n{title}", style="bold")
    for word, file, text in rows:
        out.print(f"  {word:8} {file}: {text}", markup=False)
    if changes.kept:
        out.print(f"  the same {len(changes.kept)}", markup=False)


def _show_recipes(recipes: list[Effects]) -> None:
    if not recipes:
        return
    out.print("\nyour recipes", style="bold")
    for recipe in recipes:
        out.print(f"  {recipe.path}{': nothing changes' if recipe.none else ''}", markup=False)
        if recipe.problem:
            out.print(f"    {recipe.problem}", markup=False)
        for translation in recipe.flags:
            instead = " ".join(token for flag in translation.flags for token in flag.tokens())
            advice = f" -> {instead}" if instead and translation.breaks else ""
            out.print(f"    {translation.fate.value}: --{translation.flag.name}{advice} ({translation.reason})",
                      markup=False)  # fmt: skip
        for text in recipe.stale:
            out.print(f"    stale evidence: {text}", markup=False)


def _show_return(plan: UpgradePlan) -> None:
    out.print("\nback again", style="bold")
    for command in plan.back.commands:
        out.print(f"  {command}", markup=False)
    if plan.back.note:
        out.print(f"  ({plan.back.note})", markup=False)


def _more(rows: Iterable[object], shown: int) -> str:
    more = len(list(rows)) - shown
    return f" and {more} more" if more > 0 else ""
