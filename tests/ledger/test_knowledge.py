"""Classes of failure, the identity of a launch, reported failures, the cost of a round, exports."""

from __future__ import annotations

import base64
import gzip
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt  # comes with rich

from sglang_bw.errors import LedgerError
from sglang_bw.ledger import costs, exchange, identity, reference
from sglang_bw.ledger.entry import Number
from sglang_bw.ledger.failure import FailureClass, classify
from sglang_bw.ledger.reference import Launch
from sglang_bw.ledger.report import page
from sglang_bw.ledger.store import Ledger
from sglang_bw.recipes import flags
from tests.ledger.entries import entry
from tests.ledger.runs import HOSTILE, run


@pytest.mark.parametrize(
    ("text", "phase", "expected"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "loading", "out-of-memory-load"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "graphs", "out-of-memory-graphs"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "ready", "out-of-memory-serving"),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            "loading",
            "out-of-memory-kv",
        ),
        ("it was killed (SIGKILL), most often because the machine ran out of memory", "loading", "out-of-memory-host"),
        ("KeyError: 12", "loading", "unsupported-architecture"),
        ("Assertion error (attention.hpp:159): Unsupported architecture", "ready", "unsupported-architecture"),
        ("triton.runtime.errors.OutOfResources: out of resource: shared memory", "ready", "missing-kernel"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "", "missing-kernel"),
        ("launch_server.py: error: unrecognized arguments: --cuda-graph-max-bs 4", "starting", "removed-flag"),
        ("AssertionError: expert_location_metadata", "loading", "assertion"),
        ("the engine was not ready after 1800 s, in phase loading: x", "loading", "hang"),
        ("probability tensor contains either inf, nan or element < 0; device-side assert", "ready", "numerics"),
        ("torch.distributed.DistBackendError: NCCL error in: ncclUtils.hpp:94", "loading", "network"),
        ("AssertionError: assert param.size() == loaded_weight.size()", "loading", "model-files"),
        ("something nobody has seen", "", "other"),
    ],
)
def test_classes_of_failure(text: str, phase: str, expected: str) -> None:
    assert classify(text, phase=phase) == expected


def test_most_reported_error_texts_are_classified_as_reported() -> None:
    """Error texts as engines print them; the rows about speeds and symptoms in words are not for a classifier."""
    quoted = [row for row in reference.table() if classify(row.says) is not FailureClass.OTHER]
    wrong = {row.id for row in quoted if classify(row.says) != row.failure}
    # Out of memory needs the phase; the others name a symptom beside the error.
    assert wrong <= {"pub-8", "pub-15", "pub-17", "pub-37", "pub-45"}
    assert len(quoted) > 25


def key(line: str, env: dict[str, str] | None = None, engine: str = "e") -> str:
    return identity.digest(engine, flags.parse(line.split()), env or {})


def test_what_cannot_matter_does_not_make_another_launch() -> None:
    same = key("--tp 8 --model-path m --port 1 --api-key k --disable-radix-cache")
    assert key("--model m --disable-radix-cache --tp-size=8 --host h --log-level debug") == same
    assert key("--tp 4 --tp 8 --model m --disable-radix-cache") == same  # the last one counts


@pytest.mark.parametrize(
    "other", ["--tp 4 --model m", "--tp 8 --model n", "--tp 8 --model m --enable-x", "--tp 8 --model m --no-enable-x"]
)
def test_what_matters_makes_another_launch(other: str) -> None:
    same = key("--tp 8 --model m")
    assert len({same, key(other), key("--tp 8 --model m", {"A": "1"}), key("--tp 8 --model m", engine="f")}) == 4


