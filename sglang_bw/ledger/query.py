"""Which entries of a ledger are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from sglang_bw.ledger.entry import Origin


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
        columns = ("kind", "recipe", "result", "failure", "origin", "host", "launch", "study")
        given = {name: getattr(self, name) for name in columns if getattr(self, name) is not None}
        conditions = [f"{name} = ?" for name in given]
        values = [str(value) for value in given.values()]
        if self.since is not None:
            conditions.append("at >= ?")
            values.append(stamp(self.since))
        return " AND ".join(conditions) or "1", values


def stamp(at: datetime) -> str:
    """Return a UTC time that sorts as text."""
    return at.astimezone(UTC).isoformat(timespec="microseconds")
