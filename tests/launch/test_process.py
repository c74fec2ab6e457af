"""The keeper, without `serve` around it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_bw.errors import EngineStartError
from sglang_bw.launch.process import EngineProcess, shell_code
from tests.launch.serving import alive, until

DEAF = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
WRAPPER = """
import os, sys, time
from pathlib import Path
from sglang_bw.launch.process import EngineProcess
EngineProcess([sys.executable, "-c", sys.argv[1]], os.environ, Path(sys.argv[2]), grace_s=0.3)
time.sleep(600)
"""


def pids(log: Path) -> list[int]:
    return [int(word) for word in log.read_text().split()] if log.exists() else []


@pytest.fixture
def wrapper(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    log = tmp_path / "log"
    process = subprocess.Popen([sys.executable, "-c", WRAPPER, DEAF, str(log)])
    until(lambda: len(pids(log)) == 2, what="the engine and its child run")
    yield process, log
    process.kill()
    process.wait()
    for pid in filter(alive, pids(log)):
        os.kill(pid, signal.SIGKILL)


def test_an_engine_that_ignores_sigterm_is_killed_after_the_grace(
    wrapper: tuple[subprocess.Popen[bytes], Path],
) -> None:
    process, log = wrapper
    process.kill()
    until(lambda: not any(map(alive, pids(log))), what="the deaf engine and its child are gone")


@pytest.mark.parametrize(
    ("code", "expected", "shell"),
    [
        pytest.param("", 0, 0, id="ends well"),
        pytest.param("raise SystemExit(7)", 7, 7, id="an exit code"),
        pytest.param("import os; os.kill(os.getpid(), 9)", -9, 137, id="a signal"),
    ],
)
def test_exit_codes(tmp_path: Path, code: str, expected: int, shell: int) -> None:
    process = EngineProcess([sys.executable, "-c", code], os.environ, tmp_path / "log")
    assert process.wait(30) == expected
    assert process.poll() == expected
    assert shell_code(expected) == shell


def test_output_of_both_streams_is_appended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr)"
    assert EngineProcess([sys.executable, "-c", code], os.environ, log).wait(30) == 0
    assert log.read_text() == "before\nout\nerr\n"


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="No such file or directory"):
        EngineProcess([str(tmp_path / "absent")], os.environ, tmp_path / "log")


def test_children_that_outlive_the_engine_are_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(child.pid, flush=True)"
    )
    assert EngineProcess([sys.executable, "-c", code], os.environ, log).wait(30) == 0
    assert not any(map(alive, pids(log)))


def test_an_ignored_hang_up_stays_ignored(tmp_path: Path) -> None:
    """As under nohup: neither the keeper nor the engine gets a handler for it."""
    log = tmp_path / "log"
    code = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert EngineProcess([sys.executable, "-c", code], os.environ, log).wait(30) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert log.read_text() == "True\n"
