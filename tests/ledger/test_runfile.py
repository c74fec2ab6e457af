"""A run file holds whatever models write, and a cut takes no more than its last line."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_bw.errors import UnreadableRunError
from sglang_bw.ledger.record import RequestRow, RunRecord
from sglang_bw.ledger.runfile import RunFile, read
from tests.ledger.runs import run

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]))


def written(folder: pytest.TempPathFactory, prompt: str, answer: str) -> tuple[RunFile, RunRecord]:
    whole = run()
    row = RequestRow(prompt=prompt, text=answer, output_tokens=1)
    blocks = tuple(block.model_copy(update={"rows": (row,)}) for block in whole.blocks[:2])
    file = RunFile(folder.mktemp("runs") / "run.jsonl")
    file.write(whole.model_copy(update={"blocks": (), "outcome": None}))
    for block in blocks:
        file.write(block)
    file.close()
    return file, whole.model_copy(update={"blocks": blocks, "outcome": None})


@settings(max_examples=40, deadline=None)  # every line is seen onto the disk
@given(TEXT, TEXT)
@example("a\u2028b", "one\u2029two\x85three\x0b\x0c\x1c\x1d\x1efour\r\n")
def test_any_text_is_read_again(tmp_path_factory: pytest.TempPathFactory, prompt: str, answer: str) -> None:
    file, whole = written(tmp_path_factory, prompt, answer)
    assert read(file.path) == whole


def test_a_cut_anywhere_in_the_last_line_loses_that_line_only(tmp_path_factory: pytest.TempPathFactory) -> None:
    """In the middle of a character as well."""
    file, whole = written(tmp_path_factory, "東京", "é\u2028")
    data = file.path.read_bytes()
    last = data.rstrip(b"\n").rindex(b"\n")
    for end in range(last + 1, len(data) - 1):
        file.path.write_bytes(data[:end])
        assert read(file.path).blocks == whole.blocks[:-1]


@pytest.mark.parametrize("content", [b"\xff\n{}", b"[" * 200_000 + b"\n{}", b"", json.dumps([1]).encode()])
def test_what_is_no_run(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("runs") / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(UnreadableRunError):
        read(path)
