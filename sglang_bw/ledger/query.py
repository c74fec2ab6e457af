"""Which entries of a ledger are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from sglang_bw.ledger.entry import Entry, Origin


@dataclass(frozen=True)
class Query:
    """Which entries; a field that is ``None`` does not restrict.

    :ivar newest: at most so many, the newest ones.
    """

    kind: str | None = None
    recipe: str | None = None
    result: str | None = None
    failure: str | None = None
    origin: Origin | None = None
    host: str | None = None
    launch: str | None = None
    study: str | None = None
    since: datetime | None = None
    newest: int | None = None

    def where(self) -> tuple[str, list[str]]:
        """Return an SQL condition and its values."""
        given = self._given()
        conditions = [f"{name} = ?" for name in given]
        values = [str(value) for value in given.values()]
        if self.since is not None:
            conditions.append("at >= ?")
            values.append(stamp(self.since))
        return " AND ".join(conditions) or "1", values

    def holds(self, entry: Entry) -> bool:
        """Tell whether an entry that is in no file is wanted."""
        host = entry.host.fingerprint if entry.host else None
        equal = all(
            value == (host if name == "host" else getattr(entry, name)) for name, value in self._given().items()
        )
        return equal and (self.since is None or entry.at >= self.since)

    def _given(self) -> dict[str, str]:
        """Return the columns that must have a certain value."""
        columns = ("kind", "recipe", "result", "failure", "origin", "host", "launch", "study")
        return {name: getattr(self, name) for name in columns if getattr(self, name) is not None}


def stamp(at: datetime) -> str:
    """Return a UTC time that sorts as text."""
    return at.astimezone(UTC).isoformat(timespec="microseconds")
