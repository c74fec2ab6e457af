"""A user's own patches from one base to another: kept, refreshed, merged, or handed over."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_bw.errors import LocalSeriesError, OutputError, PatchApplyError, RebaseOpenError, RebaseStoppedError
from sglang_bw.fork.build import build
from sglang_bw.fork.local import LocalSeries, lint
from sglang_bw.fork.rebase import job
from sglang_bw.fork.rebase.outcome import Word
from sglang_bw.fork.rebase.own import Own
from sglang_bw.fork.rebase.report import Report
from tests.conftest import CHECKOUT
from tests.fakeupstream import FakeUpstream, patched
from tests.fork.ownpatches import own_patch, own_series
from tests.fork.target import offline_settings
from tests.fork.test_cli_fork import bw

OLD, NEW = "1.2.3", "1.3.0"
WIDE = {"Applies-To": ">=1.2"}


class Bases:
    """Two bases below one root, with the wheels of both where pip finds them, and a local series on the old one."""

    def __init__(self, folder: Path) -> None:
        self.old = patched(FakeUpstream(folder / "old", OLD))
        self.old.pin(release=True)
        self.root = self.old.root
        self.own = own_series(self.old, folder / "own")
        self.new = FakeUpstream(folder / "new", NEW)
        self.mirror = folder / "mirror"
        self.mirror.mkdir()
        for upstream in (self.old, self.new):
            shutil.copy(upstream.wheel, self.mirror)

    def series(self, edits: dict[str, bytes | None]) -> None:
        """Give the new base its series: what ours does there."""
        self.new.add_patch("ours", edits, WIDE)
        self.new.pin(release=True)
        shutil.copytree(self.new.base, self.root / NEW)

    def engine(self, *edits: tuple[bytes, bytes]) -> dict[str, bytes | None]:
        data = self.new.file("python/sglang/engine.py")
        for old, new in edits:
            assert old in data
            data = data.replace(old, new)
        return {"python/sglang/engine.py": data}

    def move(self, out: Path | None = None, **options: bool) -> Report:
        own = Own(self.own, out)
        return job.start_own(self.root, NEW, OLD, own, job.Options(**options), lambda step: None)[-1]


@pytest.fixture
def bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bases:
    made = Bases(tmp_path)
    for name, value in offline_settings(made.mirror, tmp_path / "cache"):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    return made


def words(report: Report) -> list[Word]:
    return [outcome.word for outcome in report.outcomes]


def test_patches_that_fit_move_as_they_are(bases: Bases, tmp_path: Path) -> None:
    bases.series(bases.engine((b"line 20\n", b"line twenty\n")))
    report = bases.move()
    assert words(report) == [Word.CLEAN, Word.CLEAN]
    assert report.folder == bases.own / NEW
    for name in ("0001-faster.patch", "0002-table.patch", "series"):
        before, after = (bases.own / name).read_bytes(), (report.folder / name).read_bytes()
        assert [line for line in before.splitlines() if not line.startswith(b"index ")] == [
            line for line in after.splitlines() if not line.startswith(b"index ")
        ]
    assert lint(LocalSeries.load(report.folder), NEW) == []
    built = build(bases.root, NEW, local=report.folder, out=tmp_path / "dist")
    assert (built.digest, built.version) == (report.digest, report.version)
    assert report.next_steps == (f"sglang-bw upgrade {NEW} --local {report.folder} --patches {bases.root}",)


def test_lines_that_moved_are_refreshed(bases: Bases, tmp_path: Path) -> None:
    bases.series(bases.engine((b"line 20\n", b"line twenty\n"), (b"line 1\n", b"line 0\nline 1\n")))
    with pytest.raises(PatchApplyError, match=r"\+1 lines off"):
        build(bases.root, NEW, local=bases.own, out=tmp_path / "dist")
    report = bases.move(tmp_path / "elsewhere")
    assert words(report) == [Word.OFFSET, Word.CLEAN]
    assert report.folder == tmp_path / "elsewhere"
    assert build(bases.root, NEW, local=report.folder, out=tmp_path / "dist").digest == report.digest


def test_patch_that_our_series_has_now_is_dropped(bases: Bases) -> None:
    bases.series(bases.engine((b"line 20\n", b"line twenty\n"), (b"line 21\n", b"line 21!\n")))
    report = bases.move()
    assert words(report) == [Word.MERGED, Word.CLEAN]
    assert report.folder
    assert LocalSeries.load(report.folder).order == ("0002-table.patch",)


@pytest.mark.slow
def test_nothing_is_left_when_everything_is_merged(bases: Bases) -> None:
    own_patch(bases.old, bases.own.parent / "one", "odd", {"python/sglang/odd.py": b"odd = 12345\n"})
    bases.own = bases.own.parent / "one"
    # The patch was made on top of the others; what it does is independent of them.
    bases.series({"python/sglang/odd.py": b"odd = 12345\n"})
    report = bases.move()
    assert words(report) == [Word.MERGED]
    assert report.folder is None
    assert not (bases.own / NEW).exists()


def conflicting(bases: Bases) -> None:
    repeated = bases.new.file("python/sglang/repeated.py").replace(b"x = 1", b"x = 3", 1)
    bases.series({**bases.engine((b"line 20\n", b"line twenty\n")), "python/sglang/repeated.py": repeated})


def test_conflict_is_handed_over_and_goes_on(bases: Bases) -> None:
    conflicting(bases)
    report = bases.move()
    assert words(report) == [Word.CLEAN, Word.CONFLICT]
    assert report.next_steps[0] == f"sglang-bw rebase --continue --local {bases.own} --patches {bases.root}"
    with pytest.raises(RebaseStoppedError):
        job.require_finished(report)
    with pytest.raises(RebaseOpenError) as caught:
        bases.move()
    assert f"--continue --local {bases.own}" in caught.value.hint
    own = Own(bases.own)
    with pytest.raises(RebaseStoppedError, match="conflict markers are left"):
        job.go_on_own(bases.root, own, lambda step: None, skip=False)
    assert not (bases.own / NEW).exists()
    repeated = report.tree / "python/sglang/repeated.py"
    text = repeated.read_text()
    repeated.write_text(text[: text.index("<<<<<<<")] + "    x = 23\n" + text[text.index("    return x\n") :])
    done = job.go_on_own(bases.root, own, lambda step: None, skip=False)
    assert (words(done), done.outcomes[1].resolved) == ([Word.CLEAN, Word.CONFLICT], True)
    moved = (bases.own / NEW / "0002-table.patch").read_bytes()
    assert b"+    x = 23\n" in moved
    assert b"Why: It is what we need here." in moved


def test_skip_and_abort(bases: Bases) -> None:
    conflicting(bases)
    bases.move()
    assert job.abort(bases.root, Own(bases.own)) == (OLD, NEW)
    with pytest.raises(RebaseOpenError, match="no rebase is open"):
        job.go_on_own(bases.root, Own(bases.own), lambda step: None, skip=True)
    bases.move()
    report = job.go_on_own(bases.root, Own(bases.own), lambda step: None, skip=True)
    assert report.folder
    assert LocalSeries.load(report.folder).order == ("0001-faster.patch",)


def test_nothing_is_written_where_something_is(bases: Bases) -> None:
    bases.series(bases.engine((b"line 20\n", b"line twenty\n")))
    (bases.own / NEW).mkdir()
    with pytest.raises(OutputError, match="exists already"):
        bases.move()
    assert words(bases.move(dry_run=True)) == [Word.CLEAN, Word.CLEAN]
    assert not list((bases.own / NEW).iterdir())


def test_broken_local_series_is_refused_at_once(bases: Bases) -> None:
    bases.series(bases.engine((b"line 20\n", b"line twenty\n")))
    path = bases.own / "0001-faster.patch"
    good = path.read_bytes()
    path.write_bytes(good.replace(b"Why: ", b"Because: "))
    with pytest.raises(LocalSeriesError, match="trailer Why is missing"):
        bases.move()
    path.write_bytes(good.replace(b"@@ -18,7 +18,7 @@", b"@@ -16,7 +16,7 @@"))
    with pytest.raises(PatchApplyError, match=r"\+2 lines off"):
        bases.move()


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["Scratch.am_series", "own.build", "session.move_all"])
def test_killed_move_goes_on(kill: str, bases: Bases) -> None:
    bases.series(bases.engine((b"line 20\n", b"line twenty\n"), (b"line 1\n", b"line 0\nline 1\n")))
    script = (
        "import os, pathlib\nfrom sglang_bw.fork.rebase import job, own, session\n"
        "from sglang_bw.fork.scratch import Scratch\n"
        f"{kill} = lambda *a, **k: os.kill(os.getpid(), 9)\n"
        f"job.start_own(pathlib.Path({str(bases.root)!r}), {NEW!r}, {OLD!r},"
        f" own.Own(pathlib.Path({str(bases.own)!r})), job.Options(), lambda step: None)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == -9
    assert not (bases.own / NEW).exists()
    assert words(bases.move()) == [Word.OFFSET, Word.CLEAN]
    assert (bases.own / NEW / "series").is_file()


def test_typing_error_is_told_before_our_series_is_moved(bases: Bases, tmp_path: Path) -> None:
    done = bw("rebase", NEW, "--from", OLD, "--patches", bases.root, "--local", tmp_path / "typo")
    assert done.returncode == LocalSeriesError.exit_code
    assert not (bases.root / NEW).exists()


def test_what_was_asked_for_is_next_where_our_series_goes_first(bases: Bases) -> None:
    own = f"sglang-bw rebase {NEW} --from {OLD} --local {bases.own} --patches {bases.root}"
    assert bases.move(dry_run=True).next_steps[-1] == own


def test_place_that_was_asked_for_holds_after_a_stop(bases: Bases, tmp_path: Path) -> None:
    conflicting(bases)
    own = Own(bases.own)
    bases.move(tmp_path / "elsewhere")
    with pytest.raises(RebaseOpenError, match=f"goes to {NEW}, not to 9.9.9"):
        job.go_on_own(bases.root, own, lambda step: None, skip=True, new="9.9.9")
    report = job.go_on_own(bases.root, own, lambda step: None, skip=True)
    assert report.folder == tmp_path / "elsewhere"
    assert not (bases.own / NEW).exists()


def test_command(bases: Bases) -> None:
    conflicting(bases)
    at = ("--patches", bases.root, "--local", bases.own)
    dry = bw("rebase", NEW, "--from", OLD, *at, "--dry-run", "--json")
    assert dry.returncode == 0, dry.stderr
    assert [row["word"] for row in json.loads(dry.stdout)["patches"]] == ["clean", "conflict"]
    assert json.loads(dry.stdout)["next"] == [
        f"sglang-bw rebase {NEW} --from {OLD} --local {bases.own} --patches {bases.root}"
    ]
    stopped = bw("rebase", NEW, "--from", OLD, *at)
    assert stopped.returncode == RebaseStoppedError.exit_code
    assert f"--continue --local {bases.own}" in stopped.stderr
    done = bw("rebase", "--skip", *at)
    assert done.returncode == RebaseStoppedError.exit_code  # as always when a patch was left out
    assert f"{bases.own}/{NEW} was written without 0002-table.patch" in done.stderr
    assert f"wrote {bases.own}/{NEW}" in done.stdout
    assert bw("rebase", NEW, *at, "--test").returncode == 2
    assert bw("rebase", NEW, *at, "--append").returncode == 2
    assert bw("rebase", NEW, "--patches", bases.root, "--out", "x").returncode == 2
