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
    what: ClassVar[str] = "the patch series"

    def __init__(self, findings: list[str], *, hint: str = "") -> None:
        self.findings = findings
        count = f"{len(findings)} finding" + ("s" if len(findings) != 1 else "")
        super().__init__("\n".join([f"{self.what} has {count}:", *(f"  {f}" for f in findings)]), hint=hint)


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


class LocalSeriesError(LintError):
    """A local series is not there, or breaks the format; carries every finding."""

    exit_code = 23
    what = "the local series"


class LocalPatchesLostError(BwError):
    """An upgrade would leave out the local patches of the installed engine."""

    exit_code = 24


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


class RebaseStoppedError(BwError):
    """A patch needs a person: the scratch tree stays open."""

    exit_code = 40


class RebaseOpenError(BwError):
    """A rebase is open already, none is open, or another process works on it."""

    exit_code = 41


class ScratchError(BwError):
    """A scratch repository is missing, damaged, or not in the state it must be in."""

    exit_code = 42


class ReleaseError(BwError):
    """Not a release of SGLang, or one that upstream has yanked."""

    exit_code = 45


class DriftError(BwError):
    """A patch file was edited by hand: it is not what git exports from it."""

    exit_code = 46


class RebaseFailedError(BwError):
    """The moved series did not pass its own checks; nothing was written."""

    exit_code = 47


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
    """A model's configuration or the headers of its weights cannot be read, are cut off, or contradict each other."""

    exit_code = 56


class UnknownConfigError(CheckpointError):
    """A config.json in which the plan does not find what it needs; the engine may know more."""


class ReplayError(BwError):
    """A CSV for ``plan --replay`` cannot be read, or has none of the known column forms."""

    exit_code = 57


class SpeculationInputError(BwError):
    """Measurements given to judge speculation are malformed or impossible."""

    exit_code = 58


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


class ProbeError(BwError):
    """A probe cannot measure: GPUs, interpreter or model are not there, or nothing that it tried worked."""

    exit_code = 66


class AllReduceError(BwError):
    """An all-reduce gave a wrong sum, hung or died."""

    exit_code = 67


class RoundFitError(BwError):
    """Throughput is no straight line in the accept length: what was measured is no cost of a round."""

    exit_code = 68


class PolicyError(BwError):
    """The engine has no policy to simulate, or a policy misses its bar."""

    exit_code = 69


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


class LedgerError(BwError):
    """The ledger is damaged, locked for too long, or was written by a newer release of this tool."""

    exit_code = 76


class UnknownEntryError(BwError):
    """The ledger has no such entry, or more than one that begins like this."""

    exit_code = 77


class TuneError(BwError):
    """A tuning has nothing to search, nothing that started, or another search under its name."""

    exit_code = 78


class WatchError(BwError):
    """There is no server to watch at that address, or it answers like something else."""

    exit_code = 79


class BundleError(BwError):
    """A bundle cannot be made as asked: nothing of that name to leave out, a package without a wheel, an odd model."""

    exit_code = 80


class BundleDamagedError(BwError):
    """A bundle is incomplete or damaged: a part or file is missing, too long, or not what its checksums say."""

    exit_code = 81


class BundleUnsafeError(BwError):
    """An archive has a member that an unpacker could be tricked with: a path that leads out, a link, a device."""

    exit_code = 82


class BundleDigestError(BwError):
    """A bundle is not the one that was expected."""

    exit_code = 83


class ApiKeyError(BwError):
    """The API key cannot be read, or is none."""

    exit_code = 90


class UnsafeLaunchError(BwError):
    """The launch would be open to everybody, or run code that anybody may change."""

    exit_code = 91


class UnknownServerError(BwError):
    """No server of that name was started here, or several begin like this."""

    exit_code = 92


class ServerStaysError(BwError):
    """A server did not end, although it was killed."""

    exit_code = 93


class EmitError(BwError):
    """The launch cannot be written as such a deployment file."""

    exit_code = 94
