"""`serve` as a process, on a fake engine: start, ready, signals, exit codes, and nothing left behind."""

from __future__ import annotations

import http.server
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import httpx
import pytest

from tests.launch.serving import Serve, alive, free_port, until, write_tree


def test_shows_phases_url_and_warm_up_and_ends_with_the_engine(serve: Serve) -> None:
    serve.start()
    serve.until_ready()
    url = f"http://127.0.0.1:{serve.port}"
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    assert f"\n{url}  " in serve.out
    assert "accept length 3.20, " in serve.out
    assert "tok/s" in serve.out
    assert "warning" not in serve.err
    phases = [line.split()[-1] for line in serve.err.splitlines() if " s  " in line]
    assert phases == ["loading", "graphs", "warm-up", "ready"]
    assert "graphs" in serve.out
    assert serve.log.read_text().splitlines()[0].startswith("# OMP_NUM_THREADS=1 SGLANG_USE_CPU_ENGINE=1 sglang serve ")
    assert "fired up" in serve.log.read_text()
    serve.send(signal.SIGTERM)
    assert serve.wait() == 0
    serve.assert_nothing_left(seconds=1)


def test_the_start_up_line_is_live_on_a_terminal(serve: Serve) -> None:
    """One line, redrawn in place: the phases with growing seconds, beside it the newest line of the log."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        environ = {"TERM": "xterm", "COLUMNS": "100"}
        with mock.patch.dict(os.environ, environ):
            serve.start(mode="hangs", stderr=theirs)
        os.close(theirs)
        shown = b""
        deadline = time.monotonic() + 20
        while not re.search(rb"starting \d+ s . loading [1-9]", shown.replace(b"\xc2\xb7", b".")):
            assert time.monotonic() < deadline, shown
            shown += terminal.read(4096)
        serve.send(signal.SIGTERM)
        assert serve.wait() == 143
    assert shown.count(b"\n") <= 4  # recipe, log, and the line itself
    assert b"\x1b[2K" in shown  # the line is erased and written again
    assert b"Load weight begin. avail mem" in shown


def test_json_lines(serve: Serve) -> None:
    serve.start("--json")
    serve.until_ready()
    serve.send(signal.SIGTERM)
    serve.wait()
    ready, warm_up, end = map(json.loads, serve.out.splitlines())
    assert ready["event"] == "ready"
    assert ready["url"] == f"http://127.0.0.1:{serve.port}"
    assert ready["pid"] == serve.pids[0]
    assert set(ready["seconds"]) == {"starting", "loading", "graphs", "warm-up"}
    assert warm_up["accept_length"] == pytest.approx(3.2)
    assert warm_up["broken"] is False
    assert end == {"event": "exit", "code": 0}


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, 0, id="sigterm: the engine drains and ends with 0"),
        pytest.param(signal.SIGINT, 3, id="sigint: the engine's own code"),
        pytest.param(signal.SIGHUP, 129, id="sighup: the engine dies of it"),
    ],
)
def test_passes_signals_on_when_ready(serve: Serve, number: signal.Signals, code: int) -> None:
    serve.start("--no-warmup")
    serve.until_out("http://")
    serve.send(number)
    assert serve.wait() == code
    serve.assert_nothing_left(seconds=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_while_loading(serve: Serve, number: signal.Signals) -> None:
    serve.start(mode="hangs")
    serve.until_loading()
    serve.send(number)
    assert serve.wait() == 128 + number
    assert "interrupted while loading" in serve.err
    assert "Traceback" not in serve.err
    serve.assert_nothing_left(seconds=1)


def test_second_signal_ends_an_engine_that_ignores_the_first(serve: Serve) -> None:
    serve.start(mode="stubborn")
    serve.until_loading()
    serve.send(signal.SIGTERM)
    serve.send(signal.SIGINT)
    assert serve.wait() in (128 + signal.SIGTERM, 128 + signal.SIGINT)  # they may arrive in either order
    serve.assert_nothing_left(seconds=1)


def test_signal_to_the_whole_group_reaches_the_engine_once(serve: Serve) -> None:
    """What a terminal does on Ctrl-C: every process of the foreground group gets SIGINT."""
    serve.start("--no-warmup", start_new_session=True)
    serve.until_out("http://")
    os.killpg(serve.process.pid, signal.SIGINT)
    assert serve.wait() == 3
    serve.assert_nothing_left(seconds=1)


@pytest.mark.parametrize("phase", ["loading", "ready"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_no_engine_survives_the_wrapper(serve: Serve, phase: str, number: signal.Signals) -> None:
    serve.start(mode="hangs" if phase == "loading" else "")
    serve.until_loading() if phase == "loading" else serve.until_ready()
    assert all(map(alive, serve.pids))
    serve.send(number)
    serve.wait()
    serve.assert_nothing_left(seconds=15)


def test_no_engine_survives_the_keeper(serve: Serve) -> None:
    serve.start("--no-warmup")
    serve.until_out("http://")
    main, *_ = serve.pids
    keeper = int(Path(f"/proc/{main}/stat").read_text().rpartition(")")[2].split()[1])
    assert keeper != serve.process.pid
    os.kill(keeper, signal.SIGKILL)
    assert serve.wait() == 137
    until(lambda: not alive(main), what="the engine is gone")


def test_death_in_start_up_shows_the_cause_and_the_log(serve: Serve) -> None:
    serve.start(mode="fails")
    assert serve.wait() == 34
    assert "error: the engine died while loading (exit code 137): ValueError: the draft does not fit" in serve.err
    assert f"hint: Full log: {serve.log}" in serve.err
    assert "Traceback" not in serve.err
    assert "Traceback" in serve.log.read_text()
    assert "http://" not in serve.out
    serve.assert_nothing_left(seconds=1)


def test_death_while_serving_ends_with_the_engines_code_and_cause(serve: Serve) -> None:
    serve.start(mode="crash-when-asked")
    assert serve.wait() == 7
    assert "error: the engine ended with exit code 7: RuntimeError: CUDA error" in serve.err
    assert str(serve.log) in serve.err
    serve.assert_nothing_left(seconds=1)


def test_start_up_timeout(serve: Serve) -> None:
    serve.start("--startup-timeout", "2", mode="hangs")
    assert serve.wait() == 34
    assert "not ready after 2 s" in serve.err
    assert "--startup-timeout" in serve.err
    serve.assert_nothing_left(seconds=1)


def test_says_which_kernel_is_compiled(serve: Serve) -> None:
    serve.start("--startup-timeout", "9", mode="compiles")
    assert serve.wait() == 34
    assert serve.err.count("s  compiling sgl_kernel_jit_marlin, for this and all later starts\n") == 1
    assert "not ready after 9 s, in phase graphs: compiling sgl_kernel_jit_marlin" in " ".join(serve.err.split())
    serve.assert_nothing_left()


class _Orphan(http.server.BaseHTTPRequestHandler):
    """Answers as an engine does."""

    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_port_in_use_is_found_before_the_load(serve: Serve) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Orphan) as orphan:
        serve.start(port=orphan.server_port)
        assert serve.wait() == 33
    assert f"port {serve.port} on 127.0.0.1 is in use by pid {os.getpid()}" in serve.err
    assert "--port" in serve.err
    assert not serve.pids, "the engine was started all the same"
    assert not serve.log.exists()


def test_an_answer_from_somebody_else_is_not_taken_for_ours(serve: Serve) -> None:
    """The port was free at the check; then another process took it while the engine was loading."""
    _Orphan.asked = 0
    port = free_port()
    serve.start(mode="hangs", port=port)
    serve.until_loading()
    with http.server.HTTPServer(("127.0.0.1", port), _Orphan) as orphan:
        threading.Thread(target=orphan.serve_forever, daemon=True).start()
        time.sleep(1.5)  # `serve` looks twice a second
        serve.send(signal.SIGTERM)
        assert serve.wait() == 143
        orphan.shutdown()
    assert "http://" not in serve.out
    assert _Orphan.asked == 0


def test_engine_flags_choose_the_port_too(serve: Serve) -> None:
    port = free_port()
    serve.start("--no-warmup", "--", f"--port={port}", "--served-model-name", "mine")
    serve.until_out(f"http://127.0.0.1:{port}")
    command = serve.log.read_text().splitlines()[0]
    assert command.count("--port") == 1
    assert command.count("--served-model-name") == 1
    assert command.endswith(f"--port {port} --served-model-name mine")


@pytest.mark.parametrize(
    ("mode", "warning"),
    [
        pytest.param("useless", "The accept length is 1.00: the draft guesses nothing right", id="accept length 1"),
        pytest.param("nan", "The engine computes NaN", id="NaN"),
        pytest.param("loop", "One token repeats in the answer to", id="one token repeats"),
    ],
)
def test_warm_up_warns_and_goes_on(serve: Serve, mode: str, warning: str) -> None:
    serve.start("--no-spec" if mode == "loop" else "--json", mode=mode)
    serve.until_out("tok" if mode == "loop" else "warm-up")
    until(lambda: warning in serve.err + serve.out)
    assert serve.process.poll() is None
    serve.send(signal.SIGTERM)
    assert serve.wait() == 0


@pytest.mark.parametrize("mode", ["odd-types", "odd-rows"])
def test_a_fault_of_the_warm_up_leaves_the_server_alone(serve: Serve, mode: str) -> None:
    serve.start(mode=mode)
    until(lambda: "warning: The warm-up failed: " in serve.err or serve.process.poll() is not None)
    assert "TypeError" in serve.err or "IndexError" in serve.err
    assert serve.process.poll() is None
    serve.send(signal.SIGTERM)
    assert serve.wait() == 0
    assert "Traceback" not in serve.err


@pytest.mark.parametrize("mode", ["nan", "loop"])
def test_strict_refuses_broken_output(serve: Serve, mode: str) -> None:
    serve.start("--strict", mode=mode)
    assert serve.wait() == 35
    serve.assert_nothing_left(seconds=1)


def test_stock_engine_is_refused_then_allowed(serve: Serve, fake_stock: Path) -> None:
    serve.tree = fake_stock
    serve.start()
    assert serve.wait() == 21
    assert "is upstream's, without the series" in serve.err
    assert "hint: `sglang-bw install" in serve.err
    assert not serve.pids
    serve.start("--allow-stock", "--no-warmup")
    serve.until_out("http://")
    assert "warning: the installed sglang 0.5.23 is upstream's" in serve.err


def test_edited_engine_is_refused_then_allowed(serve: Serve, tmp_path: Path) -> None:
    serve.tree = write_tree(tmp_path / "edited")
    (serve.tree / "sglang" / "__init__.py").write_text("# edited\n")
    serve.start()
    assert serve.wait() == 22
    assert "sglang/__init__.py (edited)" in serve.err
    assert "hint: `sglang-bw install" in serve.err
    serve.start("--allow-stock", "--no-warmup")
    serve.until_out("http://")


def test_no_engine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sglang_bw", "serve", "tiny", "--engine-tree", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 20
    assert f"{tmp_path} holds no unpacked engine" in done.stderr
    assert "hint: check the path" in done.stderr


def test_engine_of_another_version(serve: Serve, tmp_path: Path) -> None:
    recipe = tmp_path / "old.yaml"
    recipe.write_text(f"id: old\nengine: {{sglang: '<0.5.23'}}\ntarget: {serve.model}\n")
    done = subprocess.run(
        [sys.executable, "-m", "sglang_bw", "serve", str(recipe), "--engine-tree", str(serve.tree)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 54
    assert "is for sglang <0.5.23, but the engine is 0.5.23+bw.1" in done.stderr


def test_log_that_cannot_be_written(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    serve.start("--log", str(tmp_path / "file" / "engine.log"))
    assert serve.wait() == 17
    assert "--log" in serve.err


def test_wildcard_host_is_reached_over_loopback(serve: Serve) -> None:
    serve.start("--no-warmup", "--host", "0.0.0.0", "--open")
    serve.until_out(f"http://127.0.0.1:{serve.port}")
    with socket.create_connection(("127.0.0.1", serve.port), timeout=5):
        pass
