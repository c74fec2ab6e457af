"""What can go wrong, one exit code a class.

Every message says what happened, the likely cause and the next command; ``cli`` prints it and exits with
``exit_code``. Exit code 1 is left to faults of this tool, 2 to wrong usage (click's own), 130 to an interrupt.
"""

from __future__ import annotations

from typing import ClassVar


class BwError(Exception):
    """Base of every error a user can cause or cure.

    :param message: what happened, in one sentence.
    :param hint: the likely cause and the next command, shown on a line of its own.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class LintError(BwError):
    """The series, a patch or its trailers break the format; carries every finding."""

    exit_code = 10

    def __init__(self, findings: list[str], *, hint: str = "") -> None:
        self.findings = findings
        count = f"{len(findings)} finding" + ("s" if len(findings) != 1 else "")
        super().__init__("\n".join([f"the patch series has {count}:", *(f"  {f}" for f in findings)]), hint=hint)


class PatchApplyError(BwError):
    """A hunk does not apply exactly, or the patched files are not the recorded ones."""

    exit_code = 11


class UnknownBaseError(BwError):
    """No series exists for the upstream version, Python or platform asked for."""

    exit_code = 12


class HashMismatchError(BwError):
    """A wheel or a download is not the one that is pinned."""

    exit_code = 13


class BadWheelError(BwError):
    """The file is not a wheel, is truncated, of another release, or unsafe to unpack."""

    exit_code = 14


class DownloadError(BwError):
    """The upstream wheel or a dependency cannot be fetched."""

    exit_code = 15


class GitError(BwError):
    """Git is missing, too old, or failed in a way nobody expects."""

    exit_code = 16


class OutputError(BwError):
    """The result cannot be written: read-only directory, full disk."""

    exit_code = 17


class RefusedError(BwError):
    """The target environment must not be changed (checked before any download)."""

    exit_code = 18


class InstallError(BwError):
    """The installer failed after all checks had passed."""

    exit_code = 19


class NotInstalledError(BwError):
    """No sglang is installed where one is needed."""

    exit_code = 20


class StockEngineError(BwError):
    """The installed engine is upstream's, without the series."""

    exit_code = 21


class EditedEngineError(BwError):
    """Files of the installed engine differ from the record, are missing, or are shadowed."""

    exit_code = 22


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


class LoadError(BwError):
    """A server died, answered with an error, broke its stream or never answered while it was measured."""

    exit_code = 70


class ArmError(BwError):
    """An arm of a comparison is not what it is meant to be."""

    exit_code = 71


class PromptsError(BwError):
    """A prompt set is missing, empty, malformed or beyond the context."""

    exit_code = 72


class RefusedMeasurementError(BwError):
    """The measurement would mislead: random tokens for an accept length."""

    exit_code = 73


class InvalidRunError(BwError):
    """A run came to its end, but a guard says that its numbers must not be used."""

    exit_code = 74


class UnreadableRunError(BwError):
    """A run file is missing, damaged or of another version."""

    exit_code = 75
