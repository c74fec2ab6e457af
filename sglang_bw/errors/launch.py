"""Errors of recipes, models, hosts and engines that start."""

from __future__ import annotations

from sglang_bw.errors.base import BwError


class UnknownRecipeError(BwError):
    """Neither a recipe, nor a YAML file, nor a model."""

    exit_code = 30


class RecipeError(BwError):
    """A recipe does not follow the schema."""

    exit_code = 31


class ModelFilesError(BwError):
    """Weights, tokenizer or configuration are missing or incomplete."""

    exit_code = 32


class PortInUseError(BwError):
    """Another process owns the port."""

    exit_code = 33


class EngineStartError(BwError):
    """The engine died, or did not answer, before it was ready."""

    exit_code = 34


class EngineOutputError(BwError):
    """The engine answers, but its output is broken (NaN, one token repeated)."""

    exit_code = 35


class KernelError(BwError):
    """A Triton kernel of the engine needs more than the GPU has, does not compile for it, or could not be checked."""

    exit_code = 36


class DoctorError(BwError):
    """A finding of the host's examination keeps a server from working."""

    exit_code = 60


class DoctorWarningError(BwError):
    """A finding of the host's examination is a warning, and warnings were to count."""

    exit_code = 61


class GpuSelectionError(BwError):
    """A GPU that was asked for is not here, or there are fewer than the launch needs."""

    exit_code = 62


class GpuBusyError(BwError):
    """Another process holds the memory that the launch needs."""

    exit_code = 63


class FetchError(BwError):
    """Weights cannot be fetched: the hub cannot be reached or refuses, or the disk is too small."""

    exit_code = 64


class ToolchainError(BwError):
    """The driver is too old, or what the first start compiles with is missing."""

    exit_code = 65
