"""Servers of a measurement end with it, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import CHECKOUT
from tests.launch.serving import alive

_SCRIPT = """
import os, sys, time
from pathlib import Path
from record.servers import spawn
log = Path(sys.argv[1])
server = spawn([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ), log, log)
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_the_script(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "log")]
    environ = {"PYTHONPATH": str(CHECKOUT / "scripts")}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        server = psutil.Process(int(script.stdout.readline()))
        assert server.is_running()
        script.send_signal(number)
        script.wait(10)
    deadline = time.monotonic() + 10
    while alive(server.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(server.pid)
