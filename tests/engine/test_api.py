"""The OpenAI endpoints of a speculating server, through the client that people use."""

from __future__ import annotations

import openai
import pytest

from tests.engine.conftest import RunningServer

pytestmark = pytest.mark.engine
QUESTION = [{"role": "user", "content": "Can you say something about yourself?"}]


@pytest.fixture(scope="module")
def client(chain: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{chain.url}/v1", api_key="none", timeout=120)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0, max_tokens=40)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage
    assert 1 <= answer.usage.completion_tokens <= 40


def test_chat_stream_gives_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    arguments = {"model": "tiny", "messages": QUESTION, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**arguments).choices[0].message.content
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(pieces) == whole
    assert len(pieces) > 3
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens <= 40


def test_completion_stream(client: openai.OpenAI, chain: RunningServer, prompts: list[str]) -> None:
    stream = client.completions.create(model="tiny", prompt=prompts[0], temperature=0, max_tokens=32, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert len(pieces) > 3
    assert chain.generate(prompts[0])["text"].startswith("".join(pieces))


def test_stop_string(client: openai.OpenAI, chain: RunningServer, prompts: list[str]) -> None:
    """A stop string in the middle of an accepted draft must cut the text there."""
    text = chain.generate(prompts[0])["text"]
    stop = text[10:14]
    answer = client.completions.create(model="tiny", prompt=prompts[0], temperature=0, max_tokens=48, stop=stop)
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
