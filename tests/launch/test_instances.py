"""`serve --detach`, `status`, `logs` and `stop`, as processes on a fake engine."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from sglang_bw.cli import cli
from sglang_bw.errors import BwError, PortInUseError
from sglang_bw.launch import instances
from sglang_bw.launch.instances import Process
from tests.launch.serving import DEADLINE_S, Serve, alive, free_port, until

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SGLANG_BW_LEDGER", str(tmp_path / "ledger.sqlite3"))
    return tmp_path / "state"


@pytest.fixture(autouse=True)
def nothing_stays(state: Path) -> Iterator[None]:
    yield
    for one in instances.everything():
        one.record.process.send(signal.SIGKILL)


def tool(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, arguments)
    ended = done.exception.exit_code if isinstance(done.exception, BwError) else done.exit_code
    told = f"{done.output}{done.exception or ''}"
    assert ended == code, told
    return told


def listed() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(tool("status", "--json"))
    return found


def test_from_the_start_to_the_stop(serve: Serve) -> None:
    serve.start("--detach")
    assert serve.process.wait(DEADLINE_S) == 0, serve.err
    name = f"tiny-{serve.port}"
    url = f"http://127.0.0.1:{serve.port}"
    assert f"\n{url}  " in serve.out
    assert "accept length 3.20" in serve.out  # it waited for the warm-up
    assert f"{name} serves by itself now" in serve.out
    assert "loading" in serve.err
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 200

    [found] = listed()
    assert found["name"] == name
    assert found["state"] == "ready"
    assert found["url"] == url
    assert found["detached"] is True
    assert found["engine_process"]["pid"] == serve.pids[0]
    assert os.getsid(found["process"]["pid"]) == found["process"]["pid"]
    assert name in tool("status")
    assert "fired up" in tool("logs", "tiny")
    assert tool("logs", "tiny", "--path").strip() == str(serve.log)

    assert f"{name}: stopped" in tool("stop", name)
    serve.assert_nothing_left(seconds=1)
    assert listed() == []
    assert "fired up" in tool("logs", "tiny")  # found by the ledger now


def test_it_survives_its_terminal(serve: Serve) -> None:
    ours, theirs = pty.openpty()
    serve.start("--detach", stderr=theirs, preexec_fn=os.setsid)
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0):  # the terminal must be read, or nobody can write to it
        while serve.process.poll() is None:
            time.sleep(0.05)
    os.killpg(serve.process.pid, signal.SIGHUP) if alive(serve.process.pid) else None
    time.sleep(0.5)
    assert listed()[0]["state"] == "ready"
    tool("stop", "--all")
    serve.assert_nothing_left()


def test_a_failed_start_ends_as_in_the_foreground(serve: Serve, tmp_path: Path) -> None:
    told = {}
    for way in ("--no-warmup", "--detach"):
        serve.start(way, mode="fails")
        assert serve.process.wait(DEADLINE_S) == 34
        told[way] = [line for line in serve.err.splitlines() if line.startswith(("error:", "hint:"))]
    assert told["--detach"] == told["--no-warmup"]
    assert "ValueError: the draft does not fit the target" in told["--detach"][0]
    assert listed() == []


def test_what_is_refused_before_the_start_is_told_at_once(serve: Serve) -> None:
    serve.start("--detach", "--host", "0.0.0.0")
    assert serve.process.wait(DEADLINE_S) == 91
    assert "it has no key" in serve.err
    assert listed() == []


def test_without_waiting_status_tells_of_the_failure(serve: Serve) -> None:
    serve.start("--detach", "--no-wait", "--json", mode="fails")
    assert serve.process.wait(DEADLINE_S) == 0
    assert json.loads(serve.out.splitlines()[-1]) == {
        "event": "detached",
        "name": f"tiny-{serve.port}",
        "ready": False,
    }
    until(lambda: listed()[0]["state"] == "dead", what="the start has failed")
    assert "exit code 34" in tool("status")
    assert "the draft does not fit the target" in tool("status")
    assert "its record is removed" in tool("stop", "tiny")


def test_an_interrupt_while_waiting_ends_the_start(serve: Serve) -> None:
    serve.start("--detach", mode="hangs")
    serve.until_loading()
    until(lambda: listed()[0]["phase"] == "loading", what="the phase is told")
    assert listed()[0]["state"] == "starting"
    serve.send(signal.SIGINT)
    assert serve.process.wait(DEADLINE_S) == 130
    serve.assert_nothing_left()
    assert listed() == []


def test_an_engine_that_ignores_sigterm_is_killed_after_the_grace(serve: Serve) -> None:
    serve.start("--detach", "--no-wait", mode="stubborn")
    assert serve.process.wait(DEADLINE_S) == 0
    serve.until_loading()
    tool("stop", "tiny", "--grace", "0.5")
    serve.assert_nothing_left(seconds=1)


def test_one_that_was_killed_is_dead_and_its_engine_gone(serve: Serve) -> None:
    serve.start("--detach", "--no-warmup")
    assert serve.process.wait(DEADLINE_S) == 0
    os.kill(listed()[0]["process"]["pid"], signal.SIGKILL)
    until(lambda: listed()[0]["state"] == "dead", what="it is dead")
    assert "nobody wrote down why" in tool("status")
    serve.assert_nothing_left()
    tool("stop", "--all")
    assert listed() == []


def test_an_engine_that_dies_later_is_remembered(serve: Serve) -> None:
    serve.start("--detach", "--no-warmup", mode="crash-when-asked")
    assert serve.process.wait(DEADLINE_S) == 0
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"http://127.0.0.1:{serve.port}/generate", json={}, trust_env=False)
    until(lambda: listed()[0]["state"] == "dead", what="it is dead")
    assert "exit code 7: RuntimeError: CUDA error" in tool("status")


def test_a_server_in_the_foreground_is_listed_too(serve: Serve) -> None:
    serve.start("--no-warmup")
    serve.until_out("http://")
    [found] = listed()
    assert found["detached"] is False
    tool("stop", found["name"])
    assert serve.wait() == 0
    assert listed() == []


def test_following_ends_with_the_server(serve: Serve) -> None:
    serve.start("--detach", "--no-warmup")
    assert serve.process.wait(DEADLINE_S) == 0
    follower = subprocess.Popen(
        [sys.executable, "-m", "sglang_bw", "logs", "-f", "tiny", "-n", "1"], stdout=subprocess.PIPE, text=True
    )
    assert follower.stdout
    assert follower.stdout.readline()
    with serve.log.open("a") as file:
        file.write("one more line\n")
    assert follower.stdout.readline() == "one more line\n"
    tool("stop", "tiny")
    assert follower.wait(DEADLINE_S) == 0


def test_a_reader_of_a_log_that_goes_is_no_error_of_the_log(state: Path, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("a line of an engine\n" * 50_000)
    one = instances.create("tiny", "127.0.0.1", 1, url="http://127.0.0.1:1", device="cpu", engine="0.5.23",
                           speculates=True, needs_key=False, detached=True, log=str(log))  # fmt: skip
    command = [sys.executable, "-m", "sglang_bw", "logs", "tiny", "-n", "50000"]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert reader.stdout
    assert reader.stderr
    reader.stdout.close()
    said = reader.stderr.read()
    reader.stderr.close()
    one.remove()
    assert (reader.wait(DEADLINE_S), said) == (141, "")


def test_another_process_with_the_same_pid_is_left_alone(state: Path) -> None:
    stranger = subprocess.Popen(SLEEP)
    try:
        there = Process.of(stranger.pid)
        assert there is not None
        assert there.is_alive
        for other in (there.model_copy(update={"start": there.start - 1}), there.model_copy(update={"boot": "x"})):
            assert not other.is_alive
            assert other.send(signal.SIGKILL) is False
        one = instances.create("tiny", "127.0.0.1", 1, url="http://127.0.0.1:1", device="cpu", engine="0.5.23",
                               speculates=True, needs_key=False, detached=True, log="/nowhere")  # fmt: skip
        one.update(process=there.model_copy(update={"start": there.start - 1}))
        assert listed()[0]["state"] == "dead"
        tool("stop", "--all")
        assert stranger.poll() is None
        assert there.send(signal.SIGKILL) is True
        stranger.wait()
        assert there.send(signal.SIGKILL) is False
    finally:
        stranger.kill()
        stranger.wait()


def test_names(state: Path) -> None:
    common = {"device": "cpu", "engine": "0.5.23", "speculates": True, "needs_key": False, "detached": True}
    made = [
        instances.create(recipe, host, port, url=f"http://{host}:{port}", log="/nowhere", **common)
        for recipe, host, port in (("tiny", "h", 1), ("tiny", "h", 2), ("big", "i", 1), ("tiny", "j", 1))
    ]
    assert [one.name for one in made] == ["tiny-1", "tiny-2", "big-1", "tiny-1-2"]
    assert instances.find("big").name == "big-1"
    assert instances.find("tiny-1").name == "tiny-1"
    assert "may be tiny-1 or tiny-2" in tool("stop", "tiny", code=92)
    assert "no server 'none' was started here; there are" in tool("stop", "none", code=92)
    assert "--all" in tool("stop", code=2)
    for one in made:
        one.remove()
    assert "no server was started here" in tool("status")
    assert "the ledger knows no log" in tool("logs", "none", code=92)


@pytest.mark.parametrize(
    ("host", "refused"),
    [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", True), ("::", True), ("127.0.0.2", False)],
)
def test_the_port_of_one_that_is_starting(state: Path, host: str, refused: bool) -> None:
    common = {"device": "cpu", "engine": "0.5.23", "speculates": True, "needs_key": False, "detached": True}
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    first = instances.create("tiny", "127.0.0.1", port, url=url, log="/nowhere", **common)
    try:
        instances.check_port(host, port + 1)
        with pytest.raises(PortInUseError) if refused else nullcontext() as error:
            instances.check_port(host, port)
        if error:
            assert f"tiny-{port} (pid {os.getpid()}) is starting there" in error.value.message
            assert f"`sglang-bw stop tiny-{port}` ends it" in error.value.hint
            with pytest.raises(PortInUseError):
                instances.create("big", host, port, url=url, log="/nowhere", **common)
        assert [one.name for one in instances.everything()] == [f"tiny-{port}"]
        gone = first.record.process.model_copy(update={"boot": "another"})
        first.update(engine_process=gone)
        instances.check_port(host, port)  # it is about to end
        first.update(engine_process=None, ended={"code": 1, "why": "", "at": first.record.started_at})
        instances.check_port(host, port)
    finally:
        first.remove()


def test_a_second_start_while_the_first_still_loads(serve: Serve, tmp_path: Path) -> None:
    serve.start(mode="hangs")
    serve.until_loading()
    (tmp_path / "second").mkdir()
    second = Serve(serve.tree, serve.model, tmp_path / "second")
    second.start(port=serve.port)
    assert second.wait() == 33
    told = f"port {serve.port} on 127.0.0.1 is taken: tiny-{serve.port} (pid {serve.process.pid}) is starting there"
    assert told in " ".join(second.err.split())
    assert not second.pids
    assert [one["name"] for one in listed()] == [f"tiny-{serve.port}"]


def test_a_damaged_record_is_no_server(state: Path) -> None:
    folder = instances.root() / "tiny-1"
    folder.mkdir(parents=True)
    (folder / "server.json").write_text('{"name": ')
    assert listed() == []


def test_readiness_is_told_to_systemd(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.settimeout(DEADLINE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        serve.start("--no-warmup")
        told = []
        while not told or "READY=1" not in told[-1]:
            told.append(channel.recv(4096).decode())
        assert "STATUS=loading" in told
        assert httpx.get(f"http://127.0.0.1:{serve.port}/health", trust_env=False).status_code == 200
        serve.send(signal.SIGTERM)
        serve.wait()
        assert channel.recv(4096) == b"STOPPING=1"
