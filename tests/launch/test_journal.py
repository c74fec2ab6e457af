"""What `serve` leaves in the ledger, and what it says before it repeats a failure."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_bw.ledger.entry import Entry
from sglang_bw.ledger.store import PATH_VARIABLE
from tests.launch.serving import Serve

REPEATED = "exactly this launch has failed on this host"


def test_a_failure_is_recorded_and_announced_before_it_is_repeated(
    serve: Serve, entries: Callable[[], list[Entry]]
) -> None:
    serve.start(mode="fails")
    assert serve.wait() == 34
    assert REPEATED not in serve.err
    (failed,) = entries()
    assert (failed.result, failed.failure, failed.recipe) == ("failed", "other", "tiny")
    assert failed.summary.startswith("while loading")
    assert failed.evidence[0] == "ValueError: the draft does not fit the target"
    assert any("Load weight begin" in line for line in failed.evidence)
    assert failed.artefacts == (str(serve.log),)
    serve.start(mode="fails")  # on another port
    assert serve.wait() == 34
    assert f"{REPEATED} once" in serve.err
    assert failed.id in serve.err
    assert "the draft does not fit the target" in serve.err.split("Load")[0]
    first, second = entries()
    assert first.launch == second.launch
    serve.start("--", "--max-running-requests", "3", mode="fails")
    assert serve.wait() == 34
    assert REPEATED not in serve.err


def test_a_port_that_is_lost_while_loading_says_nothing_about_the_launch(
    serve: Serve, entries: Callable[[], list[Entry]]
) -> None:
    serve.start(mode="waits")
    serve.until_loading()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", serve.port))
        other.listen(1)
        (serve.scratch / "go").touch()
        assert serve.wait() == 33
    assert f"another process took port {serve.port} while the engine loaded" in serve.err
    (lost,) = entries()
    assert (lost.result, lost.failure) == ("interrupted", None)
    assert "address already in use" in lost.evidence[0]
    assert lost.artefacts == (str(serve.log),)
    serve.start("--no-warmup")  # on another port
    serve.until_out("http://")
    assert REPEATED not in serve.err


def test_a_start_that_works_ends_the_warnings(serve: Serve, entries: Callable[[], list[Entry]]) -> None:
    serve.start(mode="fails")
    serve.wait()
    serve.start()
    serve.until_ready()
    serve.send(signal.SIGTERM)
    assert serve.wait() == 0
    failed, worked = entries()
    assert (failed.result, worked.result) == ("failed", "ok")
    assert worked.numbers["accept length"].value == pytest.approx(3.2)
    assert worked.numbers["warm-up"].unit == "tok/s"
    assert worked.numbers["seconds loading"].value > 0
    serve.start(mode="fails")
    serve.wait()
    assert REPEATED not in serve.err


def test_interrupts_and_late_deaths(serve: Serve, entries: Callable[[], list[Entry]]) -> None:
    serve.start(mode="hangs")
    serve.until_loading()
    serve.send(signal.SIGINT)
    serve.wait()
    serve.start("--startup-timeout", "1", mode="hangs")
    serve.wait()
    serve.start("--no-warmup")
    serve.until_out("http://")
    os.kill(serve.pids[-4], signal.SIGKILL)
    serve.wait()
    found = entries()
    assert [one.result for one in found] == ["interrupted", "failed", "ok", "failed"]
    assert found[1].failure == "hang"
    assert found[3].failure == "out-of-memory-host"
    assert found[3].summary.startswith("after it had started")
    assert found[3].evidence[0].startswith("it was killed (SIGKILL)")
    assert "exit code 137: it was killed (SIGKILL), most often because the machine ran out of memory" in serve.err


def test_a_scheduler_that_the_kernel_killed(serve: Serve, entries: Callable[[], list[Entry]]) -> None:
    serve.start(mode="scheduler-killed")
    assert serve.wait() == 34
    told = "Rank 0 scheduler died during initialization (exit code: -9): it was killed (SIGKILL)"
    assert f"the engine died while loading (exit code 1): {told}" in serve.err
    (failed,) = entries()
    assert failed.failure == "out-of-memory-host"
    assert failed.evidence[0].startswith(told)


def test_keys_stay_out_of_the_ledger(serve: Serve, entries: Callable[[], list[Entry]], tmp_path: Path) -> None:
    serve.start("--", "--api-key", "secret")
    serve.until_ready()
    serve.send(signal.SIGTERM)
    serve.wait()
    assert "***" in entries()[0].argv
    assert b"secret" not in b"".join(path.read_bytes() for path in tmp_path.glob("ledger*"))


def test_a_ledger_that_cannot_be_used_is_no_reason_not_to_serve(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").write_text("this is no database, and long enough to be read as a page of one" * 40)
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "broken"))
    serve.start()
    serve.until_ready()
    serve.send(signal.SIGTERM)
    assert serve.wait() == 0
    assert "the ledger was not asked" in serve.err
    assert "the ledger was not written" in serve.err
