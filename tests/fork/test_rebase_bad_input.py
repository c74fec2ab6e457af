"""What a rebase refuses: one error, its own exit code, no traceback, and ``patches/`` untouched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_bw import errors
from sglang_bw.cli.rebase import NEW_AND_CLEAN, NEW_AND_NEEDS_A_PERSON
from sglang_bw.fork import upstream as cache
from tests.fakeupstream import FILES, FakeUpstream, release, wheel_bytes
from tests.fork.simple_index import SimpleIndex
from tests.fork.test_rebase_words import RUNNER, edit

OLD, NEW = "2.0.0", "2.1.0"
FILES_OLD = {"sglang/runner.py": RUNNER}


@dataclass(frozen=True)
class World:
    upstream: FakeUpstream
    index: SimpleIndex
    folder: Path

    def bw(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sglang_bw", "rebase", *map(str, arguments)]
        command += ["--patches", str(self.upstream.root)]
        return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)

    def release(self, version: str, files: dict[str, bytes] | None = None) -> Path:
        wheel = release(self.folder, version, {**FILES_OLD, **(files or {})})
        self.index.add(wheel)
        return wheel


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    upstream = FakeUpstream(tmp_path / "upstream", OLD, FILES_OLD)
    changed = {"python/sglang/runner.py": edit(RUNNER, (b"size = 1", b"size = 2"))}
    upstream.add_patch("size", changed, {"Applies-To": ">=2.0"})
    upstream.pin()
    cache.keep(upstream.wheel)
    with SimpleIndex() as index:
        index.add(upstream.wheel)
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
            monkeypatch.delenv(name, raising=False)
        yield World(upstream, index, tmp_path)


def test_pins_are_every_wheel_that_the_index_lists(world: World) -> None:
    world.release(NEW)
    other = world.folder / f"sglang-{NEW}-cp399-cp399-manylinux_2_34_aarch64.whl"
    other.write_bytes(wheel_bytes({**FILES, **FILES_OLD}, NEW) + b"")
    world.index.add(other)
    done = world.bw(NEW, "--json")
    assert done.returncode == 0, done.stderr
    pins = (world.upstream.root / NEW / "upstream.toml").read_text()
    assert other.name in pins
    assert f"sglang-{NEW}-py3-none-any.whl" in pins
    assert json.loads(done.stdout)["patches"][0]["word"] == "clean"


@pytest.mark.parametrize("html", [False, True], ids=["PEP 691", "PEP 503"])
def test_yanked_release_is_refused_with_upstreams_reason(html: bool, world: World) -> None:
    world.index.html = html
    world.index.yanked["2.1.0"] = "broken on some machines"
    wheel = world.release(NEW)
    done = world.bw(NEW)
    assert done.returncode == errors.ReleaseError.exit_code
    assert "was yanked by upstream: broken on some machines" in done.stderr
    assert world.bw(NEW, "--wheel", wheel).returncode == 0


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("9.9.9", "there is no release 9.9.9"),
        ("newest", "is no version"),
        ("2.1", "there is no release"),
        ("v2.1.0", "how upstream writes"),
    ],
)
def test_no_release(version: str, said: str, world: World) -> None:
    done = world.bw(version)
    assert done.returncode == errors.ReleaseError.exit_code
    assert said in done.stderr


def test_short_form_of_a_release_is_not_taken_for_another(world: World) -> None:
    world.release(NEW)
    done = world.bw("2.1")
    assert done.returncode == errors.ReleaseError.exit_code
    assert "2.1.0" in done.stderr


def test_no_index(world: World) -> None:
    done = world.bw(NEW, PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert done.returncode == errors.DownloadError.exit_code
    assert "--wheel FILE" in done.stderr


def test_unknown_base(world: World) -> None:
    assert world.bw(NEW, "--from", "1.0").returncode == errors.UnknownBaseError.exit_code


def test_wheel_that_is_not_sglang_or_another_release(world: World) -> None:
    other = world.folder / "requests-2.1.0-py3-none-any.whl"
    other.write_bytes(wheel_bytes(FILES, NEW))
    cut = world.folder / f"sglang-{NEW}-py3-none-any.whl"
    cut.write_bytes(wheel_bytes(FILES, NEW)[:-40])
    for wheel in (other, world.upstream.wheel, cut, world.folder / "nowhere.whl"):
        done = world.bw(NEW, "--wheel", wheel)
        assert done.returncode == errors.BadWheelError.exit_code, done.stderr
        assert "Traceback" not in done.stderr


def _binary(patch: bytes) -> bytes:
    return patch.replace(b"\ndiff --git", b"\ndiff --git a/x.bin b/x.bin\nGIT binary patch\nliteral 0\n\ndiff --git", 1)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        pytest.param(lambda patch: patch.replace(b"Why: ", b"Whi: "), errors.LintError, id="trailer gone"),
        pytest.param(lambda patch: patch.replace(b">=2.0", b"two"), errors.LintError, id="range broken"),
        pytest.param(_binary, errors.LintError, id="binary hunk"),
        pytest.param(lambda patch: patch.replace(b"= 2\n", b"= 22\n"), errors.DriftError, id="line edited"),
        pytest.param(lambda patch: patch.replace(b"What hurts", b"What  hurt"), None, id="message edited"),
    ],
)  # fmt: skip
def test_broken_and_edited_patches(
    spoil: Callable[[bytes], bytes], error: type[errors.BwError] | None, world: World
) -> None:
    world.release(NEW)
    path = world.upstream.base / "0001-size.patch"
    path.write_bytes(spoil(path.read_bytes()))
    done = world.bw(NEW)
    assert done.returncode == (error.exit_code if error else 0), done.stderr
    assert (world.upstream.root / NEW).exists() == (error is None)
    assert "Traceback" not in done.stderr


def test_packaged_or_existing_target(world: World) -> None:
    world.release(NEW)
    assert world.bw(NEW).returncode == 0
    done = world.bw(NEW)
    assert done.returncode == errors.OutputError.exit_code
    assert "--append" in done.stderr


FAKE_GIT = """#!/bin/sh
for word in "$@"; do
  if [ "$word" = {trigger} ]; then {action}; fi
