"""Errors of probes, comparisons, the ledger and tuning."""

from __future__ import annotations

from sglang_bw.errors.base import BwError


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
    """An arm of a comparison is not what it is meant to be, or says of itself what SGLang does not say."""

    exit_code = 71


class PromptsError(BwError):
    """A prompt set is missing, empty, malformed or beyond the context."""

    exit_code = 72


class RefusedMeasurementError(BwError):
    """The measurement would mislead: random tokens for an accept length, or fewer prompts than requests at a time."""

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
