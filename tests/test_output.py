"""What becomes of output that nobody can take: a full disk, or a reader that has gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "sglang_bw"]
PLAN = ("plan", "qwen3-8b-eagle3", "--gpus", "1xRTX 5090", "--no-resolve")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", [PLAN, (*PLAN, "--json"), ("--version",), ("plan", "--help")], ids=" ".join)
def test_a_full_disk_is_one_clear_error(words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 17, done.stderr
    assert done.stderr.startswith("error: cannot write")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [PLAN, ("patches", "list")], ids=["plan", "patches"])
def test_a_reader_that_goes_ends_it_as_it_ends_others(words: tuple[str, ...]) -> None:
    process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141, said
    assert "Traceback" not in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_what_is_said_beside_the_output_may_be_lost() -> None:
    """A server must not end because its terminal's log is on a full disk."""
    code = "from sglang_bw.cli.console import err, out; err.print('one'); err.print('two'); out.print('three')"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "three\n")
