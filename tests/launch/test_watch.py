"""`watch` against servers that tell a lot, little, nonsense, or nothing."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_bw import cli
from sglang_bw.errors import WatchError
from sglang_bw.host import fingerprint
from sglang_bw.launch.watch import Watcher
from sglang_bw.ledger.store import PATH_VARIABLE, Ledger
from tests.launch.serving import free_port
from tests.ledger.runs import run

INFO = {
    "model_path": "/m", "served_model_name": "m", "version": "0.5.23+bw.1", "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3, "speculative_num_draft_tokens": 4, "internal_states": [{"last_gen_throughput": 12.5}],
}  # fmt: skip
LOAD = {"num_running_reqs": 3, "num_waiting_reqs": 2, "token_usage": 0.25, "gen_throughput": 150.0}
LOADS = {"loads": [{**LOAD, "speculative": {"accept_length": 3.0}}, {**LOAD, "token_usage": 0.5}]}
METRICS = """\
# HELP sglang:num_running_reqs running
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="1"} 1.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs 2.0
# TYPE sglang:token_usage gauge
sglang:token_usage{dp_rank="0"} 0.25
sglang:token_usage{dp_rank="1"} 0.75
# TYPE sglang:gen_throughput gauge
sglang:gen_throughput{dp_rank="0"} 100.0
sglang:gen_throughput{dp_rank="1"} 50.0
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{dp_rank="0"} 3.0
sglang:spec_accept_length{dp_rank="1"} 2.0
# TYPE sglang:spec_num_steps gauge
sglang:spec_num_steps 5.0
"""
Answers = dict[str, Any]
Serve = Callable[[Answers], str]


@pytest.fixture
def server() -> Iterator[Serve]:
    running: list[http.server.ThreadingHTTPServer] = []

    def start(answers: Answers) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = answers.get(self.path)
                code, body = (404, "") if answer is None else answer if isinstance(answer, tuple) else (200, answer)
                data = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        running.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=running[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{running[-1].server_address[1]}"

    yield start
    for one in running:
        one.shutdown()


def test_metrics_of_all_ranks(server: Serve) -> None:
    watcher = Watcher(server({"/server_info": INFO, "/metrics": METRICS}))
    assert watcher.connect().has_metrics
    now = watcher.read()
    assert (now.running, now.queued, now.kv_use, now.tok_s) == (4, 2, 0.5, 150.0)
    assert (now.accept_length, now.accept_is_recent, now.steps) == (2.5, True, 5.0)


def test_without_metrics_the_load_report_answers(server: Serve) -> None:
    watcher = Watcher(server({"/server_info": INFO, "/v1/loads": LOADS}))
    assert not watcher.connect().has_metrics
    now = watcher.read()
    assert (now.running, now.queued, now.kv_use, now.tok_s) == (6, 4, 0.5, 300.0)
    assert (now.accept_length, now.accept_is_recent, now.steps) == (3.0, False, None)


def test_a_load_report_without_a_speed_is_completed(server: Serve) -> None:
    """As SGLang 0.5.23 answers while metrics are off."""
    loads = {"loads": [{**LOAD, "gen_throughput": 0.0}]}
    now = Watcher(server({"/server_info": INFO, "/v1/loads": loads})).read()
    assert (now.tok_s, now.running) == (12.5, 3)


def test_what_is_no_number_is_not_told(server: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    info = {**INFO, "speculative_num_steps": "auto", "internal_states": [{"last_gen_throughput": "fast"}, 7]}
    loads = {"loads": [{"num_running_reqs": "many", "token_usage": None, "speculative": {}}, {"token_usage": 0.5}, 7]}
    code, out, err = once(server({"/server_info": info, "/v1/loads": loads}), capsys)
    assert code == 0
    assert "EAGLE3" in err
    assert "steps" not in err.splitlines()[0]
    assert "KV cache 50.0%" in out
    assert "draft steps -" in out
    assert once(server({"/server_info": info, "/v1/loads": {"loads": "none"}}), capsys)[0] == 0


@pytest.mark.parametrize("interval", ["nan", "inf", "1e300"])
def test_an_interval_that_is_none(capsys: pytest.CaptureFixture[str], interval: str) -> None:
    assert once("http://127.0.0.1:1", capsys, "--interval", interval)[0] == 2


def test_an_older_engine_tells_its_speed_at_least(server: Serve) -> None:
    now = Watcher(server({"/server_info": INFO, "/health": ""})).read()
    assert now.tok_s == 12.5
    assert now.running is None


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({}, "is no SGLang server: /server_info answers 404"),
        ({"/server_info": "<html>"}, "is no JSON"),
        ({"/server_info": [1]}, "is no object"),
        ({"/server_info": {"a": 1}}, "has no model_path"),
        ({"/server_info": (401, "")}, "wants a key"),
    ],
)
def test_something_else_at_that_address(server: Serve, answers: Answers, says: str) -> None:
    with pytest.raises(WatchError, match=says):
        Watcher(server(answers)).connect()


def test_metrics_that_are_cut_off_or_of_another_program(server: Serve) -> None:
    watcher = Watcher(server({"/server_info": INFO, "/metrics": METRICS[:200] + '{dp_rank="'}))
    assert watcher.connect().has_metrics
    assert watcher.read().accept_length is None
    assert not Watcher(server({"/server_info": INFO, "/metrics": "up 1\n"})).connect().has_metrics


def once(url: str, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["watch", "--url", url, "--once", *more])
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = once(f"http://127.0.0.1:{free_port()}", capsys)
    assert code == 79
    assert "no server answers" in err
    assert once("http://[", capsys)[0] == 79


def test_says_which_flag_is_missing(server: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = once(server({"/server_info": INFO, "/v1/loads": LOADS}), capsys)
    assert code == 0
    assert "--enable-metrics" in err
    assert "300.0 tok/s, requests 6 running, 4 queued, KV cache 50.0%, accept length 3.00 since the start" in out
    assert "draft steps 3 as started" in out
    assert "ab RECIPE --no-spec" in out


def test_the_gain_comes_from_a_measured_cost(
    server: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "ledger"))
    arms = tuple(arm.model_copy(update={"config": {"served_model_name": "m"}}) for arm in run().arms)
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.add_run(run(arms=arms, host=fingerprint.look()))
    url = server({"/server_info": INFO, "/metrics": METRICS})
    found = json.loads(once(url, capsys, "--json")[1])
    assert found["gain"] == pytest.approx(2.5 / 3.2)  # four requests run: R is 3.2 there
    assert (found["steps"], found["model"]) == (5.0, "m")
    assert "0.78 times plain decoding" in once(url, capsys)[1]


def test_a_live_view_goes_on_when_the_server_does_not_and_ends_with_ctrl_c(server: Serve) -> None:
    answers: Answers = {"/server_info": INFO, "/metrics": METRICS}
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-m", "sglang_bw", "watch", "--url", server(answers), "--interval", "0.1"]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL, env=environ)
    os.close(theirs)
    shown = b""

    def until(text: bytes) -> None:
        nonlocal shown
        deadline = time.monotonic() + 30
        while text not in shown:
            assert time.monotonic() < deadline, shown
            shown += os.read(ours, 4096)

    until(b"150.0 tok/s")
    answers.clear()
    answers["/metrics"] = (500, "")
    until(b"is no SGLang server")
    answers |= {"/server_info": INFO, "/metrics": METRICS.replace("150", "1")}
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):
        while os.read(ours, 4096):
            pass
    assert process.wait(10) == 0
    os.close(ours)
