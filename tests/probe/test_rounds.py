"""The cost of a round: the straight line, the differences that it is made of, and what may not be asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from sglang_bw.cli.probe import probe
from sglang_bw.errors import ProbeError, RoundFitError
from sglang_bw.host.fingerprint import Fingerprint
from sglang_bw.launch.probe import load, session, setups
from sglang_bw.launch.probe.rounds import Point, Result, fit
from sglang_bw.plan.speculation.probe import round_cost
from sglang_bw.recipes import lookup
from sglang_bw.recipes.flags import Flag
from sglang_bw.recipes.hardware import Hardware

HOST = Fingerprint("x86_64", "a processor", "580.1", ("RTX PRO 6000",) * 2, ("5x16",) * 2, ())


@given(
    seconds=st.floats(1e-4, 1.0),
    batch=st.integers(1, 64),
    lengths=st.lists(st.floats(1.0, 8.0), min_size=2, max_size=6, unique=True),
)
def test_a_round_of_constant_time_is_a_straight_line(seconds: float, batch: int, lengths: list[float]) -> None:
    line = fit(7, [Point(batch, length, seconds, 0.0, True) for length in lengths])
    assert line.seconds == pytest.approx(seconds)
    assert line.residual == pytest.approx(0, abs=1e-9)
    assert line.straight


def test_a_round_that_gets_slower_with_the_accept_length_is_none() -> None:
    result = _result({1.0: 0.010, 2.5: 0.012, 4.0: 0.014})
    error = result.error()
    assert isinstance(error, RoundFitError)
    assert "3 steps at batch 1" in error.message
    assert result.as_json()["rounds"][0]["straight"] is False


def test_one_accept_length_is_no_line() -> None:
    result = _result({1.0: 0.010})
    assert result.error() is None
    assert result.as_json()["rounds"][0]["straight"] is None


def test_plan_reads_the_result(tmp_path: Path) -> None:
    result = _result({1.0: 0.030, 4.0: 0.030})
    file = tmp_path / "round.json"
    file.write_text(json.dumps(result.as_json()))
    ratio = round_cost(file).ratio(0, 1, 3)
    assert ratio.ratio == pytest.approx(3.0)
    assert result.as_json()["table"] == [[0, 1, 0.010], [3, 1, pytest.approx(0.030)]]
    row = result.as_json()["rounds"][0]
    assert row["simulated"] is True
    assert row["break_even"] == pytest.approx(3.0)
    assert "cold draft" in result.as_json()["note"]


def _result(times: dict[float, float]) -> Result:
    result = Result(HOST, "tiny", "0.5.23+bw.1", "cpu")
    result.plain[1] = Point(1, 1.0, 0.010, 0.0, False)
    result.rounds[3, 1] = [Point(1, length, seconds, 0.0, True) for length, seconds in times.items()]
    return result


def test_the_servers_of_a_recipe(tmp_path: Path) -> None:
    recipe = lookup.find("tiny")
    found = setups.setups(recipe, (), (), tmp_path, goodput=True)
    assert [(setup.steps, setup.accept_length) for setup in found] == [(None, 1), (0, 1), (3, 1), (3, 2.5), (3, 4)]
    plain, off, first = (setup.command(recipe, Hardware(device="cpu"), {}, 31000, ()) for setup in found[:3])
    assert not plain.speculates
    assert "SGLANG_SIMULATE_ACC_LEN" not in plain.env
    assert Flag("speculative-adaptive-policy", ("goodput",)) in off.flags
    config = next(flag.values[0] for flag in off.flags if flag.name == "speculative-adaptive-config")
    assert not list(tmp_path.iterdir())  # it is written at the start, and not by a dry run
    tiers = dict(found[1].files[Path(config)])
    assert tiers.pop("1") == {"candidate_steps": [0]}
    assert [(int(batch) > 4096, tier) for batch, tier in tiers.items()] == [(True, {"candidate_steps": [3]})]
    assert first.env["SGLANG_SIMULATE_ACC_LEN"] == "1"
    assert first.env["SGLANG_SIMULATE_ACC_TOKEN_MODE"] == "real-draft-token"


def test_other_steps_take_other_draft_tokens(tmp_path: Path) -> None:
    recipe = lookup.find("tiny")
    setup = setups.setups(recipe, (5,), (2.0,), tmp_path, goodput=False)[1]
    tokens = setup.command(recipe, Hardware(device="cpu"), {}, 31000, ()).flags
    assert Flag("speculative-num-steps", ("5",)) in tokens
    assert Flag("speculative-num-draft-tokens", ("6",)) in tokens


def test_impossible_lengths_and_trees_are_refused(tmp_path: Path) -> None:
    recipe = lookup.find("tiny")
    with pytest.raises(ProbeError, match="accept length of 5 is impossible with 3"):
        setups.setups(recipe, (3,), (5.0,), tmp_path, goodput=False)
    assert recipe.spec
    tree = recipe.model_copy(update={"spec": recipe.spec.model_copy(update={"topk": 4, "draft_tokens": 8})})
    with pytest.raises(ProbeError, match="only its own 3 steps"):
        setups.setups(tree, (0, 3), (), tmp_path, goodput=False)
    found = setups.setups(tree, (), (), tmp_path, goodput=False)
    assert {setup.env["SGLANG_SIMULATE_ACC_TOKEN_MODE"] for setup in found if setup.steps} == {"fixed"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        pytest.param([], "name either a recipe", id="nothing"),
        pytest.param(["tiny", "--url", "http://127.0.0.1:1"], "name either", id="both"),
        pytest.param(["--url", "http://127.0.0.1:1", "--steps", "3"], "do not go with --url", id="steps of a server"),
        pytest.param(["tiny", "--batches", "1,x"], "no list of whole numbers", id="batches"),
        pytest.param(["tiny", "--batches", "0"], "at least one request", id="batch 0"),
        pytest.param(["tiny", "--accept", "many"], "no list of numbers", id="lengths"),
        pytest.param(["tiny", "--", "fast"], "no engine flag", id="flags"),
    ],
)
def test_wrong_usage(arguments: list[str], text: str) -> None:
    run = CliRunner().invoke(probe, ["round", *arguments])
    assert run.exit_code == 2
    assert text in run.output.replace("\n", " ")


def test_a_url_where_nobody_answers() -> None:
    run = CliRunner().invoke(probe, ["round", "--url", "http://127.0.0.1:9", "--batches", "1"])
    assert isinstance(run.exception, ProbeError)
    assert "does not answer" in run.exception.message
    with pytest.raises(ProbeError):
        load.Client("http://127.0.0.1:99999").served()


class _Clock:
    """Time that only the stand-in server spends."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class _Engine(ThreadingHTTPServer):
    """Answers as an engine whose prefill and rounds take known times.

    :ivar answer: what it gives to every batch instead.
    :ivar status: of every answer.
    """

    answer: Any = None
    status = 200

    def __init__(self, clock: _Clock, info: dict[str, Any], *, round_s: float, length: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.clock, self.info, self.round_s, self.length = clock, info, round_s, length
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: _Engine

    def do_GET(self) -> None:
        self._answer(self.server.info)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.answer is not None:
            self._answer(self.server.answer)
            return
        tokens, texts = body["sampling_params"]["max_new_tokens"], body["text"]
        rounds = -(-tokens // self.server.length)
        self.server.clock.now += 0.5 + 0.1 * len(texts) + rounds * self.server.round_s
        meta = {"completion_tokens": tokens, "prompt_tokens": 9}
        if self.server.info["speculative_algorithm"]:
            meta["spec_verify_ct"] = rounds
        self._answer([{"meta_info": meta} for _ in texts])

    def _answer(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


INFO = {"model_path": "m", "version": "0.5.23", "device": "cuda", "speculative_algorithm": None}
SPEC = {**INFO, "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_adaptive": False}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    found = _Clock()
    monkeypatch.setattr(load, "time", found)
    return found


@pytest.fixture
def pair(clock: _Clock) -> Iterator[tuple[_Engine, _Engine]]:
    servers = (
        _Engine(clock, INFO, round_s=0.010, length=1),
        _Engine(clock, SPEC, round_s=0.025, length=2),
    )
    yield servers
    for server in servers:
        server.shutdown()
        server.server_close()


def test_running_servers_give_the_ratio_whatever_prefill_takes(pair: tuple[_Engine, _Engine]) -> None:
    result = Result(HOST, "", "", "")
    plan = session.Plan((1, 4), texts=("a", "b"))
    kept: list[tuple[bool, int]] = []
    session.ask_all(
        [server.url for server in pair],
        plan,
        result,
        tell=lambda _: None,
        keep=lambda r: kept.append((r.complete, len(r.plain) + len(r.rounds))),
    )
    assert kept == [(False, 1), (False, 2), (False, 3), (False, 4), (True, 4)]  # a batch that was measured is not lost
    assert (result.engine, result.device) == ("0.5.23", "cuda")
    for line in result.lines():
        assert line.steps == 3
        assert line.seconds == pytest.approx(0.025)
        assert line.simulated is None
        assert line.points[0].accept_length == pytest.approx(2.0)
        assert result.ratio(line) == pytest.approx(2.5)


def test_a_server_that_changes_its_steps_is_refused(pair: tuple[_Engine, _Engine]) -> None:
    pair[1].info = {**SPEC, "speculative_adaptive": True}
    with pytest.raises(ProbeError, match="changes its draft steps"):
        _ask(pair[1].url)


def test_a_batch_that_would_wait_is_refused(pair: tuple[_Engine, _Engine]) -> None:
    pair[0].info = {**INFO, "internal_states": [{"effective_max_running_requests_per_dp": 2}]}
    with pytest.raises(ProbeError, match="at most 2 requests at once, not 4"):
        _ask(pair[0].url)


def test_no_sglang_server(pair: tuple[_Engine, _Engine]) -> None:
    pair[0].info = {"hello": "world"}
    with pytest.raises(ProbeError, match="no SGLang server"):
        _ask(pair[0].url)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        pytest.param([{"meta_info": {}}, {}], "something else than text", id="no counts"),
        pytest.param([{"meta_info": "x"}], "something else than text", id="words"),
        pytest.param([], "gave 0 answers to a batch of 1", id="nothing"),
        pytest.param({"text": "one"}, "something else than text", id="one answer"),
        pytest.param([{"meta_info": {"completion_tokens": 16, "prompt_tokens": 1}}] * 2, "gave 2 answers", id="two"),
        pytest.param([{"meta_info": {"completion_tokens": 3, "prompt_tokens": 1}}], "short of 16 tokens", id="short"),
    ],
)
def test_nonsense_for_an_answer(pair: tuple[_Engine, _Engine], answer: Any, text: str) -> None:
    pair[0].answer = answer
    with pytest.raises(ProbeError, match=text):
        _ask(pair[0].url)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param({"max_running_requests": float("inf")}, "no SGLang server", id="infinite requests"),
        pytest.param({"speculative_num_steps": "many", "speculative_algorithm": "X"}, "no SGLang", id="steps"),
    ],
)
def test_nonsense_of_a_server(pair: tuple[_Engine, _Engine], change: dict[str, Any], text: str) -> None:
    pair[0].info = {**INFO, **change}
    with pytest.raises(ProbeError, match=text):
        _ask(pair[0].url)


