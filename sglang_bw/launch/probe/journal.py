"""What a probe of the host leaves in the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from sglang_bw.errors import BwError
from sglang_bw.host import probes
from sglang_bw.ledger.entry import Entry, Number, Result, new_id
from sglang_bw.ledger.failure import FailureClass
from sglang_bw.ledger.record import EngineRecord, Host


class Measured(Protocol):
    """What was found so far."""

    @property
    def complete(self) -> bool:
        """Whether that is all."""

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
    :ivar place: the file with everything that was found.
    """

    measured: Measured
    recipe: str | None
    host: Host
    engine: EngineRecord | None
    place: Path

    def entry(self, result: Result, error: BwError | None = None) -> Entry:
        """Return the entry of a probe that has ended."""
        now = datetime.now(UTC)
        numbers = dict(self.measured.numbers())
        file = self._file() if numbers else None
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
            numbers=numbers,
            artefacts=(str(file.absolute()),) if file else (),
        )

    def _file(self) -> Path | None:
        """Return the file with these numbers: at the place itself may be an earlier result, which was whole."""
        places = [self.place] if self.measured.complete else [probes.partial(self.place), self.place]
        return next((path for path in places if path.is_file()), None)
