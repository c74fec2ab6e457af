"""A rebase over several calls: stops, goes on, is killed, is thrown away; ``patches/`` stays as it was till the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_bw import errors
from sglang_bw.fork import upstream as cache
from sglang_bw.fork.gitrepo import git_program
from sglang_bw.fork.rebase.session import scratch_name
from sglang_bw.fork.scratch import scratch_root
from sglang_bw.fork.series import Series
from tests.fakeupstream import FakeUpstream, release
from tests.fork.test_rebase_words import NEW, OLD, RUNNER, edit

LATER = "2.2.0"
WORDS = {"Applies-To": ">=2.0"}


class Project:
    """A series of four patches, the third of which conflicts on the new release."""

    def __init__(self, folder: Path) -> None:
        files = {"sglang/runner.py": RUNNER, "sglang/other.py": b"a = 1\nb = 2\nc = 3\n"}
        self.upstream = FakeUpstream(folder / "upstream", OLD, files)
        self.root = self.upstream.root
        add = self.upstream.add_patch
        first = edit(RUNNER, (b"    10: 2,", b"    10: 20,"))
        second = edit(first, (b"runner.run()", b"runner.run(1)"))
        add("first", {"python/sglang/runner.py": first}, WORDS)
        add("second", {"python/sglang/runner.py": second}, WORDS)
        add("third", {"python/sglang/runner.py": edit(second, (b"size = 1", b"size = 2"))}, WORDS)
        add("fourth", {"python/sglang/other.py": b"a = 1\nb = 2\nc = 4\n"}, WORDS)
        self.upstream.pin()
        cache.keep(self.upstream.wheel)
        self.files = {**files, "sglang/runner.py": b"import sys\n" + edit(RUNNER, (b"size = 1", b"size = 3"))}
        self.wheel = release(folder, NEW, self.files)
        self.tree = scratch_root() / scratch_name(self.root) / "tree"
        self.before = self.snapshot()

    def snapshot(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.root)): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}

    def bw(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sglang_bw", "rebase", "--patches", str(self.root), *map(str, arguments)]
        return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)

    def start(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.bw(NEW, "--from", OLD, "--wheel", self.wheel, *arguments, **environment)

    def git(self, *arguments: str) -> str:
        """Run git in the scratch tree, as a user does."""
        command = [git_program(), "-C", str(self.tree), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def resolve(self) -> None:
        path = self.tree / "python/sglang/runner.py"
        data = path.read_bytes()
        begin, end = data.index(b"<<<<<<<"), data.index(b">>>>>>>")
        rest = data[data.index(b"\n", end) + 1 :]
        path.write_bytes(data[:begin] + b"    size = 4\n" + rest)

    def require_finished(self) -> None:
        series = Series.load(self.root, NEW)
        assert series.order == tuple(f"000{n}-{topic}.patch" for n, topic in enumerate(TOPICS, start=1))
        third = (series.folder / "0003-third.patch").read_bytes()
        assert b"-    size = 3\n+    size = 4\n" in third
        old = (self.upstream.base / "0003-third.patch").read_bytes()
        assert third.partition(b"\n---\n")[0] == old.partition(b"\n---\n")[0], "message, author or date changed"
        assert {name: data for name, data in self.snapshot().items() if not name.startswith(NEW)} == self.before


TOPICS = ("first", "second", "third", "fourth")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return Project(tmp_path)


def test_conflict_is_handed_over_and_continued(project: Project) -> None:
    done = project.start()
    assert done.returncode == errors.RebaseStoppedError.exit_code, done.stderr
    assert "0003-third.patch: conflict, a person must decide" in done.stderr
    assert "upstream |     size = 3" in done.stdout
    assert "patch |     size = 2" in done.stdout
    assert "Traceback" not in done.stderr
    assert project.snapshot() == project.before
    marked = (project.tree / "python/sglang/runner.py").read_text()
    assert "<<<<<<< " in marked
    assert "||||||| " in marked
    assert (project.tree / "python/sglang/repeated.py").is_file(), "the tree is not complete"
    project.resolve()
    done = project.bw("--continue")
    assert done.returncode == 0, done.stderr
    assert "conflict, resolved by hand" in done.stdout.replace("\n", " ")
    project.require_finished()
    assert project.bw("--continue").returncode == errors.RebaseOpenError.exit_code


def test_hints_of_a_stop_can_be_pasted(project: Project) -> None:
    at = f"--patches {project.root}"
    stopped = project.start("--json")
    assert json.loads(stopped.stdout)["next"] == [
        f"sglang-bw rebase --{word} {at}" for word in ("continue", "skip", "abort")
    ]
    assert f"`sglang-bw rebase --continue {at}`" in project.start().stderr
    # Another rebase than the open one: by its message the open one is finished, or ended.
    other = project.bw(LATER, "--from", OLD)
    assert f"`sglang-bw rebase --continue {at}`" in other.stderr
    project.resolve()
    assert project.bw("--continue", "--json").returncode == 0


@pytest.mark.parametrize("odd", ["--dry-run", "--append", "--keep-going"])
def test_what_an_open_rebase_knows_already_is_refused(odd: str, project: Project) -> None:
    project.start()
    state = (project.tree.parent / "state.json").read_bytes()
    done = project.bw("--skip", odd)
    assert done.returncode == 2, done.stdout
    assert f"--skip does not go with {odd}" in done.stderr
    assert (project.tree.parent / "state.json").read_bytes() == state
    assert project.bw("--abort", "9.9.9").returncode == errors.RebaseOpenError.exit_code


def test_sigterm_ends_it_as_ctrl_c_does(project: Project) -> None:
    command = [sys.executable, "-m", "sglang_bw", "rebase", NEW, "--patches", str(project.root)]
    command += ["--wheel", str(project.wheel), "--keep-going"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tool:
        assert tool.stderr is not None
        tool.stderr.readline()  # it works
        tool.terminate()
        said = tool.stderr.read().splitlines()
    assert (tool.returncode, said[-1]) == (130, "interrupted")
    assert not list(project.tree.parent.glob("staged-*"))
    assert project.snapshot() == project.before
    assert project.start("--keep-going").returncode == errors.RebaseStoppedError.exit_code


def test_tests_that_were_asked_for_are_run_after_a_stop(project: Project) -> None:
    refused = project.start("--test")
    assert refused.returncode == errors.RebaseFailedError.exit_code
    assert "the tests cannot run" in refused.stderr
    tests = project.root.parent / "tests"
    (tests / "patches").mkdir(parents=True)
    # The trailers name it; a test that does not fail on stock proves nothing.
    (tests / "fakeupstream.py").write_text("def test_nothing(): pass\n")
    assert project.start("--test").returncode == errors.RebaseStoppedError.exit_code
    project.resolve()
    done = project.bw("--continue")
    assert done.returncode == errors.RebaseFailedError.exit_code
    assert "the tests are not content" in done.stderr
    assert project.snapshot() == project.before


def test_what_makes_no_rebase_is_refused(project: Project, tmp_path: Path) -> None:
    assert project.bw(OLD, "--from", OLD).returncode == 2
    assert project.bw("--check", "--append").returncode == 2
    assert project.start("--dry-run", "--json", "--markdown").returncode == 2
    (tmp_path / "empty").mkdir()
    nothing = project.bw("--check", "--patches", tmp_path / "empty")
    assert nothing.returncode == errors.UnknownBaseError.exit_code, nothing.stderr


@pytest.mark.parametrize("command", ["add", "commit", "cherry-pick"])
def test_users_own_git_may_finish_it(command: str, project: Project) -> None:
    project.start()
    project.resolve()
    project.git("add", "--all")
    if command == "commit":
        project.git("commit", "--quiet", "--message", "my own words")
    elif command == "cherry-pick":
        project.git("-c", "core.editor=true", "cherry-pick", "--continue")
    done = project.bw("--continue", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "written"
    project.require_finished()


def test_resolution_is_looked_at_before_it_counts(project: Project) -> None:
    project.start()
    done = project.bw("--continue")
    assert done.returncode == errors.RebaseStoppedError.exit_code
    assert "conflict markers are left" in done.stderr
    path = project.tree / "python/sglang/runner.py"
    project.resolve()
    good = path.read_bytes()
    path.write_bytes(good + b"def main(:\n")
    assert "is no valid Python" in project.bw("--continue").stderr
    path.write_bytes(good + b"\n\nclass Runner:\n    pass\n")
    assert "Runner is defined 2 times" in project.bw("--continue").stderr
    path.write_bytes(good)
    (project.tree / "python/sglang/runner.py.orig").write_text("")
    done = project.bw("--continue")
    assert done.returncode == errors.ScratchError.exit_code
    assert "runner.py.orig" in done.stderr
    (project.tree / "python/sglang/runner.py.orig").unlink()
    path.write_bytes(good.replace(b"size = 4", b"size = 3"))
    assert "nothing is left of 0003-third.patch" in project.bw("--continue").stderr
    path.write_bytes(good)
    project.git("add", "--all")
    project.git("commit", "--quiet", "--message", "one")
    project.git("commit", "--quiet", "--allow-empty", "--message", "two")
    assert project.bw("--continue").returncode == errors.ScratchError.exit_code
    project.git("reset", "--quiet", "--soft", "HEAD~1")
    assert project.bw("--continue").returncode == 0
    project.require_finished()


def test_skip_leaves_the_patch_out(project: Project) -> None:
    project.start()
    done = project.bw("--skip")
    assert done.returncode == errors.RebaseStoppedError.exit_code
    assert "written without 0003-third.patch" in done.stderr
    assert Series.load(project.root, NEW).order == ("0001-first.patch", "0002-second.patch", "0004-fourth.patch")


def test_abort_leaves_nothing(project: Project) -> None:
    project.start()
    done = project.bw("--abort")
    assert done.returncode == 0
    assert project.snapshot() == project.before
    assert not project.tree.exists()
    assert project.bw("--abort").returncode == errors.RebaseOpenError.exit_code
    assert project.start().returncode == errors.RebaseStoppedError.exit_code


def test_second_rebase_is_refused_with_the_way_out(project: Project) -> None:
    project.start()
    for done in (project.start(), project.bw(LATER, "--from", OLD, "--wheel", project.wheel)):
        assert done.returncode == errors.RebaseOpenError.exit_code
        assert "waits at 0003-third.patch" in done.stderr
        assert "--continue" in done.stderr
        assert "--abort" in done.stderr
    assert project.bw(LATER, "--continue").returncode == errors.RebaseOpenError.exit_code


def test_keep_going_writes_the_rest_and_says_what_is_missing(project: Project) -> None:
    done = project.start("--keep-going")
    assert done.returncode == errors.RebaseStoppedError.exit_code
    assert "without 0003-third.patch" in done.stderr
    again = f"sglang-bw rebase {NEW} --from {OLD} --wheel {project.wheel} --patches {project.root}"
    assert f"remove the folder and run `{again}`" in done.stderr
    assert Series.load(project.root, NEW).order == ("0001-first.patch", "0002-second.patch", "0004-fourth.patch")


def test_dry_run_writes_nothing_and_disturbs_no_open_rebase(project: Project) -> None:
    project.start()
    marked = (project.tree / "python/sglang/runner.py").read_bytes()
    done = project.start("--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [patch["word"] for patch in report["patches"]] == ["offset", "offset", "conflict", "clean"]
    assert report["needs_a_person"]
    assert project.snapshot() == project.before
    assert (project.tree / "python/sglang/runner.py").read_bytes() == marked


def test_append_moves_what_the_new_series_lacks(project: Project) -> None:
    project.start()
    project.resolve()
    assert project.bw("--continue").returncode == 0
    locks = project.root / NEW / "locks"
    locks.mkdir()
    (locks / "cpu.in").write_text("x\n")
    third = (project.root / NEW / "0003-third.patch").read_bytes()
    project.upstream.add_patch("fifth", {"python/sglang/x.py": b"x = 1\n"}, WORDS)
    project.upstream.pin()
    assert project.start().returncode == errors.OutputError.exit_code
    dry = project.start("--append", "--dry-run", "--json")
    command = f"sglang-bw rebase {NEW} --from {OLD} --append --wheel {project.wheel} --patches {project.root}"
    assert json.loads(dry.stdout)["next"] == [command]
    done = project.start("--append", "--json")
    assert done.returncode == 0, done.stderr
    assert [patch["patch"] for patch in json.loads(done.stdout)["patches"]] == ["0005-fifth.patch"]
    assert len(Series.load(project.root, NEW).order) == 5
    assert (project.root / NEW / "0003-third.patch").read_bytes() == third
    assert (locks / "cpu.in").read_text() == "x\n"
    assert not list(project.root.glob(".*"))
    project.upstream.add_patch("sixth", {"python/sglang/runner.py": b"gone\n"}, WORDS)
    project.upstream.pin()
    done = project.start("--append", "--keep-going")
    # The folder has what was there before: it must not be removed to try again.
    assert f"look at each: run `{command}`" in done.stderr


def test_series_that_changed_meanwhile_is_refused(project: Project) -> None:
    project.start()
    project.upstream.add_patch("fifth", {"python/sglang/x.py": b"x = 1\n"}, WORDS)
    project.upstream.pin()
    project.resolve()
    done = project.bw("--continue")
    assert done.returncode == errors.RebaseOpenError.exit_code
    assert "series on disk changed" in done.stderr


@pytest.mark.parametrize("damage", ["tree gone", "objects gone", "state damaged", "state of another version"])
def test_damaged_scratch_is_one_error_and_can_be_thrown_away(damage: str, project: Project) -> None:
    import shutil

    project.start()
    state = project.tree.parent / "state.json"
    if damage == "tree gone":
        shutil.rmtree(project.tree)
    elif damage == "objects gone":
        shutil.rmtree(project.tree / ".git" / "objects" / "pack")
        for folder in (project.tree / ".git" / "objects").iterdir():
            shutil.rmtree(folder)
    elif damage == "state damaged":
        state.write_text(state.read_text()[:-40])
    else:
        state.write_text(state.read_text().replace('"schema_version": 2', '"schema_version": 7'))
    done = project.bw("--continue")
    assert done.returncode == errors.ScratchError.exit_code, done.stderr
    assert "Traceback" not in done.stderr
    assert project.bw("--abort").returncode == 0
    assert project.snapshot() == project.before
    assert project.start().returncode == errors.RebaseStoppedError.exit_code


POINTS = [
    "sglang_bw.fork.scratch:Scratch.import_release",
    "sglang_bw.fork.scratch:Scratch.am_series",
    "sglang_bw.fork.rebase.move:pick",
    "sglang_bw.fork.rebase.move:Mover._commit",
    "sglang_bw.fork.rebase.move:Mover.hand_over",
    "sglang_bw.fork.scratch:Scratch.set_names",
    "sglang_bw.fork.scratch:Scratch.write_state",
    "sglang_bw.fork.rebase.resolution:accept",
    "sglang_bw.fork.rebase.publish:write",
    "sglang_bw.fork.build:pack",
    "sglang_bw.fork.rebase.publish:os.rename",
]

KILL = """
import importlib, os, signal, sys
module, _, path = sys.argv[1].partition(":")
count, after = int(sys.argv[2]), sys.argv[3] == "after"
owner = importlib.import_module(module)
*outer, name = path.split(".")
for part in outer:
    owner = getattr(owner, part)
