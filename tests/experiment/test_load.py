"""What the client measures, on servers whose pace is known; and that it is not the bottleneck."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_bw.errors import PromptsError
from sglang_bw.experiment import arm, client, load
from sglang_bw.experiment.client import Sampling, StreamFailedError
from sglang_bw.experiment.gpu import GpuSampler
from sglang_bw.experiment.prompts import Prompt
from sglang_bw.experiment.stream import Arrivals, SseReader
from sglang_bw.host import nvml
from sglang_bw.launch.command import Command
from sglang_bw.recipes import flags
from tests.experiment.conftest import StartMock
from tests.host.fake_host import Board, Host

CHAT = Prompt("chat", messages=({"role": "user", "content": "Hello"},))
TEXT = Prompt("text", text="Once upon")
MANY = 256
TRIES = 3
DISTURBED = 0.05


def many(count: int) -> list[Prompt]:
    return [Prompt(f"p{n}", text=f"prompt {n}") for n in range(count)]


def test_the_answers_text_is_kept_beside_its_ids(mock: StartMock) -> None:
    for prompt in (CHAT, TEXT):
        (row,) = load.run_block(mock(), [prompt], Sampling(max_tokens=4), 1).rows
        assert row.text == "".join(map(chr, row.output_ids or ()))


@pytest.mark.parametrize("prompt", [CHAT, TEXT, Prompt("ids", ids=(5, 6, 7))], ids=lambda p: p.id)
def test_one_request(mock: StartMock, prompt: Prompt) -> None:
    """Twenty events of two tokens, 5 ms apart: counted by usage, timed by arrival."""
    url = mock(token_s=0.005, burst=2, speculative=True)
    (row,) = load.run_block(url, [prompt], Sampling(max_tokens=40), 1).rows
    assert (row.output_tokens, row.prompt_tokens, row.finish) == (40, 9, "length")
    assert row.output_ids is not None
    assert len(row.output_ids) == 40
    assert (row.rounds, row.accepted, row.histogram) == (13, 26, (0, 0, 13, 0))
    assert row.ttft_s
    assert row.tpot_s
    assert row.e2e_s
    assert row.ttft_s >= 0.005
    assert row.e2e_s >= 0.1
    assert row.tpot_s == pytest.approx((row.e2e_s - row.ttft_s) / 39)


def test_prompts_keep_their_order_and_their_number_at_a_time(mock: StartMock) -> None:
    url = mock(token_s=0.002)
    measured = load.run_block(url, many(12), Sampling(max_tokens=10), 4)
    assert [row.prompt for row in measured.rows] == [f"p{n}" for n in range(12)]
    open_at = [
        sum(other.began_s <= row.began_s < other.began_s + (other.e2e_s or 0) for other in measured.rows)
        for row in measured.rows
    ]
    assert max(open_at) <= 4


def test_a_short_block_is_looked_at_while_it_runs(mock: StartMock) -> None:
    """The pool is empty before the first request and after the last one."""
    measured = load.run_block(mock(token_s=0.01), many(4), Sampling(max_tokens=20), 4)
    assert measured.seconds < 0.5
    assert measured.kv_use == 0.25


def test_gpus_are_sampled_in_a_short_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "load", Host(boards=[Board(), Board()]).nvml)
    with GpuSampler(local=True) as sampler:
        time.sleep(0.3)
    use = sampler.use()
    assert use is not None
    assert (use.clock_mhz, use.power_w) == ((2430.0, 2430.0), (35.0, 35.0))
    assert use.pcie_rx_mb_s == (1024.0, 2048.0)


def test_only_an_arms_own_gpus_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beside it idle, or do something else."""
    library = Host().nvml()
    monkeypatch.setattr(nvml, "load", lambda: library)
    with GpuSampler([library.nvmlDeviceGetUUID(3)], local=True) as sampler:
        time.sleep(0.1)
    use = sampler.use()
    assert use is not None
    assert use.pcie_rx_mb_s == (4096.0,)
    with GpuSampler([], local=True) as sampler:
        time.sleep(0.1)
    assert sampler.use() is None


def test_an_arms_own_gpus_follow_from_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "load", Host().nvml)
    two = Command(flags.parse(("--model-path", "org/model", "--tp-size", "2")), {}, "cuda")
    every = [gpu.uuid for gpu in nvml.read(Host().nvml()).boards]
    assert arm._gpus(two, {}) == every[:2]
    assert arm._gpus(two, {"CUDA_VISIBLE_DEVICES": "3,1"}) == [every[3], every[1]]
    assert arm._gpus(two, {"CUDA_VISIBLE_DEVICES": "9"}) is None
    assert arm._gpus(replace(two, device="cpu"), {}) == []


@pytest.mark.parametrize(
    ("fault", "failure", "says"),
    [
        ("500", "server-error", "out of memory"),
        ("die", "server-died", "broke the connection"),
        ("cut", "bad-stream", "ended without"),
        ("garbage", "bad-stream", "not an event"),
        ("binary", "bad-stream", "codec"),
        ("no-json", "bad-stream", "Expecting"),
        ("odd", "bad-stream", "no attribute"),
        ("deep", "bad-stream", "nested too deeply"),
        ("infinite", "bad-stream", "completion_tokens is inf"),
        ("nine", "bad-stream", "prompt_tokens is 'nine'"),
        ("negative", "bad-stream", "completion_tokens is -5"),
        ("no-reason", "bad-stream", "finish_reason is"),
        ("empty", "server-error", "p0.*no tokens"),
        ("abort", "server-error", "aborted the request"),
        ("abort-native", "server-error", "The engine ends"),
        ("error", "server-error", "aborted"),
        ("no-usage", "bad-stream", "without usage"),
        ("never", "timeout", "said nothing for 1 s"),
        ("stalls", "timeout", "said nothing for 1 s"),
    ],
)
def test_a_server_that_fails_is_one_clear_error(mock: StartMock, fault: str, failure: str, says: str) -> None:
    url = mock(fault=fault)
    with pytest.raises(StreamFailedError, match=says) as caught:
        load.run_block(url, many(8), Sampling(max_tokens=20, timeout_s=1), 4)
    assert caught.value.failure == failure
    assert caught.value.hint


