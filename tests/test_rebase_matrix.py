"""The judge of other tools' results, the page, and a few cells of docs/rebase-matrix.json made anew."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from scripts import matrix_page, rebase_matrix, rivals
from scripts.rivals import Given, Verdict
from sglang_bw.errors import DownloadError
from sglang_bw.fork import releases
from sglang_bw.fork.mail import Patch
from sglang_bw.fork.series import Pins

FILE = "python/sglang/runner.py"
BLOCK = b"def f%d():\n    first()\n    second()\n    return 1\n\n\n"
OLD = b"".join(BLOCK % number for number in range(4))
PATCHED = OLD.replace(BLOCK % 2, BLOCK.replace(b"second()", b"second(2)") % 2)
# Two functions more above: the nearest equal block is that of another function.
NEW = b"def g():\n" + b"    pass\n" * 10 + b"\n\n" + OLD


def given(
    folder: Path, new: bytes = NEW, right: bytes | None = None, *, merged: bool = False, doubt: str = ""
) -> Given:
    for name, data in (("a", OLD), ("b", PATCHED)):
        (folder / name / FILE).parent.mkdir(parents=True)
        (folder / name / FILE).write_bytes(data)
    done = subprocess.run(
        ["git", "diff", "--no-index", "--no-prefix", "-U1", "a", "b"], cwd=folder, capture_output=True, check=False
    )
    path = folder / "0001-case.patch"
    path.write_bytes(done.stdout)
    patch = Patch(path=path, subject="", body="", trailers=(), diff=done.stdout, sha256="")
    moved = {FILE: right} if right is not None else None
    return Given(patch, {FILE: OLD}, {FILE: PATCHED}, {FILE: new}, moved, merged, doubt)


def test_a_hunk_in_the_wrong_function_is_no_success(tmp_path: Path) -> None:
    right = NEW.replace(BLOCK % 2, BLOCK.replace(b"second()", b"second(2)") % 2)
    result = rivals.in_folder("patch", given(tmp_path, right=right))
    assert (result.verdict, result.says) == (Verdict.WRONG_PLACE, f"the patch leaves {result.says.split()[3]} alone")
    assert rivals.judge(given(tmp_path / "again", right=right), {FILE: right})[0] is Verdict.RIGHT


def test_git_apply_in_a_checkout_does_nothing_and_says_success(tmp_path: Path) -> None:
    assert rivals.in_folder("git apply in a checkout", given(tmp_path, new=OLD)).verdict is Verdict.NOTHING
    assert rivals.in_folder("git apply", given(tmp_path / "again", new=OLD, right=PATCHED)).verdict is Verdict.RIGHT


@pytest.mark.parametrize(
    ("made", "options", "verdict"),
    [
        (PATCHED, {"new": OLD}, Verdict.RIGHT),
        (PATCHED, {"new": OLD, "merged": True}, Verdict.TWICE),
        (PATCHED + b"def f2(): pass\n", {"new": OLD}, Verdict.TWICE),
        (PATCHED + b"def f9(:\n", {"new": OLD}, Verdict.BROKEN),
        (PATCHED, {"new": OLD, "doubt": "uses second, which SGLang 1 does not have"}, Verdict.BROKEN),
        (PATCHED.replace(b"return 1", b"return 1  # one"), {"new": OLD, "right": PATCHED}, Verdict.RIGHT),
        (
            PATCHED.replace(b"def f2():\n", b"def f2():\n    zeroth()\n"),
            {"new": OLD.replace(b"def f2():\n", b"def f2():\n    zeroth()\n")},
            Verdict.UNPROVED,
        ),
    ],
)
def test_verdict(made: bytes, options: dict[str, Any], verdict: Verdict, tmp_path: Path) -> None:
    assert rivals.judge(given(tmp_path, **options), {FILE: made})[0] is verdict


def data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(rebase_matrix.DATA.read_text())
    return found


def test_every_release_has_every_patch() -> None:
    for by_release in data()["bases"].values():
        assert len(by_release) == 19
        [names] = {tuple(cell["patch"] for cell in cells) for cells in by_release.values()}
        assert list(names) == sorted(names)


def test_page_is_made_from_the_data() -> None:
    text = rebase_matrix.PAGE.read_text()
    assert matrix_page.page(data(), text) == text, "run `python -m scripts.rebase_matrix --page`"


def test_what_the_series_of_0_5_9_is_on_its_own_release() -> None:
    assert {cell["word"] for cell in data()["bases"]["0.5.9"]["0.5.9"]} == {"clean"}
    assert {cell["word"] for cell in data()["bases"]["0.5.23"]["0.5.23"]} == {"clean"}


@pytest.mark.slow
@pytest.mark.parametrize(("base", "release"), [("0.5.9", "0.5.10"), ("0.5.9", "0.5.14"), ("0.5.23", "0.5.22")])
def test_cells_come_out_again(base: str, release: str, tmp_path: Path) -> None:
    try:
        found: list[Pins] = rebase_matrix.between(releases.listed())
        [pins] = [one for one in found if Version(one.version) == Version(release)]
        cells = rebase_matrix.cells(base, pins, tmp_path)
    except DownloadError as error:
        pytest.skip(f"the wheels of {base} and {release} cannot be had: {error.message}")
    # A series may have grown since; then its newest patches are not in the data.
    known = {cell["patch"]: _timeless(cell) for cell in data()["bases"][base][release]}
    again = {cell["patch"]: _timeless(cell) for cell in cells}
    assert {patch: again[patch] for patch in known} == known


def _timeless(cell: dict[str, Any]) -> dict[str, Any]:
    others = {name: one["verdict"] for name, one in cell["others"].items()}
    return {**cell, "seconds": 0, "others": others}
