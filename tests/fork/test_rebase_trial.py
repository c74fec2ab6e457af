"""``rebase --test``: the tests of the trailers run for real, on a tiny engine that is stock on one side."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_bw import errors
from sglang_bw.fork import upstream as cache
from tests.conftest import CHECKOUT
from tests.fakeupstream import FakeUpstream, release
from tests.fork.test_rebase_words import NEW, OLD

LIMIT = b"def limit():\n    return 1\n"
TEST = """import pytest

@pytest.mark.stock_failure(AssertionError, {text!r})
def test_limit():
    from sglang.limit import limit
    assert limit() == 2, f"the limit is {{limit()}}"
"""
OPTIONS = """from pathlib import Path

def pytest_addoption(parser):
    for option in ("--engine", "--kind", "--series", "--patch-report"):
        parser.addoption(option, type=str if option == "--kind" else Path)
"""


class Trial:
    """A checkout with one patch, whose test is the trailer's."""

    def __init__(self, folder: Path, text: str, start: bytes, limit: bytes = LIMIT) -> None:
        upstream = FakeUpstream(folder / "upstream", OLD, {"sglang/limit.py": LIMIT, "sglang/__init__.py": b""})
        self.root, checkout = upstream.root, upstream.root.parent
        test = "tests/patches/own/test_limit.py"
        (checkout / test).parent.mkdir(parents=True)
        (checkout / test).write_text(TEST.format(text=text))
        (checkout / "tests" / "conftest.py").write_text(OPTIONS)
        shutil.copy(CHECKOUT / "tests" / "patches" / "conftest.py", checkout / "tests" / "patches")
        trailers = {"Applies-To": ">=2.0", "Test": test}
        upstream.add_patch("limit", {"python/sglang/limit.py": LIMIT.replace(b"1", b"2")}, trailers)
        upstream.pin()
        cache.keep(upstream.wheel)
        self.wheel = release(folder, NEW, {"sglang/limit.py": limit, "sglang/__init__.py": start})

    def run(self) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sglang_bw", "rebase", NEW, "--from", OLD, "--wheel", str(self.wheel)]
        command += ["--test", "--json", "--patches", str(self.root)]
        return subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)


# What makes the patched engine as wrong as before, whatever its file says.
BROKEN = b"from sglang import limit as module\n\nmodule.limit = lambda: 3\n"


def test_red_on_stock_and_green_on_patched_is_written(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "the limit is 1", b"x = 1\n")
    done = trial.run()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["patches"][0]["word"] == "clean"
    assert (trial.root / NEW / "upstream.toml").is_file()


@pytest.mark.parametrize(
    ("text", "start", "limit", "said"),
    [
        ("the limit is 7", b"x = 1\n", LIMIT, "stock: test_limit"),
        ("the limit is [13]", BROKEN, LIMIT, "patched: test_limit: failed"),
        ("the limit is 1", BROKEN, LIMIT.replace(b"1", b"2"), "dropped as merged, but its tests fail"),
    ],
    ids=["red for another reason", "not green when patched", "merged and still red"],
)
def test_another_outcome_is_refused_and_nothing_is_written(
    text: str, start: bytes, limit: bytes, said: str, tmp_path: Path
) -> None:
    trial = Trial(tmp_path, text, start, limit)
    done = trial.run()
    assert done.returncode == errors.RebaseFailedError.exit_code, done.stderr
    assert said in done.stderr
    assert not (trial.root / NEW).exists()
