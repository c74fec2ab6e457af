"""The strict reader against git, on hand-made and on random edits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sglang_bw.errors import PatchApplyError
from sglang_bw.fork.gitrepo import GitRepo
from sglang_bw.fork.strict import apply_exactly, touched

# Lines that collide, so that hunks meet repeated context; CR, CRLF, form feed, no UTF-8, blanks.
LINES = st.sampled_from(
    [b"a\n", b"b\n", b"\n", b"}\n", b"x\r\n", b"y\rz\n", b"\x0c\n", b"\xff\xfe\n", b"  t \n", b"- minus\n"]
)
TEXTS = st.tuples(st.lists(LINES, max_size=30), st.sampled_from([b"", b"end", b"\xe9"])).map(
    lambda parts: b"".join(parts[0]) + parts[1]
)


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> GitRepo:
    made = GitRepo.create(tmp_path_factory.mktemp("strict") / "repo")
    made.commit_all("start")
    return made


def diff_of(repo: GitRepo, old: bytes | None, new: bytes | None, path: str = "f.py") -> bytes:
    def blob(data: bytes | None) -> str | None:
        return None if data is None else repo.run("hash-object", "-w", "--stdin", stdin=data).text

    trees = []
    for name in (blob(old), blob(new)):
        listing = f"100644 blob {name}\t{path}\n".encode() if name else b""
        trees.append(repo.run("mktree", stdin=listing).text)
    return repo.run("diff", "--full-index", "--text", "--no-renames", *trees).stdout


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(old=TEXTS, new=TEXTS)
@example(old=b"one\ntwo", new=b"one\ntwo\n")
@example(old=b"one\ntwo\n", new=b"one\ntwo")
@example(old=b"", new=b"x")
def test_a_diff_applied_to_its_source_gives_its_target(repo: GitRepo, old: bytes, new: bytes) -> None:
    diff = diff_of(repo, old, new)
    if old == new:
        with pytest.raises(PatchApplyError, match="empty"):
            apply_exactly("p", diff, lambda _path: old)
        return
    assert apply_exactly("p", diff, lambda _path: old) == {"f.py": new}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(old=TEXTS, new=TEXTS, other=TEXTS)
def test_never_silently_different_from_git(repo: GitRepo, old: bytes, new: bytes, other: bytes) -> None:
    """On a file that is not the source: either refused, or exactly what git makes of it without an offset."""
    diff = diff_of(repo, old, new)
    if old == new:
        return
    try:
        ours = apply_exactly("p", diff, lambda _path: other)["f.py"]
    except PatchApplyError:
        return
    scratch = repo.path / "g.txt"
    scratch.write_bytes(other)
    said = repo.run("apply", "--verbose", "--unsafe-paths", "-", stdin=diff.replace(b"f.py", b"g.txt"), check=False)
    assert said.code == 0, said.stderr
    assert "offset" not in said.stderr
    assert scratch.read_bytes() == ours


def test_new_and_deleted_files(repo: GitRepo) -> None:
    assert apply_exactly("p", diff_of(repo, None, b"x\n"), lambda _path: None) == {"f.py": b"x\n"}
    assert apply_exactly("p", diff_of(repo, b"x\n", None), lambda _path: b"x\n") == {"f.py": None}
    with pytest.raises(PatchApplyError, match="exists already"):
        apply_exactly("p", diff_of(repo, None, b"x\n"), lambda _path: b"")
    with pytest.raises(PatchApplyError, match="no such file"):
        apply_exactly("p", diff_of(repo, b"x\n", b"y\n"), lambda _path: None)


def test_errors_name_patch_file_hunk_and_what_was_found(repo: GitRepo) -> None:
    old = b"".join(b"%d\n" % n for n in range(40))
    new = old.replace(b"30\n", b"thirty\n").replace(b"5\n", b"five\n", 1)
    diff = diff_of(repo, old, new)
    edited = old.replace(b"29\n", b"other\n")
    with pytest.raises(PatchApplyError, match=r"p: f\.py: hunk 2 .*line 30 should be '29', found 'other'"):
        apply_exactly("p", diff, lambda _path: edited)
    with pytest.raises(PatchApplyError, match="found the end of the file"):
        apply_exactly("p", diff, lambda _path: old[:-30])


def test_offset_is_refused_and_measured(repo: GitRepo) -> None:
    old = b"".join(b"%d\n" % n for n in range(40))
    diff = diff_of(repo, old, old.replace(b"20\n", b"twenty\n"))
    with pytest.raises(PatchApplyError, match=r"\+2 lines off"):
        apply_exactly("p", diff, lambda _path: b"new\nnew\n" + old)


def test_repeated_context_is_not_taken_at_the_nearest_place(repo: GitRepo) -> None:
    block = b"def f():\n    x = 1\n    return x\n\n\n"
    old = block * 5
    new = block * 2 + block.replace(b"1", b"2") + block * 2
    moved = b"# one more line\n" + old
    with pytest.raises(PatchApplyError, match="lines off"):
        apply_exactly("p", diff_of(repo, old, new), lambda _path: moved)


@pytest.mark.parametrize(
    "diff",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"just words\n", id="words"),
        pytest.param(b"--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n-a\n+b\n", id="hunk cut short"),
        pytest.param(b"diff --git a/f b/f\nindex 000..111 100644\nBinary files a/f and b/f differ\n", id="binary"),
    ],
)
def test_what_is_no_text_diff_is_refused(diff: bytes) -> None:
    with pytest.raises(PatchApplyError):
        apply_exactly("p", diff, lambda _path: b"a\nb\nc\n")


def test_touched_names_both_sides(repo: GitRepo, tmp_path: Path) -> None:
    assert touched("p", diff_of(repo, b"x\n", None, "gone.py")) == ["gone.py"]
