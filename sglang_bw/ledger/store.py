"""Where entries are kept: one SQLite file, only ever added to, by any number of processes at once.

In WAL mode a writer that is killed leaves either the whole entry or nothing, and readers are never in its way. The file
refuses changes and deletions itself, so that a mistake in any program cannot rewrite what was found.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

import platformdirs
from pydantic import ValidationError

from sglang_bw.errors import BwError, LedgerError, OutputError, UnknownEntryError
from sglang_bw.ledger.entry import Entry, Note, of_run
from sglang_bw.ledger.query import Query, stamp
from sglang_bw.ledger.record import RunRecord
from sglang_bw.ledger.tables import APPLICATION_ID, MIGRATIONS, statements

PATH_VARIABLE = "SGLANG_BW_LEDGER"
WAIT_S = 30.0
_AGAIN_S = 0.01


def default_path() -> Path:
    """Return the user's ledger, or the one that ``SGLANG_BW_LEDGER`` names."""
    named = os.environ.get(PATH_VARIABLE)
    return Path(named) if named else platformdirs.user_state_path("sglang-bw") / "ledger.sqlite3"


class Ledger:
    """An open ledger; a context manager.

    Every method raises :class:`LedgerError` when the file is damaged or stays locked, :class:`OutputError` when it
    cannot be written.
    """

    def __init__(self, path: Path | None = None, *, wait_s: float = WAIT_S) -> None:
        """Open the ledger, make it when there is none, bring an older one up to date.

        :param path: ``None`` for :func:`default_path`.
        :param wait_s: how long another process may hold it.
        """
        self.path = path or default_path()
        self._wait_s = wait_s
        with self._named():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # No implicit transactions: each one is written out below.
            self._db = sqlite3.connect(self.path, timeout=wait_s, isolation_level=None)
        try:
            with self._named():
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def add(self, *entries: Entry) -> None:
        """Append entries, all of them or none; when this returns they are on the disk.

        An entry that is there already, the same in every field, is left as it is; so is a comparison with all its
        blocks, wherever its file lies now.

        :raises LedgerError: another entry has the same id.
        """
        self.add_all(entries)

    def add_all(self, entries: Iterable[Entry], runs: Iterable[RunRecord] = ()) -> None:
        """Append entries and the comparisons behind them, as :meth:`add` does."""
        by_id = {run.id: run for run in runs}
        with self._transaction():
            for entry in entries:
                run = by_id.get(entry.id)
                if self._insert(entry, run) and run:
                    self._db.execute("INSERT INTO runs VALUES (?, ?)", (entry.id, run.model_dump_json()))

    def add_run(self, run: RunRecord, *, artefacts: tuple[str, ...] = (), study: str | None = None) -> Entry:
        """Append a comparison with its blocks, and return its entry."""
        entry = of_run(run, artefacts=artefacts).model_copy(update={"study": study})
        self.add_all([entry], [run])
        return entry

    def count(self) -> int:
        """Return how many entries there are."""
        with self._named():
            return int(self._db.execute("SELECT count(*) FROM entries").fetchone()[0])

    def note(self, name: str, text: str) -> Entry:
        """Add a remark to an entry."""
        entry = self.find(name)
        note = Note(at=datetime.now(UTC), text=text)
        with self._transaction():
            self._db.execute("INSERT INTO notes VALUES (?, ?, ?)", (entry.id, stamp(note.at), text))
        return entry.model_copy(update={"notes": (*entry.notes, note)})

    def select(self, query: Query | None = None) -> list[Entry]:
        """Return entries, the oldest first."""
        query = query or Query()
        where, values = query.where()
        limit = f"LIMIT {int(query.newest)}" if query.newest is not None else ""
        # The condition has column names of our own only; values are bound.
        sql = f"SELECT body FROM entries WHERE {where} ORDER BY at DESC, rowid DESC {limit}"
        with self._named():
            rows = [row[0] for row in self._db.execute(sql, values)]
            return [self._with_notes(self._read(body)) for body in reversed(rows)]

    def find(self, name: str) -> Entry:
        """Return the entry of an id, or of the first characters of one.

        :raises UnknownEntryError: there is none, or more than one.
        """
        with self._named():
            bodies = [row[0] for row in self._db.execute("SELECT body FROM entries WHERE id = ?", (name,))]
            bodies = bodies or [
                row[0]
                for row in self._db.execute(
                    "SELECT body FROM entries WHERE substr(id, 1, ?) = ? ORDER BY at LIMIT 5", (len(name), name)
                )
            ]
            entries = list(map(self._read, bodies))
        if len(entries) != 1 or not name:
            found = f"several entries begin with {name!r}" if entries else f"there is no entry {name!r}"
            near = f"Write more of it: {', '.join(entry.id for entry in entries)}." if entries else ""
            raise UnknownEntryError(found, hint=near or "`sglang-bw ledger list --all` shows every entry.")
        return self._with_notes(entries[0])

    def run(self, entry: Entry) -> RunRecord | None:
        """Return the comparison behind an entry with all its blocks, ``None`` when it has none."""
        with self._named():
            row = self._db.execute("SELECT body FROM runs WHERE entry = ?", (entry.id,)).fetchone()
        if row is None:
            return None
        try:
            return RunRecord.model_validate_json(row[0])
        except ValidationError as error:
            raise self._damaged(f"the run of {entry.id} cannot be read: {error}") from error

    def runs(self) -> list[RunRecord]:
        """Return every comparison, the oldest first."""
        with self._named():
            ids = [row[0] for row in self._db.execute("SELECT entry FROM runs ORDER BY entry")]
        return [run for run in (self.run(self.find(name)) for name in ids) if run]

    def known_failures(self, launch: str, host: str) -> list[Entry]:
        """Return the failures of exactly this launch on this host since it last worked, the oldest first.

        What was interrupted, or was not even started, says nothing, and does not count.
        """
        failures: list[Entry] = []
        for entry in self.select(Query(launch=launch, host=host, origin="here")):
            if entry.result == "failed":
                failures.append(entry)
            elif entry.result not in ("interrupted", "refused"):
                failures.clear()
        return failures

    def _prepare(self) -> None:
        self._db.execute("PRAGMA foreign_keys = ON")
        # One moment for all of them: another process may be making the tables just now.
        with self._transaction("DEFERRED"):
            application, version = self._pragma("application_id"), self._pragma("user_version")
            tables = self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if application not in (0, APPLICATION_ID) or (application == 0 and tables):
            raise LedgerError(f"{self.path} is a database of another program", hint="Name another file: --ledger FILE.")
        if version > len(MIGRATIONS):
            raise LedgerError(
                f"{self.path} was written by a newer release of sglang-bw",
                hint="Upgrade this one, or name another file: --ledger FILE.",
            )
        self._use_wal()
        self._db.execute("PRAGMA synchronous = FULL")
        if version < len(MIGRATIONS):
            self._migrate()

    def _use_wal(self) -> None:
        """Switch to WAL mode. SQLite does not wait for this lock while others hold the file, so ask again."""
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorname != "SQLITE_BUSY" or time.monotonic() > deadline:
                    raise
                time.sleep(_AGAIN_S)

    def _migrate(self) -> None:
        with self._transaction():  # whoever comes second finds it done
            for number in range(self._pragma("user_version"), len(MIGRATIONS)):
                for statement in statements(MIGRATIONS[number]):
                    self._db.execute(statement)
            self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def _pragma(self, name: str) -> int:
        return int(self._db.execute(f"PRAGMA {name}").fetchone()[0])

    def _insert(self, entry: Entry, run: RunRecord | None) -> bool:
        """Insert an entry; false when it is there."""
        body = entry.model_copy(update={"notes": ()}).model_dump_json()
        there = self._db.execute("SELECT body FROM entries WHERE id = ?", (entry.id,)).fetchone()
        if there:
            kept = self.run(entry) if run else None
            # What else an entry says of a run is where its file lies, and what a tuning noted of it.
            same = run == kept if kept else self._read(there[0]) == self._read(body)
            if not same:
                raise LedgerError(
                    f"another entry has the id {entry.id}", hint="Entries are never replaced; this one was not added."
                )
            return False
        host = entry.host.fingerprint if entry.host else None
        row = (entry.id, stamp(entry.at), entry.kind, entry.origin, entry.recipe, host, entry.launch, entry.study)
        self._db.execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*row, entry.result, entry.failure, body)
        )
        self._insert_notes(entry.id, entry.notes)
        return True

    def _insert_notes(self, name: str, notes: Iterable[Note]) -> None:
        rows = [(name, stamp(note.at), note.text) for note in notes]
        self._db.executemany("INSERT INTO notes VALUES (?, ?, ?)", rows)

    def _with_notes(self, entry: Entry) -> Entry:
        rows = self._db.execute("SELECT at, text FROM notes WHERE entry = ? ORDER BY rowid", (entry.id,)).fetchall()
        notes = tuple(Note(at=datetime.fromisoformat(at), text=text) for at, text in rows)
        return entry.model_copy(update={"notes": notes}) if notes else entry

    def _read(self, body: str) -> Entry:
        try:
            return Entry.model_validate_json(body)
        except ValidationError as error:
            raise self._damaged(f"an entry cannot be read: {error}") from error

    @contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        with self._named():
            # IMMEDIATE: a second writer waits here instead of failing when it comes to write.
            self._db.execute(f"BEGIN {kind}")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turn what SQLite and the system say into errors of this tool."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._error(error) from error
        except OSError as error:
            raise OutputError(
                f"cannot use the ledger {self.path}: {error.strerror}", hint="Name another file: --ledger FILE."
            ) from error

    def _error(self, error: sqlite3.Error) -> BwError:
        name = getattr(error, "sqlite_errorname", "") or ""
        if name.startswith(("SQLITE_READONLY", "SQLITE_FULL", "SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_PERM")):
            return OutputError(
                f"cannot write the ledger {self.path}: {error}",
                hint="What is in it stays. Free some space, or name another file: --ledger FILE.",
            )
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return LedgerError(
                f"another process holds the ledger {self.path}",
                hint="Wait for it, or name another file: --ledger FILE.",
            )
        if name == "SQLITE_NOTADB":
            return LedgerError(
                f"{self.path} is no ledger, or is damaged: {error}",
                hint="Name another file: --ledger FILE; or move this one away, if it was a ledger, to begin a new one.",
            )
        return self._damaged(str(error))

    def _damaged(self, why: str) -> LedgerError:
        return LedgerError(
            f"the ledger {self.path} is damaged: {why}",
            hint="Move it away to begin a new one; `sqlite3 FILE .recover` may get most of it back.",
        )
