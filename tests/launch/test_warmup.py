from __future__ import annotations

import http.server
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from sglang_bw.launch import warmup
from sglang_bw.launch.warmup import Sample, judge
from sglang_bw.recipes.schema import Warmup
from tests.launch.serving import HERE

WORDS = tuple(range(64))


def sample(
    ids: tuple[int, ...] = WORDS, *, rounds: int = 20, accepted: int = 44, logprob: float | None = -0.5
) -> Sample:
    return Sample("a prompt", "text", ids, tuple(logprob for _ in ids), rounds, accepted, seconds=2.0)


def test_numbers() -> None:
    report = judge([sample(), sample(rounds=30, accepted=56)], speculates=True)
    assert report.accept_length == pytest.approx(1 + 100 / 50)
    assert report.tokens_per_second == pytest.approx(32.0)
    assert report.warnings == ()
    assert not report.broken


def test_without_speculation() -> None:
    report = judge([sample(rounds=0, accepted=0)], speculates=False)
    assert report.accept_length is None
    assert report.warnings == ()


@pytest.mark.parametrize(
    ("given", "text", "broken"),
    [
        pytest.param(sample(accepted=0), "accept length is 1.00", False, id="useless draft"),
        pytest.param(sample(accepted=1), "accept length is 1.05", False, id="nearly useless draft"),
        pytest.param(sample(logprob=None), "NaN", True, id="NaN becomes null in JSON"),
        pytest.param(sample(logprob=float("nan")), "NaN", True, id="NaN"),
        pytest.param(sample(logprob=float("-inf")), "NaN", True, id="infinity"),
        pytest.param(
            sample((7,) * 64), "One token repeats in the answer to 'a prompt' (token 7)", True, id="one token"
        ),
        pytest.param(sample((*range(30), *[7] * 34)), "One token repeats", True, id="one token from the middle on"),
        pytest.param(sample(()), "is empty", False, id="no answer"),
        pytest.param(sample(rounds=0, accepted=0), "no verify passes", False, id="speculation is off"),
    ],
)
def test_warnings(given: Sample, text: str, broken: bool) -> None:
    report = judge([given], speculates=True)
    assert len(report.warnings) == 1
    assert text in report.warnings[0]
    assert report.broken is broken


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(sample(accepted=4), id="accept length 1.2"),
        pytest.param(sample(rounds=8, accepted=0), id="too few rounds to say"),
        pytest.param(sample((1, 2) * 32), id="two tokens in turn"),
        pytest.param(sample((*[7] * 10, *range(54))), id="a short run: indentation"),
        pytest.param(sample((7,) * 8), id="a short answer"),
    ],
)
def test_no_warnings(given: Sample) -> None:
    assert judge([given], speculates=True).warnings == ()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Callable[..., tuple[str, list[Any]]]]:
    """Start the endpoints of the fake engine in this process: returns its URL and the requests it gets."""
    servers = []

    def start(mode: str, key: str = "") -> tuple[str, list[Any]]:
        monkeypatch.setenv("FAKE_MODE", mode)
        monkeypatch.setattr(sys, "argv", ["engine", "--speculative-algorithm", "EAGLE3"])
        fake = runpy.run_path(str(HERE / "fake_engine.py"))
        fake["Handler"].do_POST.__globals__["KEY"] = key  # a real start reads it from a file
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), fake["Handler"])
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}", fake["requests"]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_asks_the_chat_endpoint_after_one_unmeasured_request(engine: Callable[[str], tuple[str, list[Any]]]) -> None:
    url, requests = engine("")
    report = warmup.run(url, Warmup(prompts=("a", "b")), speculates=True)
    assert [path for path, _ in requests] == ["/v1/chat/completions"] * 3
    assert [body["messages"][0]["content"] for _, body in requests] == ["a", "a", "b"]
    assert all(body["temperature"] == 0 for _, body in requests)
    assert len(report.samples) == 2
    assert report.accept_length == pytest.approx(3.2)
    assert report.tokens_per_second > 0


def test_asks_with_the_bare_prompt_when_the_recipe_says_so(engine: Callable[[str], tuple[str, list[Any]]]) -> None:
    url, requests = engine("")
    warmup.run(url, Warmup(format="text", prompts=("a",)), speculates=True)
    assert [path for path, _ in requests] == ["/generate"] * 2
    assert requests[0][1]["text"] == "a"


def test_a_model_without_a_chat_template(engine: Callable[[str], tuple[str, list[Any]]]) -> None:
    url, requests = engine("no-chat")
    assert warmup.run(url, Warmup(prompts=("a",)), speculates=True).accept_length == pytest.approx(3.2)
    assert [path for path, _ in requests] == ["/v1/chat/completions", "/generate", "/generate"]


def test_a_refusal_is_an_error(engine: Callable[..., tuple[str, list[Any]]]) -> None:
    url, _ = engine("", "secret")
    with pytest.raises(httpx.HTTPStatusError):
        warmup.run(url, Warmup(prompts=("a",)), speculates=True)
    assert warmup.run(url, Warmup(prompts=("a",)), speculates=True, api_key="secret").samples
