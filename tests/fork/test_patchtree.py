"""Writing patches in a scratch tree: what comes out, and what is never overwritten."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_bw.errors import DriftError, LintError, LocalSeriesError, OutputError, ScratchError
from sglang_bw.fork import series as series_module
from sglang_bw.fork.lint import lint
from sglang_bw.fork.local import LocalSeries
from sglang_bw.fork.local import lint as lint_local
from sglang_bw.fork.mail import read_patch
from sglang_bw.fork.patchtree import Export, Target, export, has_edits, open_tree, take_disk
from sglang_bw.fork.scratch import scratch_root
from tests.conftest import CHECKOUT
from tests.fakeupstream import VERSION, FakeUpstream
from tests.fork.ownpatches import own_series
from tests.fork.test_cli_fork import bw

FILLED = """Count the lines

They were not counted.

Upstream-Status: Pending
Bug: none (no count)
Why: Lines are counted.
Removal: upstream counts them
Applies-To: >=1.2.3
Test: tests/fakeupstream.py
Verified-On: cpu
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def quiet(step: str) -> None:
    pass


def target(upstream: FakeUpstream, local: Path | None = None) -> Target:
    return Target(upstream.series(), local)


def opened(upstream: FakeUpstream, topic: str = "count", local: Path | None = None) -> Path:
    return open_tree(target(upstream, local), topic, wheel=upstream.wheel, progress=quiet)


def exported(upstream: FakeUpstream, local: Path | None = None, *, overwrite: bool = False) -> Export:
    return export(target(upstream, local), overwrite=overwrite, progress=quiet)


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".patch" or path.name == "series"
    }


def git(tree: Path, *arguments: str, stdin: str | None = None, **more: str) -> str:
    """Run git as a user does in his shell."""
    environment = {**os.environ, **more}
    command = ["git", "-C", str(tree), *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True, env=environment).stdout


def edit(tree: Path, path: str = "engine.py", text: str = "count = 40\n") -> None:
    file = tree / "python/sglang" / path
    file.write_bytes((file.read_bytes() if file.exists() else b"") + text.encode())


# --- what comes out


def test_nothing_changed_is_byte_for_byte_the_same(upstream: FakeUpstream) -> None:
    before = files(upstream.base)
    tree = opened(upstream)
    assert (tree / "python/sglang/engine.py").read_bytes() == upstream.file("python/sglang/engine.py")
    assert (tree / "python/sglang/repeated.py").is_file()  # full files, also those that no patch touches
    done = exported(upstream)
    assert (done.written, done.removed, done.unfilled) == ((), (), ())
    assert files(upstream.base) == before


def test_edit_becomes_a_patch_that_lint_refuses_until_it_is_filled_in(upstream: FakeUpstream) -> None:
    tree = opened(upstream)
    edit(tree)
    edit(tree, "counted.py", "x = 1\n")
    (tree / "python/sglang/__pycache__").mkdir()
    (tree / "python/sglang/__pycache__/engine.pyc").write_bytes(b"\x00")
    done = exported(upstream)
    assert done.written == ("0003-count.patch",)
    assert upstream.series().order[-1] == "0003-count.patch"
    patch = read_patch(upstream.base / "0003-count.patch")
    assert b"engine.py" in patch.diff
    assert b"counted.py" in patch.diff
    assert b"pyc" not in patch.diff
    upstream.pin()
    findings = lint(upstream.series())
    assert {text.partition(": ")[2] for text in findings} == {
        f"{what} is still to be filled in"
        for what in ("Bug", "Why", "Removal", "Test", "Verified-On", "the subject", "the description")
    }
    git(tree, "commit", "--quiet", "--amend", "--file", "-", stdin=FILLED)
    assert exported(upstream).written == ("0003-count.patch",)
    assert lint(upstream.series()) == []
    assert exported(upstream).written == ()
    assert upstream.pin().pins.patched["sglang/counted.py"]


