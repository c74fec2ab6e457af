from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel

from sglang_bw.errors import OutputError, PatchApplyError, RebaseOpenError, ScratchError
from sglang_bw.fork.scratch import Scratch, opened, scratch_root
from sglang_bw.fork.wheel import Wheel, read_wheel
from tests.fakeupstream import FakeUpstream


class Remembered(BaseModel):
    schema_version: Literal[1] = 1
    word: str


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scratch]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with opened("test") as made:
        made.create()
        yield made


def wheel_of(upstream: FakeUpstream) -> Wheel:
    digest = hashlib.sha256(upstream.wheel.read_bytes()).hexdigest()
    return read_wheel(upstream.wheel, sha256=digest, version=upstream.version)


def users_git(scratch: Scratch, *arguments: str) -> str:
    """Run git as a user does in his shell: with his environment and none of our options."""
    command = ["git", "-C", str(scratch.tree), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_series_comes_back_as_it_is_on_disk(scratch: Scratch, upstream: FakeUpstream) -> None:
    base = scratch.import_release(wheel_of(upstream))
    scratch.start(base)
    files = upstream.series().files
    assert len(scratch.am_series(files)) == len(files)
    assert [(one.name, one.data) for one in scratch.export(base)] == [(path.name, path.read_bytes()) for path in files]
    assert scratch.changes() == []
    assert (scratch.tree / "python/sglang/windows.py").read_bytes() == b"first\r\n2nd\r\nthird\r\nfourth\r\n"


def test_release_is_imported_once(scratch: Scratch, upstream: FakeUpstream) -> None:
    wheel = wheel_of(upstream)
    commit = scratch.import_release(wheel)
    packs = set((scratch.tree / ".git/objects/pack").iterdir())
    assert scratch.import_release(wheel) == commit
    assert set((scratch.tree / ".git/objects/pack").iterdir()) == packs


def test_name_follows_a_commit_that_the_user_amends(scratch: Scratch, upstream: FakeUpstream) -> None:
    base = scratch.import_release(wheel_of(upstream))
    scratch.start(base)
    scratch.am_series(upstream.series().files)
    (scratch.tree / "python/sglang/added.py").write_text("new = 2\n")
    assert scratch.changes() == ["python/sglang/added.py"]
    users_git(scratch, "commit", "--quiet", "--all", "--amend", "--no-edit")
    (scratch.tree / "python/sglang/other.py").write_text("x = 1\n")
    users_git(scratch, "add", ".")
    users_git(scratch, "commit", "--quiet", "--message", "Something new")
    exported = scratch.export(base)
    assert [one.name for one in exported] == [*upstream.series().order, ""]
    assert exported[2].subject == "Something new"


def test_start_throws_away_what_lay_there(scratch: Scratch, upstream: FakeUpstream) -> None:
    base = scratch.import_release(wheel_of(upstream))
    scratch.start(base)
    scratch.am_series(upstream.series().files)
    (scratch.tree / "python/sglang/engine.py").write_text("edited\n")
    (scratch.tree / "stray").mkdir()
    (scratch.tree / "stray" / "file").write_text("")
    (scratch.tree / ".git" / "index.lock").touch()
    scratch.start(base, work_on=["python/sglang/engine.py"])
    there = [path.relative_to(scratch.tree).as_posix() for path in scratch.tree.rglob("*") if path.is_file()]
    assert [path for path in there if not path.startswith(".git/")] == ["python/sglang/engine.py"]
    scratch.start(base)
    assert scratch.changes() == []
    assert (scratch.tree / "python/sglang/repeated.py").is_file()


def test_patch_that_does_not_apply_leaves_the_tree_usable(scratch: Scratch, upstream: FakeUpstream) -> None:
    first, second = upstream.series().files
    broken = upstream.base / "broken.patch"
    broken.write_bytes(second.read_bytes().replace(b"-second", b"-2econd"))
    scratch.start(scratch.import_release(wheel_of(upstream)))
    with pytest.raises(PatchApplyError, match=r"broken\.patch: git am refuses it"):
        scratch.am_series([first, broken])
    assert scratch.changes() == []
    assert len(scratch.am_series([second])) == 1


def test_what_is_remembered_is_checked(scratch: Scratch) -> None:
    assert scratch.read_state(Remembered) is None
    scratch.write_state(Remembered(word="x"))
    assert scratch.read_state(Remembered) == Remembered(word="x")
    (scratch.folder / "state.json").write_text('{"schema_version": 2, "word": "x"}')
    with pytest.raises(ScratchError, match="another version of sglang-bw"):
        scratch.read_state(Remembered)
    (scratch.folder / "state.json").write_text('{"schema_ver')
    with pytest.raises(ScratchError, match="damaged"):
        scratch.read_state(Remembered)
    scratch.remove()
    assert scratch.read_state(Remembered) is None
    assert not scratch.exists


@pytest.mark.parametrize("suffix", [".pack", ".idx"])
def test_damaged_repository_is_refused(suffix: str, scratch: Scratch, upstream: FakeUpstream) -> None:
    scratch.import_release(wheel_of(upstream))
    scratch.require_sound()
    packs = list((scratch.tree / ".git/objects").rglob("*" + suffix)) or [
        path for path in (scratch.tree / ".git/objects").rglob("*") if path.is_file()
    ]
    packs[0].chmod(0o644)
    packs[0].write_bytes(packs[0].read_bytes()[:-30])
    with pytest.raises(ScratchError, match="is damaged"):
        scratch.require_sound()


def test_missing_repository_is_refused(scratch: Scratch) -> None:
    scratch.remove()
    with pytest.raises(ScratchError, match="there is no scratch repository"):
        scratch.require_sound()


def test_second_process_is_kept_out_until_the_first_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code = "import time; from sglang_bw.fork.scratch import opened\n"
    code += "with opened('x'): print('in', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=dict(os.environ)) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"in\n"
        with pytest.raises(RebaseOpenError, match=f"process {holder.pid}"), opened("x"):
            pass
        holder.kill()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with opened("x") as scratch:
            assert scratch.folder.is_dir()
            return


def test_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(OutputError, match="cannot write to"), opened("x"):
        pass
    assert scratch_root().parent.parent == tmp_path / "cache"