real = getattr(owner, name)
def killed(*args, **kwargs):
    global count
    count -= 1
    if count == 0 and not after:
        os.kill(os.getpid(), signal.SIGKILL)
    result = real(*args, **kwargs)
    if count == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(owner, name, killed)
from sglang_bw.cli import main
main(sys.argv[4:])
"""


# Where a kill leaves most to repair; the others are as good, and cost seconds each.
SAMPLE = {("sglang_bw.fork.rebase.move:Mover.hand_over", "after"), ("sglang_bw.fork.rebase.publish:os.rename", "after")}
KILLS = [
    pytest.param(point, when, marks=[] if (point, when) in SAMPLE else pytest.mark.slow)
    for point in POINTS
    for when in ("before", "after")
]


@pytest.mark.parametrize(("point", "when"), KILLS)
def test_killed_at_any_step_goes_on(point: str, when: str, project: Project) -> None:
    """A real process kills itself with SIGKILL at the n-th call of a step; plain calls afterwards finish the work."""
    killed = 0
    for _ in range(30):
        arguments = ["rebase", "--continue"] if _is_stopped(project) else ["rebase", NEW, "--from", OLD]
        arguments += ["--wheel", str(project.wheel), "--patches", str(project.root)]
        if (project.root / NEW).exists():
            break
        command = [sys.executable, "-c", KILL, point, str(killed % 3 + 1), when, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == -9:
            killed += 1
        else:
            assert done.returncode in (0, errors.RebaseStoppedError.exit_code), done.stderr
        if killed > 3:
            point = "sglang_bw.errors:BwError.__str__"  # let it run
        if _is_stopped(project) and b"<<<<<<<" in (project.tree / "python/sglang/runner.py").read_bytes():
            project.resolve()
    assert killed
    if not (project.root / NEW).exists():
        pytest.fail("it did not finish")
    project.require_finished()


@pytest.mark.parametrize(("rename", "when"), [("1", "after"), ("2", "after")])
def test_append_killed_at_its_two_renames_loses_nothing(rename: str, when: str, project: Project) -> None:
    """The old base steps aside, the new one takes its name: after a kill at either, the next call puts it right."""
    project.start()
    project.resolve()
    assert project.bw("--continue").returncode == 0
    (project.root / NEW / "locks").mkdir()
    (project.root / NEW / "locks" / "cpu.in").write_text("x\n")
    project.upstream.add_patch("fifth", {"python/sglang/x.py": b"x = 1\n"}, WORDS)
    project.upstream.pin()
    arguments = ["rebase", NEW, "--from", OLD, "--wheel", str(project.wheel), "--append", "--patches", project.root]
    command = [sys.executable, "-c", KILL, "sglang_bw.fork.rebase.publish:os.rename", rename, when, *arguments]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -9
    assert (project.root / f".{NEW}.old" / "locks" / "cpu.in").is_file()
    assert (project.root / NEW).exists() == (rename == "2")
    done = project.start("--append")
    assert done.returncode == 0, done.stderr
    assert len(Series.load(project.root, NEW).order) == 5
    assert (project.root / NEW / "locks" / "cpu.in").read_text() == "x\n"
    assert not list(project.root.glob(".*"))
    assert "no rebase is open" in project.bw("--abort").stderr


def _is_stopped(project: Project) -> bool:
    state = project.tree.parent / "state.json"
    return state.is_file() and json.loads(state.read_text())["phase"] == "stopped"