def test_author_is_whom_the_users_git_names(
    upstream: FakeUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "gitconfig"
    config.write_text("[user]\n\tname = Ada L\n\temail = ada@example.org\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    edit(opened(upstream))
    exported(upstream)
    assert b"From: Ada L <ada@example.org>\n" in (upstream.base / "0003-count.patch").read_bytes()


def test_commit_of_the_users_own_gets_the_trailers_it_lacks(upstream: FakeUpstream) -> None:
    tree = opened(upstream)
    edit(tree)
    git(tree, "commit", "--quiet", "--all", "--message", "Count the lines\n\nThey were not.\n\nWhy: Lines are counted.")
    done = exported(upstream)
    assert done.written == ("0003-count.patch",)
    patch = read_patch(upstream.base / "0003-count.patch")
    assert (patch.subject, patch.trailer("Why")) == ("Count the lines", "Lines are counted.")
    assert patch.trailer("Bug").startswith("TODO")
    assert len(patch.trailers) == 7


def test_second_commit_is_named_after_its_subject(upstream: FakeUpstream) -> None:
    tree = opened(upstream)
    for number, subject in enumerate(("Count the lines", "[Spec] Count: more of them!")):
        edit(tree, text=f"count{number} = 1\n")
        git(tree, "commit", "--quiet", "--all", "--message", FILLED.replace("Count the lines", subject))
    assert exported(upstream).written == ("0003-count.patch", "0004-count-more-of-them.patch")


def test_amended_and_reordered_commits(upstream: FakeUpstream) -> None:
    """Every patch keeps its topic; numbers follow the order."""
    tree = opened(upstream)
    first, second = git(tree, "log", "-2", "--format=%H", "--reverse").split()
    swap = f"printf 'pick {second}\\npick {first}\\n' >"
    git(tree, "rebase", "--quiet", "--interactive", "HEAD~2", GIT_SEQUENCE_EDITOR=swap)
    edit(tree, "repeated.py")
    git(tree, "commit", "--quiet", "--all", "--amend", "--no-edit")
    done = exported(upstream)
    assert upstream.series().order == ("0002-odd-files.patch", "0003-better-engine.patch")
    assert (done.written, done.removed) == (("0003-better-engine.patch",), ("0001-better-engine.patch",))
    assert b"repeated.py" in (upstream.base / "0003-better-engine.patch").read_bytes()
    upstream.pin()
    assert lint(upstream.series()) == []


def test_dropped_commit_removes_its_file(upstream: FakeUpstream) -> None:
    tree = opened(upstream)
    git(tree, "reset", "--quiet", "--hard", "HEAD~1")
    done = exported(upstream)
    assert (done.written, done.removed) == ((), ("0002-odd-files.patch",))
    assert upstream.series().order == ("0001-better-engine.patch",)


def test_comment_that_an_order_file_begins_with_stays(upstream: FakeUpstream) -> None:
    order = upstream.base / "series"
    order.write_text("# ours\n" + order.read_text())
    edit(opened(upstream))
    exported(upstream)
    assert order.read_text().splitlines() == ["# ours", *upstream.series().order]


def test_tree_is_used_again_and_follows_the_disk(upstream: FakeUpstream) -> None:
    tree = opened(upstream, "one")
    head = git(tree, "rev-parse", "HEAD")
    stamp = (tree / "python/sglang/engine.py").stat().st_mtime_ns
    assert opened(upstream, "two") == tree
    assert (tree / "python/sglang/engine.py").stat().st_mtime_ns == stamp
    upstream.add_patch("third", {"python/sglang/third.py": b"x = 3\n"})
    assert opened(upstream, "two") == tree
    assert git(tree, "rev-parse", "HEAD~1") == head
    edit(tree)
    assert exported(upstream).written == ("0004-two.patch",)


# --- local series


def test_local_patch_from_nothing(upstream: FakeUpstream, tmp_path: Path) -> None:
    own, before = tmp_path / "own", files(upstream.base)
    tree = opened(upstream, "count", own)
    assert exported(upstream, own).order == ()
    assert not own.exists()
    edit(tree)
    done = exported(upstream, own)
    assert (done.written, len(done.unfilled)) == (("0001-count.patch",), 3)
    assert any("still to be filled in" in text for text in lint_local(LocalSeries.load(own), VERSION))
    git(tree, "commit", "--quiet", "--amend", "--message", "Count\n\nWhy: We count.")
    exported(upstream, own)
    assert lint_local(LocalSeries.load(own), VERSION) == []
    assert files(upstream.base) == before


def test_existing_local_series_is_kept_byte_for_byte(upstream: FakeUpstream, tmp_path: Path) -> None:
    own = own_series(upstream, tmp_path / "own")
    before = files(own)
    edit(opened(upstream, "count", own))
    assert exported(upstream, own).written == ("0003-count.patch",)
    after = files(own)
    assert {name: after[name] for name in before if name != "series"} == {
        name: data for name, data in before.items() if name != "series"
    }


def test_commits_below_local_patches_are_not_theirs_to_change(upstream: FakeUpstream, tmp_path: Path) -> None:
    own = own_series(upstream, tmp_path / "own")
    tree = opened(upstream, "count", own)
    git(tree, "reset", "--quiet", "--hard", "HEAD~3")
    with pytest.raises(ScratchError, match="commits below the patches were changed"):
        exported(upstream, own)


def test_series_that_changed_under_local_patches(upstream: FakeUpstream, tmp_path: Path) -> None:
    own = own_series(upstream, tmp_path / "own")
    edit(opened(upstream, "count", own))
    upstream.repo.run("reset", "--quiet", "--hard", "HEAD~2")
    upstream.add_patch("third", {"python/sglang/third.py": b"x = 3\n"})
    with pytest.raises(DriftError, match="has changed under the local patches") as caught:
        exported(upstream, own)
    assert "format-patch" in caught.value.hint


# --- what is refused, with the way out


def test_export_without_a_tree(upstream: FakeUpstream) -> None:
    with pytest.raises(ScratchError, match="no scratch tree is open") as caught:
        exported(upstream)
    assert "patches new TOPIC" in caught.value.hint


@pytest.mark.parametrize("topic", ["Count", "a b", "", "../x", "better-engine"])
def test_topic_that_is_none_or_taken(topic: str, upstream: FakeUpstream) -> None:
    with pytest.raises(LintError, match=r"is no topic|is taken by 0001"):
        opened(upstream, topic)


def _gone(tree: Path) -> None:
    shutil.rmtree(tree)


def _foreign(tree: Path) -> None:
    _gone(tree)
    subprocess.run(["git", "init", "--quiet", str(tree)], check=True)
    git(tree, "-c", "user.name=x", "-c", "user.email=x", "commit", "--quiet", "--allow-empty", "--message", "x")


def _busy(tree: Path) -> None:
    edit(tree)
    git(tree, "commit", "--quiet", "--all", "--message", "x")
    subprocess.run(["git", "-C", str(tree), "revert", "HEAD~1", "--no-commit"], capture_output=True, check=False)
    (tree / ".git/REVERT_HEAD").touch()


@pytest.mark.parametrize(
    ("spoil", "said", "way_out"),
    [
        pytest.param(_gone, "there is no scratch repository", "remove ", id="missing"),
        pytest.param(_foreign, "another repository", "remove ", id="foreign"),
        pytest.param(_busy, "in the middle of a git operation", "git status", id="busy"),
    ],
)
def test_tree_that_cannot_be_used(
    spoil: Callable[[Path], None], said: str, way_out: str, upstream: FakeUpstream
) -> None:
    spoil(opened(upstream))
    before = files(upstream.base)
    for call in (lambda: exported(upstream), lambda: opened(upstream, "other")):
        with pytest.raises(ScratchError, match=said) as caught:
            call()
        assert way_out in caught.value.hint
    assert files(upstream.base) == before


def test_edits_are_never_thrown_away(upstream: FakeUpstream) -> None:
    tree = opened(upstream)
    edit(tree)
    for call in (lambda: opened(upstream, "other"), lambda: take_disk(target(upstream), wheel=None, progress=quiet)):
        with pytest.raises(ScratchError, match=r"no patch file holds yet: python/sglang/engine\.py"):
            call()
    git(tree, "commit", "--quiet", "--all", "--message", FILLED)
    with pytest.raises(ScratchError, match="commits that were made"):
        opened(upstream, "other")
    assert exported(upstream).written == ("0003-count.patch",)
    edit(tree)
    with pytest.raises(ScratchError, match="not committed") as caught:
        exported(upstream)
    assert f"`git -C {tree} add --all && git -C {tree} commit --amend` adds them" in caught.value.hint


def test_edits_and_new_files_join_the_last_patch_as_the_hint_says(upstream: FakeUpstream) -> None:
    tree = opened(upstream)
    edit(tree)
    exported(upstream)
    edit(tree, "counted.py", "x = 1\n")
    with pytest.raises(ScratchError, match="not committed") as caught:
        exported(upstream)
    command = caught.value.hint.split("`")[1]
    subprocess.run(command, shell=True, check=True, capture_output=True, env=os.environ | {"GIT_EDITOR": "true"})
    assert exported(upstream).written == ("0003-count.patch",)
    assert b"counted.py" in (upstream.base / "0003-count.patch").read_bytes()


def test_wheel_that_is_built_in_the_tree_is_no_edit(upstream: FakeUpstream) -> None:
    """`build` and `install` write to dist/ where they are called: there, when the documented flow is followed."""
    tree = opened(upstream)
    edit(tree)
    exported(upstream)
    (tree / ".git/info/exclude").write_text("")  # as a tree of an older version of the tool
    (tree / "dist/simple").mkdir(parents=True)
    (tree / "dist/simple/index.html").write_text("x")
    assert exported(upstream).written == ()


def test_hints_name_the_local_folder_so_that_they_work_anywhere(
    upstream: FakeUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = target(upstream, Path("my patches")).options
    assert shlex.split(said)[2:4] == ["--local", str(tmp_path / "my patches")]
    with pytest.raises(LocalSeriesError) as caught:
        LocalSeries.load(Path("my patches"))
    assert f"--local '{tmp_path / 'my patches'}'`" in caught.value.hint


def test_patch_edited_by_hand_is_refused_and_brought_into_form(upstream: FakeUpstream) -> None:
    path = upstream.base / "0001-better-engine.patch"
    good = path.read_bytes()
    path.write_bytes(good.replace(b"Why: It stops hurting.", b"Why:  It stops hurting  at last."))
    path.write_bytes(path.read_bytes().replace(b"1 file changed", b"2 files changed"))
    with pytest.raises(DriftError, match=r"0001-better-engine\.patch") as caught:
        opened(upstream)
    assert "--from-disk" in caught.value.hint
    done = take_disk(target(upstream), wheel=upstream.wheel, progress=quiet)
    assert done.written == ("0001-better-engine.patch",)
    assert b"1 file changed" in path.read_bytes()
    assert b"at last" in path.read_bytes()
    opened(upstream)


def test_edit_on_both_sides_is_decided_by_the_user(upstream: FakeUpstream) -> None:
    tree = opened(upstream)
    path = upstream.base / "0002-odd-files.patch"
    before = path.read_bytes()
    path.write_bytes(before.replace(b"What hurts", b"How it hurts"))
    edit(tree)
    with pytest.raises(DriftError, match=r"edited on disk .* 0002-odd-files\.patch") as caught:
        exported(upstream)
    assert "--overwrite" in caught.value.hint
    assert exported(upstream, overwrite=True).written == ("0002-odd-files.patch", "0003-count.patch")
    assert path.read_bytes() == before


def test_order_edited_on_disk_is_seen(upstream: FakeUpstream) -> None:
    edit(opened(upstream))
    (upstream.base / "series").write_text("0001-better-engine.patch\n")
    with pytest.raises(DriftError, match="series"):
        exported(upstream)


def test_broken_trailers_are_told_before_anything_is_written(upstream: FakeUpstream, tmp_path: Path) -> None:
    tree, before = opened(upstream), files(upstream.base)
    edit(tree)
    git(tree, "commit", "--quiet", "--all", "--message", FILLED.replace("Pending", "Maybe"))
    with pytest.raises(LintError, match="Upstream-Status 'Maybe'") as caught:
        exported(upstream)
    assert "commit --amend" in caught.value.hint
    assert files(upstream.base) == before
    own = tmp_path / "own"
    edit(opened(upstream, "bad", own), "x.py", "x = 1\n")
    tree = scratch_root() / target(upstream, own).name / "tree"
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "--message", "X\n\nWhy: y\nApplies-To: ==9")
    with pytest.raises(LocalSeriesError, match="leaves out"):
        exported(upstream, own)


def test_binary_edit_is_refused(upstream: FakeUpstream) -> None:
    tree = opened(upstream)
    (tree / "python/sglang/table.bin").write_bytes(bytes(range(256)))
    with pytest.raises(LintError, match=r"table\.bin.*binary"):
        exported(upstream)


def test_copy_inside_the_installed_tool(
    upstream: FakeUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series_module, "_PACKAGE_DIR", upstream.root.parent.resolve())
    with pytest.raises(OutputError, match="inside the installed tool"):
        opened(upstream)
    edit(opened(upstream, "count", tmp_path / "own"))  # but a local series may lie on it
    assert exported(upstream, tmp_path / "own").written == ("0001-count.patch",)


# --- killed


@pytest.mark.parametrize("step", range(1, 6))
def test_killed_export_goes_on(step: int, upstream: FakeUpstream, tmp_path: Path) -> None:
    """Killed at the n-th file that is put in place: state or patch. The next call ends as if nothing had been."""
    tree = opened(upstream)
    git(tree, "reset", "--quiet", "--hard", "HEAD~1")
    edit(tree)
    git(tree, "commit", "--quiet", "--all", "--message", FILLED)
    edit(tree, "more.py", "x = 1\n")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "--message", FILLED.replace("Count", "Recount"))
    script = (
        "import os, pathlib\nfrom sglang_bw.fork.patchtree import Target, export\n"
        "from sglang_bw.fork.series import Series\n"
        f"replace, left = os.replace, [{step}]\n"
        "def counted(a, b):\n"
        "    left[0] -= 1\n"
        "    if not left[0]: os.kill(os.getpid(), 9)\n"
        "    return replace(a, b)\n"
        "os.replace = counted\n"
        f"export(Target(Series.load(pathlib.Path({str(upstream.root)!r}), {VERSION!r})), progress=lambda s: None)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == -9
    assert has_edits(target(upstream)) or step > 4
    exported(upstream)
    assert upstream.series().order == ("0001-better-engine.patch", "0002-count.patch", "0003-recount-the-lines.patch")
    assert not (upstream.base / "0002-odd-files.patch").exists()
    assert exported(upstream).written == ()


def test_killed_while_the_tree_is_laid_out(upstream: FakeUpstream, tmp_path: Path) -> None:
    script = (
        "import os, pathlib\nfrom sglang_bw.fork.patchtree import Target, open_tree\n"
        "from sglang_bw.fork.scratch import Scratch\nfrom sglang_bw.fork.series import Series\n"
        "Scratch.am_series = lambda *a: os.kill(os.getpid(), 9)\n"
        f"open_tree(Target(Series.load(pathlib.Path({str(upstream.root)!r}), {VERSION!r})), 'count',"
        f" wheel=pathlib.Path({str(upstream.wheel)!r}), progress=lambda s: None)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == -9
    edit(opened(upstream))
    assert exported(upstream).written == ("0003-count.patch",)


# --- the commands


def test_commands(upstream: FakeUpstream, tmp_path: Path) -> None:
    at = ("--patches", upstream.root)
    made = bw("patches", "new", "count", *at, "--wheel", upstream.wheel)
    assert made.returncode == 0, made.stderr
    tree = Path(made.stdout.strip())
    assert f"patches export --base {VERSION} --patches {upstream.root}" in made.stderr
    assert "nothing changed: 2 patches" in bw("patches", "export", *at).stdout
    edit(tree)
    done = bw("patches", "export", *at)
    assert f"wrote {upstream.base}/0003-count.patch" in done.stdout
    assert "0003-count.patch: Why is still to be filled in" in done.stdout
    assert bw("patches", "lint", *at).returncode == LintError.exit_code
    git(tree, "commit", "--quiet", "--amend", "--file", "-", stdin=FILLED)
    refreshed = bw("patches", "refresh", *at, "--wheel", upstream.wheel, "--json")
    assert refreshed.returncode == 0, refreshed.stderr
    facts = json.loads(refreshed.stdout)
    assert facts["exported"]["written"] == ["0003-count.patch"]
    assert facts["tree"] == upstream.series().pins.tree
    assert bw("patches", "lint", *at).returncode == 0
    assert bw("patches", "export", *at, "--overwrite", "--from-disk").returncode == 2
    own = tmp_path / "own"
    tree = Path(bw("patches", "new", "mine", *at, "--local", own, "--wheel", upstream.wheel).stdout.strip())
    edit(tree, "mine.py", "x = 1\n")
    bw("patches", "export", *at, "--local", own)
    git(tree, "commit", "--quiet", "--amend", "--message", "Mine\n\nWhy: Ours.")
    done = bw("patches", "refresh", *at, "--local", own, "--wheel", upstream.wheel)
    assert done.returncode == 0, done.stderr
    assert f"version {VERSION}+bw.0.local." in done.stdout
