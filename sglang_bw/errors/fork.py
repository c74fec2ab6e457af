"""Errors of the patches, the wheels and the installed engine."""

from __future__ import annotations

from typing import ClassVar

from sglang_bw.errors.base import BwError


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