def test_sglangs_own_form_of_a_finish_reason(mock: StartMock) -> None:
    (row,) = load.run_block(mock(fault="native"), [TEXT], Sampling(max_tokens=4), 1).rows
    assert (row.finish, row.output_tokens) == ("length", 4)


def test_an_answer_cut_within_a_surrogate_pair_is_whole() -> None:
    seen = Arrivals(sent=0.0)
    for part in (r"a\ud83d", r"\ude00b", r"\udc00"):
        seen.take(f'{{"choices": [{{"text": "{part}"}}]}}', 1.0)
    assert seen.answer == "a\N{GRINNING FACE}b\N{REPLACEMENT CHARACTER}"


def test_a_server_that_is_not_there(mock: StartMock) -> None:
    with pytest.raises(StreamFailedError, match="broke the connection"):
        load.run_block("http://127.0.0.1:1", [TEXT], Sampling(), 1)


def test_a_prompt_beyond_the_context(mock: StartMock) -> None:
    with pytest.raises(PromptsError, match=r"text does not fit.*2048 tokens"):
        load.run_block(mock(fault="context"), [TEXT], Sampling(), 1)


def test_durations_do_not_follow_the_clock(mock: StartMock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock jumps back an hour at every look."""
    jumps = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: 1.8e9 - 3600 * next(jumps))
    (row,) = load.run_block(mock(token_s=0.005), [TEXT], Sampling(max_tokens=10), 1).rows
    assert row.e2e_s
    assert 0.05 <= row.e2e_s < 30


def test_events_cut_anywhere_are_the_same_events() -> None:
    stream = 'data: {"a": "é"}\n\n: comment\n\ndata: two\r\n\r\ndata:[DONE]\n\n'.encode()
    for cut in range(len(stream)):
        reader = SseReader()
        found = reader.feed(stream[:cut]) + reader.feed(stream[cut:])
        assert found == ['{"a": "é"}', "two", "[DONE]"]


def test_the_closing_usage_is_no_token() -> None:
    seen = Arrivals(sent=0.0)
    seen.take('{"choices": [{"delta": {"role": "assistant", "content": ""}}]}', 1.0)
    seen.take('{"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": 1}}', 2.0)
    seen.take('{"choices": [{"delta": {"content": "bc"}}], "usage": {"completion_tokens": 4}}', 3.0)
    seen.take('{"choices": [{"delta": {}, "finish_reason": "stop"}]}', 4.0)
    seen.take('{"choices": [], "usage": {"completion_tokens": 4}}', 5.0)
    assert (seen.first, seen.last, seen.gaps) == (2.0, 3.0, [1.0])


@pytest.mark.alone
def test_256_streams_take_little_of_a_core(mock: StartMock) -> None:
    """Six thousand tokens a second, each for less than 0.2 ms of the client's processor time, whatever else runs."""
    measured = load.run_block(mock(token_s=0.04, stamps=True), many(MANY), Sampling(max_tokens=60), MANY)
    assert measured.cpu * measured.seconds / (MANY * 60) < 0.2e-3


@pytest.mark.alone
def test_256_streams_wait_less_than_a_millisecond(mock: StartMock, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the server's send to the end of the client's work; the server writes into each event when it sent it.

    The kernel says how long this thread was ready and had no core. A run in which that was more than a little measured
    the machine's other programs, and is made again.
    """
    url = mock(token_s=0.04, stamps=True)
    late: list[float] = []
    take = Arrivals.take

    def stamped(self: Arrivals, payload: str, now: float) -> None:
        take(self, payload, now)
        if '"text": "' in payload and (stamp := payload.split('"text": "')[1].split('"')[0]):
            late.append(time.perf_counter() - float(stamp))

    monkeypatch.setattr(client.Arrivals, "take", stamped)
    shares = []
    for _ in range(TRIES):
        late.clear()
        waited = without_a_core()
        measured = load.run_block(url, many(MANY), Sampling(max_tokens=50), MANY)
        assert len(late) == MANY * 50
        shares.append((without_a_core() - waited) / measured.seconds)
        if shares[-1] < DISTURBED:
            assert statistics.median(late) < 1e-3
            return
    pytest.skip(f"other programs had the core {', '.join(f'{share:.0%}' for share in shares)} of the time")


def without_a_core() -> float:
    """Return how long this thread has been ready to run and did not, in seconds."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


@pytest.mark.alone
def test_a_client_that_cannot_keep_up_says_so(mock: StartMock, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Arrivals.take

    def slow(self: Arrivals, payload: str, now: float) -> None:
        until = time.perf_counter() + 0.003
        while time.perf_counter() < until:
            pass
        take(self, payload, now)

    monkeypatch.setattr(client.Arrivals, "take", slow)
    found = load.run_block(mock(token_s=0.002), many(16), Sampling(max_tokens=20), 16)
    assert load.is_slow(found.lag_s, found.cpu)
