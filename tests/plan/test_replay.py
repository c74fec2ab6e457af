"""Replay of published tables: inputs only, honest errors, clear refusals."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_bw.cli.plan import plan
from sglang_bw.errors import ReplayError
from sglang_bw.plan.replay import bundle, cells, replay
from sglang_bw.plan.replay.forms import Form, read

DATA = Path(__file__).parent / "data"
CELLS, BUNDLE = DATA / "speculation_cells.csv", DATA / "specbundle.csv"
ANSWERS = {
    CELLS: ["tps_spec", "accept_rate", "accept_len(=1+k*rate)", "speedup", "verify_cost_ratio(=AL/speedup)"],
    BUNDLE: ["spec_tps", "accept_len", "speedup", "cost_ratio_Tspec_over_Tbase"],
}
CELL_ROW = {"source": "s", "model": "Kimi-K2.6", "engine": "vLLM", "parallel": "TP8", "ctx": "0", "conc": "1"}
CELL_ROW |= {"tps_nospec": "90", "k": "3"}


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def _predicted(path: Path) -> list[float | None]:
    return [row["predicted"] for row in replay(path).to_json()["rows"]]


@pytest.mark.parametrize("table", [CELLS, BUNDLE], ids=["cells", "bundle"])
class TestAnswersAreNotRead:
    def test_blanked(self, table: Path, tmp_path: Path) -> None:
        blank = [{**row, **dict.fromkeys(ANSWERS[table], "")} for row in _rows(table)]
        assert _predicted(_write(tmp_path / "blank.csv", blank)) == _predicted(table)

    def test_columns_gone(self, table: Path, tmp_path: Path) -> None:
        rows = [{name: value for name, value in row.items() if name not in ANSWERS[table]} for row in _rows(table)]
        assert _predicted(_write(tmp_path / "bare.csv", rows)) == _predicted(table)

    def test_wrong(self, table: Path, tmp_path: Path) -> None:
        """Answers of other rows do not leak either: every one is replaced."""
        rows = _rows(table)
        wrong = [{**row, **{name: str(1 + number % 7) for name in ANSWERS[table]}} for number, row in enumerate(rows)]
        assert _predicted(_write(tmp_path / "wrong.csv", wrong)) == _predicted(table)


def test_a_shipped_row_is_predicted_as_if_it_were_not_shipped() -> None:
    """R from other data sets, tau from other runs: doubling a row's own answers changes nothing."""
    known = bundle.shipped()
    row = known[40]
    others = tuple(
        bundle.Measured(known_row.run, 2 * known_row.accept_length, 2 * known_row.speedup)
        if known_row.run == row.run
        else known_row
        for known_row in known
    )
    assert bundle.accept_length(row.run, others) == bundle.accept_length(row.run, known)
    assert bundle.round_ratio(row.run, others) == bundle.round_ratio(row.run, known)


def test_rounding_of_a_baseline_does_not_make_another_run() -> None:
    """The file has more digits than the shipped table; the row must still count as its own."""
    own = bundle.Run.of(_rows(BUNDLE)[0])
    assert any(row.run == own for row in bundle.shipped())


def test_given_accept_lengths_are_read_when_asked_for() -> None:
    given_length = replay(BUNDLE, accept_length_given=True).summary()
    assert given_length["median"] < replay(BUNDLE).summary()["median"]


def test_order_and_numbers_of_the_file() -> None:
    result = replay(CELLS).to_json()
    assert [row["row"] for row in result["rows"]] == list(range(1, 392))
    assert [row["observed"] for row in result["rows"]] == [float(row["speedup"]) for row in _rows(CELLS)]
    json.dumps(result, allow_nan=False)


def test_broken_baselines_are_predicted_but_not_compared() -> None:
    rows = replay(BUNDLE).to_json()["rows"]
    left = [given_row["target"] for given_row, row in zip(_rows(BUNDLE), rows, strict=True) if row["left_out"]]
    assert set(left) == {"Llama-4-Scout-17B-16E-Instruct"}
    assert len(left) == 70
    assert all(row["predicted"] for row in rows)