@pytest.mark.parametrize(
    ("status", "text"), [(401, "wants another key"), (404, "not as an SGLang server does: status 404"), (500, "500")]
)
def test_a_refusal_shows_no_password(pair: tuple[_Engine, _Engine], status: int, text: str) -> None:
    pair[0].status = status
    with pytest.raises(ProbeError, match=text) as caught:
        _ask(pair[0].url.replace("://", "://user:sekret@"))
    assert "sekret" not in caught.value.message
    pair[0].status = 200


@pytest.mark.parametrize("url", ["http://[::1", "http://u:sekret@127.0.0.1:9", "no url", "http://127.0.0.1:x"])
def test_no_url(url: str) -> None:
    with pytest.raises(ProbeError) as caught:
        _ask(url)
    assert "sekret" not in caught.value.message


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_path": "another"}, "has another model than .*: another, not m"),
        ({"version": "0.5.9"}, "has another version"),
        ({"device": "cpu"}, "has another device"),
        ({"speculative_algorithm": None}, "more than one of the servers decodes plainly"),
    ],
)
def test_servers_that_give_no_ratio(pair: tuple[_Engine, _Engine], change: dict[str, Any], text: str) -> None:
    pair[1].info = {**SPEC, **change}
    with pytest.raises(ProbeError, match=text):
        _ask(*(server.url for server in pair))


