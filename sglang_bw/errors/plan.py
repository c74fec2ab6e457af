"""Errors of what is known before a load."""

from __future__ import annotations

from sglang_bw.errors.base import BwError


class PlanDoesNotFitError(BwError):
    """The launch needs more GPU memory than there is."""

    exit_code = 50


class PlanRefusedError(BwError):
    """A rule, or the engine's own resolution, refuses the launch."""

    exit_code = 51


class PlanInputError(BwError):
    """The launch contradicts the machine, or no configuration of a model is at hand."""

    exit_code = 52


class UnknownModelError(PlanInputError):
    """No configuration of a model is at hand: neither on this disk nor in a recipe."""


class ResolverError(BwError):
    """The engine's argument resolution did not give an answer."""

    exit_code = 53


class OtherEngineError(BwError):
    """The recipe is for another release of the engine."""

    exit_code = 54


class UnknownBoardError(BwError):
    """Nobody knows a GPU of that name, or the number of GPUs makes no sense."""

    exit_code = 55


class CheckpointError(BwError):
    """A model's configuration or the headers of its weights cannot be read, are cut off, or contradict each other.

    Or the numbers of a launch do: a size that divides no heads, a share above 1.
    """

    exit_code = 56


class UnknownConfigError(CheckpointError):
    """A config.json in which the plan does not find what it needs; the engine may know more."""


class ReplayError(BwError):
    """A CSV for ``plan --replay`` cannot be read, or has none of the known column forms."""

    exit_code = 57


class SpeculationInputError(BwError):
    """Measurements given to judge speculation are malformed or impossible."""

    exit_code = 58
