"""Results of `probe allreduce` for a plan: the stored one of this host, or the one that the user names."""

from __future__ import annotations

import os
from pathlib import Path

from sglang_bw.cli import planning
from sglang_bw.errors import CheckpointError, PlanInputError, SpeculationInputError
from sglang_bw.host import probes
from sglang_bw.plan import models
from sglang_bw.plan.question import Question, asked
from sglang_bw.plan.settings import parallel_of
from sglang_bw.plan.speculation import probe
from sglang_bw.plan.speculation.probe import Reduced
from sglang_bw.recipes import flags


def with_stored(question: Question) -> tuple[Question, Path | None]:
    """Return the stored result of `probe allreduce` for a launch on this host, and the question with a note of it.

    A plan for other GPUs than those here gets none; one that cannot be used is passed over, and a note says why.
    """
    key, launch = planning.key_here(question), _reduced(question)
    if key is None or launch is None:
        return question, None
    place = probes.place("allreduce", key, f"{launch.gpus}x{launch.hidden}", launch.device)
    if not place.is_file():
        return question, None
    try:
        probe.check_stored(place, launch)
    except SpeculationInputError as error:
        return planning.noted(question, f"the all-reduces measured here are not used: {error.message}"), None
    return planning.noted(question, f"all-reduces: measured here, {place}"), place


def with_named(question: Question, path: Path) -> Question:
    """Return the question with a note of what a result that the user names was measured with and the launch has not."""
    try:
        launch = _reduced(question)
        other = probe.unlike(path, launch) if launch else ""
    except SpeculationInputError:  # the plan says so itself, where it wants the file
        return question
    return planning.noted(question, f"warning: {path} was measured otherwise: {other}") if other else question


def _reduced(question: Question) -> Reduced | None:
    """Return what the all-reduces of a launch are; ``None`` without speculation, or where the plan will say more."""
    if not flags.has(question.flags, "speculative-algorithm"):
        return None
    try:
        shape = models.shape(flags.value(question.flags, "model-path") or "", question.recipe.target)
    except (CheckpointError, PlanInputError):
        return None
    env = {**question.env, **os.environ}  # the shell's wins, as in `serve`
    of_nccl = {name: value for name, value in env.items() if name.startswith("NCCL_")}
    return Reduced(parallel_of(asked(question.flags)).tp, shape.hidden, question.machine.device, of_nccl)