def _ask(*urls: str) -> None:
    result = Result(HOST, "", "", "")
    session.ask_all(urls, session.Plan((1, 4), texts=("a",)), result, tell=lambda _: None, keep=lambda _: None)


class _Noisy(load.Client):
    """Its answers take their rounds, and what the machine adds to each."""

    def __init__(self, extra: list[float]) -> None:
        self.extra = iter(extra)

    def decode(self, prompts: Sequence[str], tokens: int) -> load.Timed:
        return load.Timed(0.01 * tokens + next(self.extra), tokens, tokens, tokens, 9, len(prompts))


def test_a_disturbed_repeat_stays_among_them() -> None:
    """What is too quick by noise is as much noise as what is too slow: without it the median would be too slow."""
    calm = [0.0, 0.0]
    cell = load.measure(_Noisy([*calm, 0, 0, 5.0, 0, 0, 0]), ["a"], rounds=64, repeats=3, tell=lambda _: None)
    assert cell.seconds == pytest.approx(0.01)
    assert cell.spread > 5
    with pytest.raises(ProbeError, match="drown in the noise"):
        load.measure(_Noisy([*calm, 5.0, 0, 5.0, 0, 0, 0]), ["a"], rounds=64, repeats=3, tell=lambda _: None)


def test_times_that_were_disturbed_are_said() -> None:
    result = _result({1.0: 0.030, 4.0: 0.030})
    assert not result.noisy()
    result.plain[1] = replace(result.plain[1], spread=0.3)
    assert result.noisy()
    assert result.spread(result.lines()[0]) == 0.3


def test_prompts_grow_to_a_context() -> None:
    assert load.prompts(("ab", "cd"), 3, 0) == ["ab", "cd", "2. ab"]
    assert len(set(load.prompts(("ab", "cd", "ef"), 64, 0))) == 64
    long = load.prompts(("four words are here",), 1, 100)[0]
    assert 400 <= len(long) < 440


def test_pace_learns_from_what_has_been_done() -> None:
    pace = session.Pace(servers=3, cells=6)
    guess = pace.left_s()
    pace.starts.append(10.0)
    pace.measured += [1.0, 1.0]
    assert pace.left_s() == pytest.approx(2 * 10 + 4)
    assert pace.left_s() < guess
    assert replace(pace, starts=[600.0]).says().endswith("min left")
