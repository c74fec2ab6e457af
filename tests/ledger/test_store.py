"""The ledger's file: append only, several writers, kills, other files, older and newer schemas."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bw.errors import BwError, LedgerError, OutputError, UnknownEntryError
from sglang_bw.ledger import store, tables
from sglang_bw.ledger.query import Query
from sglang_bw.ledger.store import Ledger
from tests.conftest import CHECKOUT
from tests.ledger.entries import AT, entry
from tests.ledger.runs import run

WRITER = """
import sys
from pathlib import Path
from sglang_bw.ledger.store import Ledger
from tests.ledger.entries import entry
with Ledger(Path(sys.argv[1])) as ledger:
    for number in range(int(sys.argv[3])):
        ledger.add(entry(0, id=f"{sys.argv[2]}-{number:05}", summary="x" * 4000))
        print(number, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "ledger.sqlite3"


def writer(path: Path, name: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(count)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )


OPENER = """
import sys
from pathlib import Path
from sglang_bw.ledger.store import Ledger
from tests.ledger.entries import entry
for line in sys.stdin:
    try:
        with Ledger(Path(line.strip())) as ledger:
            ledger.add(entry(0, id=sys.argv[1]))
        print("ok", flush=True)
    except Exception as error:
        print(error, flush=True)
"""


def test_many_processes_may_make_the_file_at_once(tmp_path: Path) -> None:
    """Each of 60 files is used first by six processes at the same moment."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OPENER, f"entry-{number}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        )
        for number in range(6)
    ]  # fmt: skip
    said = []
    for number in range(-1, 60):  # the first one is for their imports
        for process in processes:
            assert process.stdin
            process.stdin.write(f"{tmp_path / str(number)}\n")
            process.stdin.flush()
        said += [process.stdout.readline() for process in processes if process.stdout]
    for process in processes:
        process.communicate()
    assert set(said) == {"ok\n"}
    for number in range(60):
        with Ledger(tmp_path / str(number)) as ledger:
            assert ledger.count() == 6


def test_entries_come_back_as_they_were(path: Path) -> None:
    first, second = entry(1), entry(2, params={"steps": "2"}, changes={"steps": [3, 2]}, env={"A": "1"})
    with Ledger(path) as ledger:
        ledger.add(second, first)
    with Ledger(path) as ledger:
        assert ledger.select() == [first, second]
        assert ledger.find(first.id) == first
        assert ledger.count() == 2


def test_runs_come_back_with_their_blocks(path: Path) -> None:
    with Ledger(path) as ledger:
        found = ledger.add_run(run(), study="s")
        assert ledger.run(ledger.find(found.id)) == run()
        assert ledger.runs() == [run()]
        assert ledger.run(entry()) is None
    assert found.result == "undecided"  # faster at one concurrency, slower at another
    assert str(found.numbers["ratio at 1"]) == "1.42 [1.39, 1.45]"


def test_a_killed_run_is_an_interrupted_entry(path: Path) -> None:
    with Ledger(path) as ledger:
        found = ledger.add_run(run(outcome=None))
    assert found.result == "interrupted"
    assert "after 24 blocks" in found.summary


def test_notes_are_added_to_an_entry_that_stays(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.add(entry())
        assert ledger.note(entry().id, "seen again").notes[0].text == "seen again"
        assert [one.text for one in ledger.find(entry().id).notes] == ["seen again"]
        ledger.add(entry())  # the entry itself is still the same


@pytest.mark.parametrize("statement", ["UPDATE entries SET result = 'ok'", "DELETE FROM entries", "DELETE FROM notes"])
def test_the_file_itself_refuses_changes(path: Path, statement: str) -> None:
    with Ledger(path) as ledger:
        ledger.add(entry())
        ledger.note(entry().id, "x")
    with sqlite3.connect(path) as database, pytest.raises(sqlite3.IntegrityError, match="are never"):
        database.execute(statement)
    database.close()


def test_another_entry_with_the_same_id_is_refused_and_nothing_of_the_batch_stays(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.add(entry(1))
        with pytest.raises(LedgerError, match="another entry has the id"):
            ledger.add(entry(2), entry(1, summary="other"))
        assert ledger.select() == [entry(1)]


def test_ids_may_be_cut_short(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.add(entry(1), entry(2), entry(13, id="20_61129%"))
        assert ledger.find("20261129-1201") == entry(1)
        with pytest.raises(UnknownEntryError, match="several entries") as several:
            ledger.find("20261129")
        assert entry(2).id in several.value.hint
        for name in ("nothing", "", "%", "20?"):
            with pytest.raises(UnknownEntryError):
                ledger.find(name)


def test_queries(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.add(*(entry(n) for n in range(5)), entry(6, kind="probe", result="ok", failure=None, study="s"))
        assert len(ledger.select(Query(kind="start"))) == 5
        assert len(ledger.select(Query(failure="hang", recipe="tiny"))) == 5
        assert [one.id for one in ledger.select(Query(newest=2))] == [entry(4).id, entry(6).id]
        assert len(ledger.select(Query(since=AT + timedelta(minutes=3)))) == 3
        assert len(ledger.select(Query(study="s"))) == 1
        assert ledger.select(Query(recipe="tiny' OR 1=1 --")) == []


@given(st.lists(st.sampled_from(["failed", "refused", "ok", "interrupted", "faster"]), max_size=8))
def test_known_failures_are_those_since_it_last_worked(results: list[str]) -> None:
    with Ledger(Path(":memory:")) as ledger:
        ledger.add(*(entry(n, id=f"e{n}", result=result) for n, result in enumerate(results)))
        found = [one.id for one in ledger.known_failures("abc", "0123456789ab")]
    after = max((n for n, result in enumerate(results) if result in ("ok", "faster")), default=-1)
    assert found == [f"e{n}" for n, r in enumerate(results) if n > after and r == "failed"]


def test_failures_of_other_hosts_launches_and_people_are_not_known_here(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.add(
            entry(1, host=None), entry(2, launch="other"), entry(3, origin="reported"),
            entry(4, host=entry().host.model_copy(update={"fingerprint": "b"})),  # type: ignore[union-attr]
        )  # fmt: skip
        assert ledger.known_failures("abc", "0123456789ab") == []


def test_two_processes_write_at_once(path: Path) -> None:
    writers = [writer(path, name, 40) for name in "abc"]
    assert [process.wait(60) for process in writers] == [0, 0, 0]
    with Ledger(path) as ledger:
        assert ledger.count() == 120


def test_a_kill_at_any_moment_loses_nothing_that_was_committed(path: Path) -> None:
    for attempt in range(4):
        process = writer(path, str(attempt), 10_000)
        assert process.stdout
        process.stdout.readline()
        time.sleep(0.03 * attempt)
        process.send_signal(signal.SIGKILL)
        said = 1 + len(process.stdout.read().splitlines())
        process.wait()
        with Ledger(path) as ledger:
            kept = [one for one in ledger.select() if one.id.startswith(f"{attempt}-")]
        assert len(kept) in (said, said + 1)  # one may be committed and not yet told of
        assert all(len(one.summary) == 4000 for one in kept)


def test_a_writer_waits_for_another_and_gives_up_with_a_reason(path: Path) -> None:
    with Ledger(path, wait_s=0.2) as ledger:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="another process holds"):
            ledger.add(entry())
        other.execute("COMMIT")
        other.close()
        ledger.add(entry())


def test_an_older_file_gets_the_new_tables(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger(path) as ledger:
        ledger.add(entry())
    more = (*tables.MIGRATIONS, "CREATE TABLE later (a TEXT) STRICT; INSERT INTO later VALUES ('x;y');")
    monkeypatch.setattr(store, "MIGRATIONS", more)
    with Ledger(path) as ledger:
        assert ledger.select() == [entry()]
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT a FROM later").fetchone() == ("x;y",)
        assert database.execute("PRAGMA user_version").fetchone() == (2,)
    database.close()
    monkeypatch.setattr(store, "MIGRATIONS", tables.MIGRATIONS)
    with pytest.raises(LedgerError, match="newer release"):
        Ledger(path)


def test_a_migration_that_fails_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger(path) as ledger:
        ledger.add(entry())
    monkeypatch.setattr(store, "MIGRATIONS", (*tables.MIGRATIONS, "CREATE TABLE later (a TEXT); SELECT nonsense;"))
    with pytest.raises(LedgerError):
        Ledger(path)
    monkeypatch.undo()
    with Ledger(path) as ledger:
        assert ledger.select() == [entry()]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite3"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE mine (a)")
    database.close()
    before = other.read_bytes()
    with pytest.raises(LedgerError, match="another program"):
        Ledger(other)
    assert other.read_bytes() == before
    text = tmp_path / "text"
    text.write_text("no database at all, but long enough to be read as one" * 50)
    with pytest.raises(LedgerError, match="damaged"):
        Ledger(text)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "ledger", tmp_path):
        with pytest.raises(OutputError, match="cannot"):
            Ledger(path)


def test_a_full_disk_is_told_and_keeps_what_is_there(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.add(entry(1))
        pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
        ledger._db.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(OutputError, match="full"):
            ledger.add(entry(2, summary="x" * 100_000))
        assert ledger.select() == [entry(1)]


def test_a_damaged_body_names_the_file(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.add(entry())
    with sqlite3.connect(path) as database:
        database.execute("DROP TRIGGER entries_stay")
        database.execute("UPDATE entries SET body = ?", (json.dumps({"id": "x"}),))
    database.close()
    with Ledger(path) as ledger, pytest.raises(BwError, match="damaged"):
        ledger.select()


def test_times_of_any_zone_sort(path: Path) -> None:
    late = datetime(2026, 11, 29, 13, 0, tzinfo=UTC)
    with Ledger(path) as ledger:
        ledger.add(entry(1, at=late), entry(2, at="2026-11-29T13:30:00+02:00"))
        assert [one.id for one in ledger.select()] == [entry(2).id, entry(1).id]