def test_the_same_rows_in_another_file_of_one_host(tmp_path: Path) -> None:
    """One row alone has no curve of its own; the nearest known one lends its shape."""
    (alone,) = _predicted(_write(tmp_path / "one.csv", [CELL_ROW]))
    assert alone == pytest.approx(1.3, abs=0.15)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tps_nospec": ""}, "tps_nospec"),
        ({"tps_nospec": "nan"}, "tps_nospec"),
        ({"tps_nospec": "-3"}, "tps_nospec"),
        ({"tps_nospec": "inf"}, "tps_nospec"),
        ({"conc": "zero"}, "conc"),
        ({"conc": "0"}, "conc"),
        ({"k": "-1"}, "k must"),
        ({"k": "1000000"}, "k must"),
        ({"ctx": "-16k"}, "ctx"),
    ],
)
def test_a_bad_row_is_null_with_its_reason_and_spoils_no_other(
    tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    rows = [CELL_ROW, {**CELL_ROW, **change}, {**CELL_ROW, "conc": "4", "tps_nospec": "240"}]
    good = _predicted(_write(tmp_path / "good.csv", [rows[0], rows[2]]))
    result = replay(_write(tmp_path / "x.csv", rows)).to_json()["rows"]
    assert [result[0]["predicted"], result[2]["predicted"]] == good
    assert result[1]["predicted"] is None
    assert reason in result[1]["reason"]


@pytest.mark.parametrize(("change", "reason"), [({"steps": "0"}, "steps"), ({"batch": "many"}, "batch")])
def test_a_bad_bundle_row(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    first, second = _rows(BUNDLE)[:2]
    result = replay(_write(tmp_path / "x.csv", [first, {**second, **change}])).to_json()["rows"]
    assert result[0]["predicted"]
    assert result[1]["predicted"] is None
    assert reason in result[1]["reason"]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("0", 0),
        ("16k", 16_000),
        ("8k/1k", 8_000),
        ("~83k actual (old `128k` label)", 83_000),
        ("118-230k", 118_000),
        ("1M", 1_000_000),
        ("ShareGPT", 0),
        ("", 0),
        ("2048", 2048),
    ],
)
def test_contexts(text: str, tokens: int) -> None:
    assert cells.tokens(text) == tokens


def test_a_row_with_too_few_cells(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(",".join(CELL_ROW) + "\n" + ",".join(CELL_ROW.values()) + "\ns,Kimi\n")
    rows = replay(path).to_json()["rows"]
    assert rows[0]["predicted"]
    assert (rows[1]["predicted"], rows[1]["reason"]) == (None, "has 2 cells, the header 8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no rows"),
        (b"target,batch\n", "has no rows"),
        (b"a,b\n1,2\n", "none of the known column forms"),
        (b"\xff\xfe\x00", "not a text file"),
        (b'a,b\n"1,2\n', "not valid CSV"),
        (b"ctx,ctx\n1,2\n", "twice"),
    ],
)
def test_a_file_that_is_no_table(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    with pytest.raises(ReplayError, match=message) as caught:
        replay(path)
    assert caught.value.exit_code == 57


def test_missing_columns_are_named(tmp_path: Path) -> None:
    bare = {name: value for name, value in CELL_ROW.items() if name != "tps_nospec"}
    with pytest.raises(ReplayError) as caught:
        replay(_write(tmp_path / "x.csv", [bare]))
    assert "speculation_cells" in caught.value.hint
    assert "tps_nospec" in caught.value.hint


@given(st.lists(st.lists(st.text(max_size=6), min_size=1, max_size=9), max_size=5))
@settings(max_examples=60)
def test_any_cells_end_in_null_or_a_number(tmp_path_factory: pytest.TempPathFactory, lines: list[list[str]]) -> None:
    path = tmp_path_factory.mktemp("wild") / "x.csv"
    with path.open("w", encoding="utf-8", newline="", errors="replace") as file:
        csv.writer(file).writerows([list(CELL_ROW), list(CELL_ROW.values()), *lines])
    for row in _outcome(path):
        assert row["predicted"] is None or row["predicted"] > 0


def _outcome(path: Path) -> Iterable[dict[str, Any]]:
    try:
        return list(replay(path).to_json()["rows"])
    except ReplayError:
        return []


def test_a_byte_order_mark_and_blank_lines_are_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("\ufeff" + ",".join(CELL_ROW) + "\n\n" + ",".join(CELL_ROW.values()) + "\n\n", encoding="utf-8")
    assert read(path).form is Form.CELLS
    assert len(_predicted(path)) == 1


class TestCommand:
    def test_json(self) -> None:
        result = CliRunner().invoke(plan, ["--replay", str(BUNDLE), "--json"])
        loaded = json.loads(result.output)
        assert set(loaded) == {"rows", "summary"}
        assert {"rows", "median", "p90", "wins", "wins_found", "losses", "losses_found", "undecided"} <= set(
            loaded["summary"]
        )

    def test_table(self) -> None:
        result = CliRunner().invoke(plan, ["--replay", str(CELLS)])
        assert result.exit_code == 0
        assert "losses found" in result.output
        assert '"it always pays" is right on 79.4% and finds no loss' in result.output


def test_numbers_with_thousands_separators(tmp_path: Path) -> None:
    head = "model,engine,parallel,ctx,conc,tps_nospec"
    plain, grouped = tmp_path / "plain.csv", tmp_path / "grouped.csv"
    plain.write_text(f"{head}\nKimi-K2.6 INT4,vLLM,TP8,0,64,1497.3\n")
    grouped.write_text(f'{head}\nKimi-K2.6 INT4,vLLM,TP8,0,64,"1,497.3"\n')
    assert replay(grouped).to_json() == replay(plain).to_json()
    assert replay(grouped).rows[0].predicted


def test_a_file_that_cannot_be_read_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(ReplayError) as error:
        replay(tmp_path / "absent.csv")
    assert "CSV file" in error.value.hint
