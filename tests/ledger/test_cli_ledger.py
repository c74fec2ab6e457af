"""`sglang-bw ledger` as a program: what it prints, what it ends with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sglang_bw import cli
from sglang_bw.cli.console import Console
from sglang_bw.ledger.store import Ledger
from tests.ledger.entries import entry
from tests.ledger.runs import SCRIPT, run

Ran = tuple[int, str, str]
Book = Callable[..., Ran]


@pytest.fixture
def book(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Book:
    def call(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as end:
            cli.main(["ledger", "--ledger", str(tmp_path / "ledger.sqlite3"), *arguments])
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    with Ledger(tmp_path / "ledger.sqlite3") as ledger:
        ledger.add(entry(1), entry(2, result="ok", failure=None, summary="[red]fine[/]"))
        ledger.add_run(run())
    return call


def test_list_shows_texts_as_they_are(book: Book) -> None:
    code, out, _ = book("list", "--kind", "start")
    assert code == 0
    assert "[red]fine[/]" in out
    assert "hang" in out
    assert len(json.loads(book("list", "--json")[1])) == 3
    assert json.loads(book("list", "--json", "--failure", "hang")[1])[0]["id"] == entry(1).id
    assert "no entries" in book("list", "--recipe", "nothing")[2]


def test_ids_of_a_list_can_be_copied(book: Book) -> None:
    _, out, _ = book("list")
    assert {line.split()[0] for line in out.splitlines()[1:]} >= {entry(1).id, entry(2).id, run().id}


def test_a_file_that_is_no_ledger_need_not_be_moved_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("no database at all, " * 100)
    with pytest.raises(SystemExit) as end:
        cli.main(["ledger", "--ledger", str(other), "list"])
    assert end.value.code == 76
    said = capsys.readouterr().err
    assert f"{other} is no ledger, or is damaged" in said
    assert "Name another file" in said


def test_reported_rows_are_listed_apart(book: Book) -> None:
    assert len(json.loads(book("list", "--reported", "--json")[1])) == 81
    assert "reported-" not in book("list", "--all")[1]
    rows = json.loads(book("list", "--reported", "--json", "--recipe", "Kimi-K2.5")[1])
    assert {row["recipe"] for row in rows} == {"Kimi-K2.5"}
    for filters in (
        ("--recipe", "zzz"),
        ("--result", "ok"),
        ("--kind", "ab"),
        ("--study", "s"),
        ("--since", "2099-01-01"),
    ):
        assert json.loads(book("list", "--reported", "--json", *filters)[1]) == []
    assert book("list", "--reported", "--recipe", "zzz")[2] == "no entries\n"
    assert book("list", "--result", "bogus")[0] == 2
    shown = book("show", "reported-first-5")[1]
    assert "KeyError: 12" in shown
    assert "reported by: the first system" in shown


def test_show_and_note(book: Book) -> None:
    assert book("note", "20261129-1201", "it was the cable")[0] == 0
    shown = book("show", "20261129-1201")[1]
    assert "it was the cable" in shown
    assert "result: failed (hang)" in shown
    code, _, err = book("show", "nonsense")
    assert code == 77
    assert "ledger list --all" in err


ODD = "\x1b[2J\x1b]0;owned\x07 \x9b31m \x7f\x08 line\ttab"


def test_control_characters_do_not_reach_the_terminal(book: Book, tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite3") as ledger:
        ledger.add(entry(3, summary=ODD, evidence=(ODD,), recipe=ODD, fix=ODD, env={ODD: ODD}))
    name = entry(3).id
    note = book("note", name, ODD)
    shown = [note, book("list"), book("show", name), book("export", name), book("export", name, "--markdown")]
    shown += [book("show", name, "--json"), book("show", ODD), book("list", "--recipe", ODD)]
    for _, out, err in shown:
        assert not set(out + err) & set("\x1b\x07\x9b\x7f\x08")
    assert "\ufffd[2J\ufffd]0;owned" in shown[2][1]


def test_errors_quote_without_control_characters(book: Book) -> None:
    code, _, err = book("import", f"/nowhere/{ODD}\udcff")
    assert code == 76
    assert "\ufffd[2J" in err
    assert not set(err) & set("\x1b\x07\x9b\x7f\x08\udcff")


def test_a_terminal_gets_styles_of_our_own_only() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=60, soft_wrap=True, color_system="standard")
    table = Table("a", box=None)
    table.add_row(Text(ODD, style="red"))
    for what in (ODD, Text(ODD), table, escape(ODD)):
        console.print(what, style="bold", markup=isinstance(what, str))
    console.print("12/16", end="\r")
    with console.status(escape(ODD)):
        pass
    with Live(Text(ODD), console=console):
        pass
    assert isinstance(console.file, StringIO)
    written = console.file.getvalue()
    own = re.sub(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[[12]?[KA]", "", written)
    assert "\x1b" not in own
    assert "\x9b" not in own
    assert "[2J" in own
    assert "12/16\r" in own
    assert "\x1b[1m" in written


def test_what_is_no_utf8_is_replaced(book: Book) -> None:
    odd = "cut \udcff off"  # as Python gives a byte of the command line that is no UTF-8
    name = entry(1).id
    assert book("note", name, odd)[0] == 0
    assert "cut \ufffd off" in book("show", name)[1]
    added = book("add", "--result", "failed", "--summary", odd, "--evidence", odd, "--recipe", odd, "--fix", odd)
    assert json.loads(book("show", added[1].strip(), "--json")[1])["evidence"] == ["cut \ufffd off"]
    assert book("show", odd)[0] == 77


def test_add_by_hand_and_from_elsewhere(book: Book) -> None:
    name = book("add", "--result", "failed", "--failure", "hang", "--summary", "s", "--recipe", "tiny")[1].strip()
    there = json.loads(book("show", name, "--json")[1])
    assert there["host"]["fingerprint"]
    name = book("add", "--result", "slower", "--summary", "s", "--source", "https://example.org")[1].strip()
    assert [row["id"] for row in json.loads(book("list", "--reported", "--json", "--result", "slower")[1])] == [name]
    assert json.loads(book("show", name, "--json")[1])["origin"] == "reported"


@pytest.mark.parametrize(
    "words", [("--result", "ok", "--failure", "hang", "--summary", "s"), ("--result", "failed", "--summary", " ")]
)
def test_an_entry_that_contradicts_itself_or_says_nothing_is_refused(book: Book, words: tuple[str, ...]) -> None:
    before = book("list", "--json")[1]
    assert book("add", *words)[0] == 2
    assert book("list", "--json")[1] == before


def test_export_and_import(book: Book, tmp_path: Path) -> None:
    file = tmp_path / "sub" / "export.json"
    assert "3 entries" in book("export", "-o", str(file))[2]
    assert "3 entries, 0 of them new" in book("import", str(file))[2]
    assert book("export", "--markdown")[1].startswith("| when |")
    assert len(json.loads(book("export", "20261129-1201")[1])["entries"]) == 1
    file.write_text("{}")
    code, _, err = book("import", str(file))
    assert code == 76
    assert "neither an export" in err
    assert "`sglang-bw ledger export -o FILE`" in err


def test_report_of_the_newest_run_by_name_and_from_a_file(book: Book, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    assert book("report", "-o", str(output))[0] == 0
    assert SCRIPT not in output.read_text()
    file = tmp_path / "run.jsonl"
    file.write_text(run().model_dump_json(exclude={"blocks"}) + "\n")
    assert "2 runs" in book("report", run().id[:13], str(file), "-o", str(output))[2]
    code, _, err = book("report", entry(1).id, "-o", str(output))
    assert code == 76
    assert "no comparison" in err
    (tmp_path / "broken.jsonl").write_text('{"kind": "run"}\n')
    assert book("report", str(tmp_path / "broken.jsonl"))[0] == 75
    assert book("report", "-o", "/proc/nothing/report.html")[0] == 17


def test_why_names_what_failed_here_elsewhere_and_in_print(book: Book) -> None:
    name = book(
        "add", "--result", "failed", "--summary", "s", "--recipe", "kimi-k2.5-int4-eagle3", "--evidence", "it broke"
    )
    assert name[0] == 0
    found = json.loads(book("why", "kimi-k2.5-int4-eagle3", "--json")[1])
    assert [one["evidence"] for one in found["here"]] == [["it broke"]]
    assert "reported-pub-4" in {one["id"] for one in found["reported"]}
    elsewhere = json.loads(book("why", "tiny", "--json")[1])["elsewhere"]
    assert entry(1).id in {one["id"] for one in elsewhere}
    assert "nothing has failed here yet" in book("why", "tiny")[1]
    assert book("why", "no-such-recipe")[0] == 30


def test_a_damaged_ledger_has_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad").write_text("no database, just a text that is long enough to be taken for a page" * 40)
    with pytest.raises(SystemExit) as end:
        cli.main(["ledger", "--ledger", str(tmp_path / "bad"), "list"])
    assert end.value.code == 76
    assert "damaged" in capsys.readouterr().err