done
exec {git} "$@"
"""


@pytest.mark.parametrize(
    ("trigger", "action", "error"),
    [
        ("--version", "echo git version 2.20.1; exit 0", errors.GitError),
        ("fast-import", "echo fatal: write error: No space left on device >&2; exit 128", errors.OutputError),
    ],
)
def test_old_git_and_full_disk(trigger: str, action: str, error: type[errors.BwError], world: World) -> None:
    import shutil

    world.release(NEW)
    fake = world.folder / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text(FAKE_GIT.format(trigger=trigger, action=action, git=shutil.which("git")))
    fake.chmod(0o755)
    path = f"{fake.parent}{os.pathsep}{os.environ['PATH']}"
    done = world.bw(NEW, PATH=path)
    assert done.returncode == error.exit_code, done.stderr
    assert "Traceback" not in done.stderr
    assert world.bw(NEW, PATH="/nowhere").returncode == errors.GitError.exit_code
    assert world.bw(NEW).returncode == 0, "what was left behind is in the way"


FULL = """
import errno, os, sys
real = os.fsync
def full(handle):
    raise OSError(errno.ENOSPC, "No space left on device")
os.fsync = full
from sglang_bw.cli import main
main(sys.argv[1:])
"""


def test_disk_that_fills_while_the_state_is_written(world: World) -> None:
    world.release(NEW)
    command = [sys.executable, "-c", FULL, "rebase", NEW, "--patches", str(world.upstream.root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == errors.OutputError.exit_code, done.stderr
    assert "Traceback" not in done.stderr
    assert world.bw(NEW).returncode == 0


@pytest.mark.parametrize("arguments", [(), ("--continue", "--from", OLD), ("--check", "--wheel", "x")])
def test_wrong_usage(arguments: tuple[str, ...], world: World) -> None:
    assert world.bw(*arguments).returncode == 2


def test_check_says_by_its_exit_code_what_a_rebase_would_give(world: World) -> None:
    before = sorted(world.upstream.root.rglob("*"))
    assert world.bw("--check").returncode == 0
    world.release(NEW)
    world.release("2.1.1.dev1")
    done = world.bw("--check", "--json")
    assert done.returncode == NEW_AND_CLEAN, done.stderr
    assert [one["new"] for one in json.loads(done.stdout)["releases"]] == [NEW]
    world.release("2.2.0", {"sglang/runner.py": edit(RUNNER, (b"size = 1", b"size = 3"))})
    done = world.bw("--check", "--markdown")
    assert done.returncode == NEW_AND_NEEDS_A_PERSON, done.stderr
    assert "## SGLang 2.0.0 to 2.1.0" in done.stdout
    assert "### 0001-size.patch: conflict" in done.stdout
    assert world.bw("--check", NEW).returncode == NEW_AND_CLEAN
    assert world.bw("--check", NEW, "--from", OLD).returncode == NEW_AND_CLEAN
    assert world.bw("--check", NEW, "--from", "1.0.0").returncode == errors.UnknownBaseError.exit_code
    assert sorted(world.upstream.root.rglob("*")) == before
