"""The tables of a ledger file, and how an older file gets the newer ones."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

APPLICATION_ID = 0x5362774C  # "SbwL": tells this file from any other SQLite file

# One script a version of the schema; a file of version n gets the scripts from n on.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE entries (
        id TEXT PRIMARY KEY, at TEXT NOT NULL, kind TEXT NOT NULL, origin TEXT NOT NULL, recipe TEXT, host TEXT,
        launch TEXT, study TEXT, result TEXT NOT NULL, failure TEXT, body TEXT NOT NULL
    ) STRICT;
    CREATE INDEX entries_by_launch ON entries (launch, host);
    CREATE INDEX entries_by_time ON entries (at);
    CREATE TABLE runs (entry TEXT PRIMARY KEY REFERENCES entries (id), body TEXT NOT NULL) STRICT;
    CREATE TABLE notes (entry TEXT NOT NULL REFERENCES entries (id), at TEXT NOT NULL, text TEXT NOT NULL) STRICT;
    CREATE TRIGGER entries_stay BEFORE UPDATE ON entries BEGIN SELECT RAISE(ABORT, 'entries are never changed'); END;
    CREATE TRIGGER entries_last BEFORE DELETE ON entries BEGIN SELECT RAISE(ABORT, 'entries are never deleted'); END;
    CREATE TRIGGER runs_stay BEFORE UPDATE ON runs BEGIN SELECT RAISE(ABORT, 'runs are never changed'); END;
    CREATE TRIGGER runs_last BEFORE DELETE ON runs BEGIN SELECT RAISE(ABORT, 'runs are never deleted'); END;
    CREATE TRIGGER notes_stay BEFORE UPDATE ON notes BEGIN SELECT RAISE(ABORT, 'notes are never changed'); END;
    CREATE TRIGGER notes_last BEFORE DELETE ON notes BEGIN SELECT RAISE(ABORT, 'notes are never deleted'); END;
    """,
)


def statements(script: str) -> Iterator[str]:
    """Split a script; a trigger has semicolons inside. ``executescript`` would end the transaction."""
    statement = ""
    for part in script.split(";"):
        statement += part + ";"
        if sqlite3.complete_statement(statement):
            if statement.strip(" ;\n"):
                yield statement
            statement = ""
