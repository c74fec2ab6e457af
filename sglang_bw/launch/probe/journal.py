"""What a probe of the host leaves in the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from sglang_bw.errors import BwError
from sglang_bw.host.probes import partial
from sglang_bw.ledger.entry import Entry, Number, Result, new_id
from sglang_bw.ledger.failure import FailureClass
from sglang_bw.ledger.record import EngineRecord, Host


class Measured(Protocol):
    """What was found so far."""

    def title(self) -> str:
        """Return what was measured, in words."""

    def numbers(self) -> Mapping[str, Number]:
        """Return what was found."""

    def failure(self, error: BwError) -> FailureClass:
        """Return why it failed."""


@dataclass(frozen=True)
class Probe:
    """One probe, before anybody knows how it ends.

    :ivar recipe: id, ``None`` when it is about none.
    :ivar engine: ``None`` for servers that somebody else has started.
    :ivar place: the file of a whole result.
    """

    measured: Measured
    recipe: str | None
    host: Host
    engine: EngineRecord | None
    place: Path

    @property
    def kept(self) -> Path | None:
        """The file with everything that was found, whole or not."""
        if not self.measured.numbers():
            return None
        return next((path for path in (partial(self.place), self.place) if path.is_file()), None)

    def entry(self, result: Result, error: BwError | None = None) -> Entry:
        """Return the entry of a probe that has ended."""
        now = datetime.now(UTC)
        return Entry(
            id=new_id(now),
            kind="probe",
            at=now,
            recipe=self.recipe,
            engine=self.engine,
            host=self.host,
            result=result,
            failure=self.measured.failure(error) if error else None,
            summary=self.measured.title(),
            evidence=(error.message,) if error else (),
            numbers=dict(self.measured.numbers()),
            artefacts=(str(self.kept.absolute()),) if self.kept else (),
        )
