"""Prompt sets: those that ship, the forms that are read, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scripts.prompt_sets import sets
from sglang_bw.errors import PromptsError
from sglang_bw.experiment import prompts
from sglang_bw.experiment.prompts import load

ASK = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("name", ["chat", "code", "maths", "long", "agent"])
def test_bundled_sets_are_what_the_script_writes(name: str) -> None:
    text = (prompts._folder() / f"{name}.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in text.splitlines()] == sets()[name], "run `python -m scripts.prompt_sets`"
    found = load(name)
    assert len(found.prompts) >= 4
    assert not found.is_noise


def test_each_set_is_what_its_name_says() -> None:
    assert all(prompt.tools for prompt in load("agent").prompts)
    assert all(len(prompt.words) > 20_000 for prompt in load("long").prompts)
    assert set(prompts.names()) == {"chat", "code", "maths", "long", "agent", "tiny", "random"}
    assert load("chat").first(3).digest != load("chat").digest == load("chat").digest


@pytest.mark.parametrize(
    ("row", "roles", "text"),
    [
        pytest.param(ASK, ["user"], "Hi", id="openai"),
        pytest.param({"custom_id": "7", "body": {**ASK, "max_tokens": 5}}, ["user"], "Hi", id="batch"),
        pytest.param(
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
            ["user"],
            "Hi",
            id="sharegpt",
        ),
        pytest.param({"prompt": "Hi"}, [], "Hi", id="text"),
    ],
)
def test_forms(tmp_path: Path, row: object, roles: list[str], text: str) -> None:
    for name, content in (("a.jsonl", json.dumps(row) + "\n\n"), ("a.json", json.dumps([row], indent=1))):
        (tmp_path / name).write_text(content)
        (prompt,) = load(str(tmp_path / name)).prompts
        assert [message["role"] for message in prompt.messages] == roles
        assert prompt.words == text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("{", r"set\.jsonl:1 is no JSON"),
        ("[{", "is no JSON"),
        ('"Hi"', "is an object"),
        ('{"prompt": ""}', "empty or missing"),
        ('{"prompt": "   "}', "empty or missing"),
        ('{"prompt": [1, "a"]}', "empty or missing"),
        ('{"messages": []}', "not empty"),
        ('{"messages": [{"content": "Hi"}]}', "has no role"),
        ('{"prompt": "Hi", "max_tokens": 0}', "max_tokens is 0"),
        ('{"prompt": "Hi", "max_tokens": "all"}', "max_tokens is 'all'"),
        ('{"conversations": [{"from": "gpt", "value": "Hello"}]}', "nobody asks"),
        ('{"conversations": [{"from": "who", "value": "Hello"}]}', "a turn needs"),
        ('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}', "stands twice"),
        (r'{"id": "a\ud800", "prompt": "x"}', r"set\.jsonl:1: half of a surrogate pair"),
        (r'{"prompt": "x\udc00"}', "half of a surrogate pair"),
        (r'{"messages": [{"role": "user", "content": "\ud83d"}]}', "half of a surrogate pair"),
        (r'{"messages": [{"role": "user", "content": "x"}], "tools": [{"\ud83d": 1}]}', "half of a surrogate pair"),
        ("[" * 200_000, "is no JSON"),
        ('{"prompt": ' + "[" * 200_000, "is no JSON"),
    ],
)
def test_what_is_no_prompt_set(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "set.jsonl").write_text(content)
    with pytest.raises(PromptsError, match=says):
        load(str(tmp_path / "set.jsonl"))


@settings(deadline=None)
@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=4))
@example(["one\u2028two", "three\u2029four\x85five\x0b\x0c\x1csix"])
@example(["\N{GRINNING FACE}"])
def test_any_text_is_a_prompt(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    """Separators that JSON leaves as they are do not end a line, escaped or not."""
    path = tmp_path_factory.mktemp("sets") / "set.jsonl"
    for ascii_only in (True, False):
        rows = (json.dumps({"prompt": text}, ensure_ascii=ascii_only) for text in texts)
        path.write_text("\r\n".join(rows) + "\n", encoding="utf-8", newline="")
        assert [prompt.text for prompt in load(str(path)).prompts] == texts


def test_a_file_name_that_is_no_utf_8(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/set-\xff.jsonl"))
    path.write_text(json.dumps({"prompt": "Hi"}))
    found = load(str(path))
    assert (found.name, found.prompts[0].id) == ("set-?", "set-?.jsonl:1")


def test_no_such_set(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match="no prompt set 'chatt'"):
        load("chatt")
    (tmp_path / "latin").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(PromptsError, match="not UTF-8"):
        load(str(tmp_path / "latin"))


def test_random_tokens_are_known(tmp_path: Path) -> None:
    assert load("random").is_noise
    assert load("random").digest == load("random").digest
    (tmp_path / "ids").write_text('{"prompt": [5, 6, 7]}')
    assert load(str(tmp_path / "ids")).is_noise
    decoded = {"prompt": "zure недел 参与 tofu ובשל يات ability ไทย zen"}
    (tmp_path / "decoded").write_text(json.dumps(decoded))
    assert load(str(tmp_path / "decoded")).is_noise
    (tmp_path / "japanese").write_text(json.dumps({"prompt": "東京タワーはどこですか。Tokyo Tower"}))
    assert not load(str(tmp_path / "japanese")).is_noise