def test_a_repaired_download_is_another_launch(tmp_path: Path) -> None:
    before = key(f"--model {tmp_path}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert key(f"--model {tmp_path}") != before


def test_reported_rows_are_marked_and_have_a_source() -> None:
    rows = reference.entries()
    assert len(rows) == 81
    assert len({row.id for row in rows}) == len(rows)
    assert {row.origin for row in rows} == {"reported"}
    assert all(row.source and row.evidence and row.summary and row.fix and row.failure for row in rows)
    assert sum("first system" in row.source for row in rows) == 9


def names(line: str, models: str = "", arch: str | None = "sm120", env: dict[str, str] | None = None) -> set[str]:
    launch = Launch(models=(models,), flags=flags.parse(line.split()), env=env or {}, arch=arch)
    return {row.id.removeprefix("reported-") for row in reference.matching(launch)}


def test_reported_rows_match_launches_like_theirs() -> None:
    symmetric = "--enable-torch-symm-mem"
    assert "first-5" in names(symmetric)
    assert "first-5" not in names(symmetric, arch="sm100")
    assert "first-5" in names(symmetric, arch=None)  # better one too many than none
    assert "first-5" not in names("--tp 8")
    assert {"pub-25", "pub-28"} <= names("--moe-runner-backend flashinfer_trtllm")
    assert "pub-25" not in names("--moe-runner-backend triton")
    assert "pub-4" in names("", "moonshotai/Kimi-K2.5")
    assert "pub-23" not in names("", "zai-org/GLM-5.12")  # no part of a longer number
    assert "first-4" in names("", env={"NCCL_ALGO": "Tree,Ring"})
    assert "first-4" not in names("", env={"NCCL_ALGO": "Ring"})
    assert names("", "a model nobody reported") == set()


def test_cost_of_a_round_between_measured_batches() -> None:
    cost = costs.newest([run()], model="m", steps=3, host="0123456789ab")
    assert cost is None  # no arm served that model
    arms = tuple(arm.model_copy(update={"config": {"served_model_name": "m"}}) for arm in run().arms)
    cost = costs.newest([run(arms=arms)], model="m", steps=3, host="0123456789ab")
    assert cost is not None
    assert cost.at(1) == cost.at(0.5) == pytest.approx(3.2 / 1.42)
    assert cost.at(2) == pytest.approx((3.2 / 1.42 + 3.2) / 2)  # half of the way from 1 to 4, in doublings
    assert cost.at(500) == pytest.approx(3.2 / 0.86)
    assert costs.newest([run(arms=arms)], model="m", steps=3, host="other") is None
    invalid = run().outcome.model_copy(update={"valid": False})  # type: ignore[union-attr]
    assert costs.newest([run(arms=arms, outcome=invalid)], model="m", steps=3, host="0123456789ab") is None


def test_an_export_comes_back_whole_and_twice_is_once(tmp_path: Path) -> None:
    file = tmp_path / "export.json"
    with Ledger(tmp_path / "one") as ledger:
        ledger.add(entry(1, summary=HOSTILE), entry(2))
        ledger.note(entry(1).id, "a note")
        ledger.add_run(run())
        file.write_text(exchange.to_json(ledger.select(), ledger.runs()))
        before = ledger.select()
    with Ledger(tmp_path / "two") as ledger:
        assert exchange.take_in(ledger, file) == (3, 3)
        assert exchange.take_in(ledger, file) == (3, 0)
        assert ledger.select() == before
        assert ledger.runs() == [run()]


def test_a_run_file_can_be_taken_in_even_when_its_end_is_cut(tmp_path: Path) -> None:
    whole = run()
    head = whole.model_copy(update={"blocks": (), "outcome": None})
    lines = [head.model_dump_json(), *(block.model_dump_json() for block in whole.blocks)]
    file = tmp_path / "run.jsonl"
    file.write_text("\n".join(lines)[:-40])
    with Ledger(tmp_path / "ledger") as ledger:
        assert exchange.take_in(ledger, file) == (1, 1)
        assert len(ledger.runs()[0].blocks) == len(whole.blocks) - 1


def test_a_known_run_may_lie_elsewhere_or_come_from_a_report(tmp_path: Path) -> None:
    whole = run()
    lines = [whole.model_copy(update={"blocks": (), "outcome": None}), *whole.blocks, whole.outcome]
    first, moved, raw = tmp_path / "run.jsonl", tmp_path / "elsewhere" / "moved.jsonl", tmp_path / "raw.jsonl"
    moved.parent.mkdir()
    first.write_text("".join(line.model_dump_json() + "\n" for line in lines if line))
    moved.write_bytes(first.read_bytes())
    data = re.findall(r'href="data:application/gzip;base64,([^"]+)"', page.render([whole]))
    raw.write_bytes(gzip.decompress(base64.b64decode(data[0])))
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.add_run(whole, artefacts=("a place",), study="a search")  # as `ab` and `tune` do
        assert [exchange.take_in(ledger, file) for file in (first, moved, raw)] == [(1, 0)] * 3
        assert ledger.select()[0].artefacts == ("a place",)
        first.write_text(first.read_text().replace('"tok_s":', '"tok_s":1', 1))
        with pytest.raises(LedgerError, match="another entry has the id"):
            exchange.take_in(ledger, first)


@given(
    st.one_of(
        st.text(), st.recursive(st.none() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)).map(str)
    )
)
def test_other_files_are_refused(text: str) -> None:
    with Ledger(Path(":memory:")) as ledger:
        file = Path("/dev/null")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "read_text", lambda *_, **__: text)
            with pytest.raises(LedgerError, match="neither an export"):
                exchange.take_in(ledger, file)
        assert ledger.count() == 0


def test_markdown_is_a_table_whatever_the_texts_are() -> None:
    text = exchange.to_markdown([entry(summary=f"a | b\n{HOSTILE}", evidence=("one\ntwo",))])
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 3
    assert "\\<script\\>" in table[2]
    assert "\n```\none\ntwo\n```\n" in text


def test_evidence_stays_code_whatever_it_holds() -> None:
    """Behind a list, indented lines are a paragraph of its last item, and HTML in it is alive."""
    lines = ("<script>alert(1)</script>", "```", "</code><b>", "````html", "    deep")
    found = entry(evidence=lines, fix="a fix", numbers={"a": Number(value=1)})
    html = MarkdownIt("commonmark").enable("table").render(exchange.to_markdown([found]))
    assert "<script" not in html
    assert "<b>" not in html
    assert html.count("<pre>") == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\n```\n" in html


def test_an_export_is_ascii_and_comes_back_with_its_control_characters(tmp_path: Path) -> None:
    odd = entry(summary="\x1b[2J \x9b \x85 \u2028 \u00fc", env={"A": "\x00"})
    file = tmp_path / "export.json"
    file.write_text(exchange.to_json([odd], [run()]))
    assert file.read_text().isascii()
    assert "\x1b" not in file.read_text()
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.add(odd)
        ledger.add_run(run())
        assert exchange.take_in(ledger, file) == (1, 0)
