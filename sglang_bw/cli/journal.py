"""What is asked of the ledger before a start, and what starts, runs and probes tell it; never a reason not to go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_bw.cli.console import err
from sglang_bw.errors import BwError, EngineStartError
from sglang_bw.launch.journal import Attempt
from sglang_bw.launch.probe.journal import Probe
from sglang_bw.launch.server import InterruptedStartError, PortLostError, Server, StartTimeoutError
from sglang_bw.launch.warmup import Report
from sglang_bw.ledger.entry import Entry
from sglang_bw.ledger.failure import FailureClass
from sglang_bw.ledger.runfile import read
from sglang_bw.ledger.store import Ledger

# The first line of evidence is the cause; more than this of it is for `ledger show`.
_MOST_CHARS = 200


class Journal:
    """What the ledger knows and learns of one launch."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt

    def announce(self) -> None:
        """Say so when exactly this launch has failed on this host, and has not worked since."""
        try:
            with Ledger() as ledger:
                failures = ledger.known_failures(self.attempt.launch, self.attempt.host.fingerprint)
        except BwError as error:
            err.print(f"warning: the ledger was not asked: {error.message}", style="yellow", markup=False)
            return
        if failures:
            err.print(known_failure(failures), style="yellow", markup=False)

    @contextmanager
    def watching(self, running: Server) -> Iterator[None]:
        """Record why the engine did not come up."""
        try:
            yield
        except InterruptedStartError:
            _write(self.attempt.interrupted(running))
            raise
        except StartTimeoutError as error:
            _write(self.attempt.died(running, error.message, failure=FailureClass.HANG))
            raise
        except PortLostError as error:
            _write(self.attempt.interrupted(running, error.message))
            raise
        except EngineStartError:
            _write(self.attempt.died(running, running.death()))
            raise

    def started(self, running: Server, report: Report | None) -> None:
        """Record a server that answers; what its output is like, too."""
        if report and report.broken:
            entry = self.attempt.entry(
                "failed",
                failure=FailureClass.NUMERICS,
                summary="it starts, and its output is broken",
                evidence=report.warnings,
                artefacts=(str(running.process.log),),
            )
        else:
            entry = self.attempt.started(
                running,
                accept_length=report.accept_length if report else None,
                tokens_per_second=report.tokens_per_second if report else None,
            )
        _write(entry)

    def ended(self, running: Server, code: int) -> None:
        """Record an engine that died while it served."""
        if code != 0 and not running.relay.received:
            _write(self.attempt.died(running, running.death()))


@contextmanager
def probing(probe: Probe) -> Iterator[None]:
    """Record how a probe ends, and what it has found by then."""
    try:
        yield
    except KeyboardInterrupt:
        _write(probe.entry("interrupted"))
        _say_kept(probe)
        raise
    except BwError as error:
        _write(probe.entry("failed", error))
        _say_kept(probe)
        raise
    _write(probe.entry("ok"))


def _say_kept(probe: Probe) -> None:
    if probe.kept and probe.kept != probe.place:
        err.print(f"what was measured: {probe.kept}", markup=False)


def remember(path: Path) -> None:
    """Put a run file into the ledger; one that is not there yet, or a ledger that cannot be written, is no error."""
    try:
        run = read(path)
        with Ledger() as ledger:
            ledger.add_run(run, artefacts=(str(path),))
    except BwError as error:
        err.print(f"warning: the run is not in the ledger: {error.message}", style="yellow", markup=False)


def _write(entry: Entry) -> None:
    try:
        with Ledger() as ledger:
            ledger.add(entry)
    except BwError as error:
        err.print(f"warning: the ledger was not written: {error.message}", style="yellow", markup=False)


def known_failure(failures: list[Entry]) -> str:
    """Return the announcement of a launch that has failed before."""
    last = failures[-1]
    times = f"{len(failures)} times, the last time" if len(failures) > 1 else "once,"
    why = last.evidence[0][:_MOST_CHARS] if last.evidence else last.summary
    return (
        f"warning: exactly this launch has failed on this host {times} on {last.at:%Y-%m-%d} {last.summary}"
        f" ({last.failure}): {why}\n  `sglang-bw ledger show {last.id}` has the log lines; `ledger note {last.id} TEXT`"
        " keeps what you find."
    )
