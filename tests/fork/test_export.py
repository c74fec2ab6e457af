"""The patch files on disk are what git exports from them, byte for byte."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sglang_bw.fork import upstream
from sglang_bw.fork.apply import text_files
from sglang_bw.fork.gitrepo import GitRepo
from sglang_bw.fork.patchtree import Target, export, open_tree
from sglang_bw.fork.series import Series, bases
from sglang_bw.fork.wheel import Wheel, read_wheel
from tests.conftest import PATCHES
from tests.fakeupstream import FakeUpstream


def exported(series: Series, wheel: Wheel, folder: Path) -> list[bytes]:
    """Apply the series with git in a full work tree and export it again."""
    repo = GitRepo.create(folder / "repo")
    files = text_files(wheel)
    repo.commit_files(files, "release", work_on=files)
    base = repo.run("rev-parse", "HEAD").text
    for path in series.files:
        assert repo.am(path).code == 0, path.name
    return [path.read_bytes() for path in repo.export(base, folder / "out")]


def test_export_of_a_small_series(upstream: FakeUpstream, tmp_path: Path) -> None:
    series = upstream.series()
    digest = next(iter(upstream.pins.wheels.values()))
    wheel = read_wheel(upstream.wheel, sha256=digest, version=upstream.version)
    assert exported(series, wheel, tmp_path) == [path.read_bytes() for path in series.files]


@pytest.mark.engine
@pytest.mark.parametrize("base", bases(PATCHES))
def test_export_of_the_shipped_series(base: str, tmp_path: Path) -> None:
    series = Series.load(PATCHES, base)
    name = upstream.pick_wheel(series.pins, upstream.this_python(), upstream.this_machine())
    wheel = read_wheel(upstream.fetch(series.pins, name), sha256=series.pins.wheels[name], version=base)
    again = exported(series, wheel, tmp_path)
    assert [path.name for path, data in zip(series.files, again, strict=True) if path.read_bytes() != data] == []


@pytest.mark.engine
@pytest.mark.parametrize("base", bases(PATCHES))
def test_scratch_tree_of_the_shipped_series(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`patches new` and `patches export` with nothing edited in between leave every byte."""
    shutil.copytree(PATCHES / base, tmp_path / "patches" / base, ignore=shutil.ignore_patterns("locks"))
    series = Series.load(tmp_path / "patches", base)
    wheel = upstream.fetch(
        series.pins, upstream.pick_wheel(series.pins, upstream.this_python(), upstream.this_machine())
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = {path.name: path.read_bytes() for path in series.folder.iterdir()}
    open_tree(Target(series), "nothing", wheel=wheel, progress=lambda step: None)
    done = export(Target(series), progress=lambda step: None)
    assert (done.written, done.removed) == ((), ())
    assert {path.name: path.read_bytes() for path in series.folder.iterdir()} == before
