"""What probes leave in the ledger; what is measured is made up here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sglang_bw.cli.probe import probe
from sglang_bw.errors import AllReduceError, BwError, ProbeError, RoundFitError
from sglang_bw.host import probes
from sglang_bw.launch.probe import allreduce, rounds, session
from sglang_bw.launch.probe.allreduce import Failure, Latency
from sglang_bw.launch.probe.rounds import Point
from sglang_bw.ledger.entry import Entry
from sglang_bw.ledger.store import PATH_VARIABLE, Ledger
from tests.launch.serving import write_tree


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Entry]]:
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "ledger.sqlite3"))
    return lambda: Ledger(tmp_path / "ledger.sqlite3").select()


def reduce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *failures: Failure, end: type[BaseException] | None
) -> Result:
    """Run `probe allreduce` with two sizes and these failures."""

    def measure(result: allreduce.Result, *_: Any, keep: Callable[[Any], None], **__: Any) -> None:
        result.latencies += [Latency("gloo", rows, 128 * rows, False, 10.0 * rows, 12.0, 20) for rows in (1, 4)]
        result.failures += failures
        result.complete = not end
        keep(result)
        if end:
            raise end

    monkeypatch.setattr(allreduce, "measure", measure)
    tree = write_tree(tmp_path / f"tree-{len(list(tmp_path.iterdir()))}")
    words = ["tiny", "--gpus", "2", "--rows", "1,4", "--device", "cpu", "--engine-tree", str(tree)]
    return CliRunner().invoke(probe, ["allreduce", *words, "--out", str(tmp_path / "found.json")])


def test_all_reduces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: Callable[[], list[Entry]]) -> None:
    assert reduce(tmp_path, monkeypatch, end=None).exit_code == 0
    hung = Failure("custom", "hung", "it said nothing for 120 s")
    assert isinstance(reduce(tmp_path, monkeypatch, hung, end=None).exception, AllReduceError)
    reduce(tmp_path, monkeypatch, end=KeyboardInterrupt)
    good, bad, cut = entries()
    assert {one.kind for one in (good, bad, cut)} == {"probe"}
    assert (good.result, good.recipe, good.failure) == ("ok", "tiny", None)
    assert good.summary == "all-reduces of 2 ranks on cpu, hidden 192; ways measured: 1"
    assert str(good.numbers["4 rows by gloo"]) == "40 us"
    assert good.artefacts == (str(tmp_path / "found.json"),)
    assert good.host
    assert good.engine
    assert (bad.result, bad.failure, bad.evidence) == ("failed", "hang", ("custom hung: it said nothing for 120 s",))
    assert bad.numbers == good.numbers
    assert cut.result == "interrupted"
    assert cut.artefacts == (str(tmp_path / "found.partial.json"),)  # not the whole one of before


@pytest.mark.parametrize(("seconds", "error"), [((0.02, 0.02), None), ((0.02, 0.04), RoundFitError), ((), ProbeError)])
def test_rounds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    entries: Callable[[], list[Entry]],
    seconds: tuple[float, ...],
    error: type[BwError] | None,
) -> None:
    def ask(_urls: Any, _plan: Any, result: rounds.Result, *, keep: Callable[[Any], None], **_: Any) -> None:
        if not seconds:
            raise ProbeError("http://h:1 does not answer: [Errno 111] ConnectionRefusedError")
        result.plain[4] = Point(4, 1.0, 0.01, 0.0, False)
        result.rounds[3, 4] = [Point(4, 1.0 + n, each, 0.0, True) for n, each in enumerate(seconds)]
        result.complete = True
        keep(result)

    monkeypatch.setattr(session, "ask_all", ask)
    file = tmp_path / "found.json"
    ran = CliRunner().invoke(probe, ["round", "--url", "http://u:p@h:1", "--out", str(file)])
    assert isinstance(ran.exception, error) if error else ran.exit_code == 0
    (entry,) = entries()
    assert (entry.kind, entry.recipe, entry.result) == ("probe", None, "failed" if error else "ok")
    if not seconds:
        assert (entry.failure, entry.numbers, entry.artefacts) == ("network", {}, ())
        return
    assert entry.summary == "rounds of 3 steps at batch 4"
    assert str(entry.numbers["step at 4"]) == "0.01 s"
    assert entry.numbers.keys() == {"step at 4", "round of 3 at 4", "R of 3 at 4"}
    # Who cannot be believed does not take the place of an earlier result.
    assert entry.artefacts == (str(probes.partial(file) if error else file),)
    assert file.is_file() is not bool(error)
