"""The part of `serve` that holds a launch against its plan, in under two seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_bw.cli import planning
from sglang_bw.cli.console import err
from sglang_bw.cli.planning import Wish
from sglang_bw.cli.typed import Typed
from sglang_bw.errors import OtherEngineError, PlanInputError, PlanRefusedError, UnknownConfigError, UnknownModelError
from sglang_bw.host.boards import Board
from sglang_bw.launch.command import Command
from sglang_bw.recipes import releases
from sglang_bw.recipes.hardware import Hardware
from sglang_bw.recipes.schema import Recipe

if TYPE_CHECKING:
    from sglang_bw.plan.plan import Plan
    from sglang_bw.plan.question import PlannedEngine
    from sglang_bw.plan.speculation import Cell

_MANY = 3


@dataclass(frozen=True)
class Launch:
    """A launch as `serve` has put it together.

    :ivar seen: the GPUs that it is for; ``None`` on a CPU, and when they could not be looked at.
    :ivar environ: what the engine inherits, where the launch does not say otherwise.
    :ivar typed: what the user asked for; ``None`` for the recipe as it is.
    """

    recipe: Recipe
    command: Command
    engine: PlannedEngine
    seen: tuple[Hardware, Board] | None
    environ: Mapping[str, str] = field(default_factory=dict)
    typed: Typed | None = None

    @property
    def plan(self) -> str:
        """The line that shows its whole plan."""
        return (self.typed or Typed(self.recipe.id)).plan(self.seen)


def check(launch: Launch, *, force: bool, said: set[str] | None = None) -> Plan | None:
    """Refuse what will not run or not fit; warnings and what could not be planned are printed.

    :param said: warnings that were printed for another launch, and are not printed again; gets those of this one.
    :return: the plan; ``None`` without GPUs, or when nothing is known of the model.
    :raises OtherEngineError: a flag comes with a patch that this engine does not have.
    :raises PlanRefusedError: a rule, or the engine when it was asked before, says that it will not run.
    :raises PlanDoesNotFitError: the memory of the GPUs is too small.
    :raises PlanInputError: the recipe is for GPUs, and the launch for a CPU.
    """
    from sglang_bw.plan import plan as plans

    if misplaced := only_for_gpus(launch.recipe, launch.command):
        if not force:
            raise misplaced
        err.print(f"warning: {misplaced.message} (--force)", style="yellow", markup=False)
    _check_series(launch)
    if launch.seen is None:
        _check_flags(launch, force=force)
        _tell_environment(launch)
        return None
    machine, board = launch.seen
    question = planning.of_command(
        launch.recipe,
        launch.command.flags,
        planning.judged(launch.environ, launch.command),
        machine,
        board,
        launch.engine,
        wish=Wish(launch.recipe.id),
    )
    try:
        made = plans.make(question, ask="cached", force=True)
    except (UnknownModelError, UnknownConfigError) as error:
        _check_flags(launch, force=force)
        _tell_environment(launch)
        err.print(f"note: not planned: {error.message}", style="yellow", markup=False)
        return None
    _tell(made, launch.plan, set() if said is None else said)
    if refusal := made.error():
        if not force:
            refusal.hint = f"`{launch.plan}` shows it all; --force goes on all the same."
            raise refusal
        err.print(f"warning: {refusal.message} (--force)", style="yellow", markup=False)
    return made


def only_for_gpus(recipe: Recipe, command: Command) -> PlanInputError | None:
    """Return what is wrong when a recipe for GPUs, with nothing said of a CPU, would start on one."""
    wanted = recipe.hardware
    meant = any(override.when.device == "cpu" for override in recipe.overrides)
    if command.device != "cpu" or meant or not (wanted.arch or wanted.board or wanted.gpus):
        return None
    return PlanInputError(
        f"the recipe {recipe.id} is for {' or '.join(wanted.board or wanted.arch) or 'GPUs'}, "
        "and this launch for a CPU",
        hint="`sglang-bw doctor` says why the engine sees no GPU here; --device cuda takes one for granted; "
        "--force goes on all the same.",
    )


def loses(made: Plan | None, recipe: Recipe) -> Cell | None:
    """Return the cell in which the recipe's first workload loses by speculation, ``None`` when it does not."""
    from sglang_bw.plan.speculation import Verdict

    if made is None or made.pays is None or not recipe.workloads:
        return None
    first = recipe.workloads[0]
    cell = made.pays.at(first.context, first.concurrency)
    return cell if cell and cell.verdict is Verdict.LOSES else None


def _tell(made: Plan, line: str, said: set[str]) -> None:
    warnings = [f"{finding.rule}: {finding.reason}" for finding in made.findings if finding.severity == "warning"]
    warnings += [found.reason for found in made.translations if not found.breaks]
    warnings += [f"the recipe's machine: {misfit}" for misfit in made.misfits]
    if made.ledger.verdict == "tight":
        warnings += made.ledger.reasons
    warnings = [text for text in warnings if text not in said]
    said.update(warnings)
    for text in warnings[:_MANY]:
        err.print(f"warning: {text}", style="yellow", markup=False)
    if len(warnings) > _MANY:
        rest = len(warnings) - _MANY
        err.print(f"and {rest} more: `{line}`", style="yellow", markup=False)


def _tell_environment(launch: Launch) -> None:
    """Say what rules have against the environment alone, of a launch that is not planned."""
    from sglang_bw.plan.rules import check as known
    from sglang_bw.plan.rules.facts import Facts

    environ = planning.judged(launch.environ, launch.command)
    for finding in known.check(Facts({}, {}, environ, engine=launch.engine.version)):
        err.print(f"warning: {finding.rule}: {finding.reason}", style="yellow", markup=False)


def _check_series(launch: Launch) -> None:
    """Refuse flags that our patches add when the engine is from before them, or stock; it would end at its parser."""
    engine = launch.engine
    for flag in launch.command.flags:
        wanted = releases.patch_of(flag.key)
        if wanted and wanted not in engine.patches:
            raise OtherEngineError(
                f"--{flag.name} comes with the patch {wanted}, which the engine {engine.version} does not have",
                hint="`sglang-bw install` installs the newest; or leave the flag out.",
            )


def _check_flags(launch: Launch, *, force: bool) -> None:
    """Refuse flags that this release does not take; the engine would say less about them."""
    version = launch.engine.version
    if not releases.known(version):
        return
    found = releases.translate_all(launch.command.flags, None, version)
    broken = [translation for translation in found if translation.breaks]
    if not broken:
        return
    message = "\n".join(["the engine does not take these flags:", *(f"  {one.reason}" for one in broken)])
    if not force:
        raise PlanRefusedError(message, hint="Change them behind '--' or in the recipe; --force goes on all the same.")
    err.print(f"warning: {message} (--force)", style="yellow", markup=False)
