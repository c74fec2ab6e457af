"""A user's own patches on top of ours: the build, the record, and what is refused."""

from __future__ import annotations

import json
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_bw.errors import LocalSeriesError, OutputError, PatchApplyError
from sglang_bw.fork.build import BuiltWheel, build
from sglang_bw.fork.local import LocalSeries, lint, load_for, local_version
from sglang_bw.fork.record import BwRecord
from sglang_bw.fork.series import Pins, Release
from sglang_bw.fork.verify import State, inspect
from tests.fakeupstream import VERSION, FakeUpstream
from tests.fork.ownpatches import WHY, own_patch, own_series
from tests.fork.test_cli_fork import bw


@pytest.fixture
def own(upstream: FakeUpstream, tmp_path: Path) -> Path:
    return own_series(upstream, tmp_path / "own")


def run(upstream: FakeUpstream, own: Path | None, out: Path) -> BuiltWheel:
    return build(upstream.root, VERSION, wheel=upstream.wheel, local=own, out=out)


def member(built: BuiltWheel, suffix: str) -> bytes:
    with zipfile.ZipFile(built.path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith(suffix)))


def record(built: BuiltWheel) -> BwRecord:
    return BwRecord.model_validate_json(member(built, "sglang/_bw.json"))


def test_version_names_the_resulting_tree(upstream: FakeUpstream, own: Path, tmp_path: Path) -> None:
    built = run(upstream, own, tmp_path / "a")
    tree = record(built).tree
    assert built.version == f"{VERSION}+bw.0.local.{tree[:8]}"
    upstream_before = upstream.series().pins
    upstream.pin(release=True)
    assert run(upstream, own, tmp_path / "b").version == f"{VERSION}+bw.1.local.{tree[:8]}"
    assert upstream.series().pins.tree == upstream_before.tree  # ours is what it was


def test_digits_alone_are_a_number_in_a_version() -> None:
    pins = Pins(version="1.2.3", wheels={}, release=Release(4, "f" * 40))
    assert local_version(pins, "00123456" + "a" * 32) == "bw.4.local.123456"
    assert local_version(pins, "0012345f" + "a" * 32) == "bw.4.local.0012345f"


def test_wheel_holds_both_series_and_says_which_is_whose(upstream: FakeUpstream, own: Path, tmp_path: Path) -> None:
    built = run(upstream, own, tmp_path / "dist")
    said = record(built)
    assert [patch.file for patch in said.patches] == list(upstream.series().order)
    assert said.local is not None
    assert [(patch.file, patch.why) for patch in said.local.patches] == [
        ("0001-faster.patch", WHY),
        ("0002-table.patch", WHY),
    ]
    assert said.local.series_tree == upstream.series().pins.tree != said.tree
    engine = member(built, "sglang/engine.py")
    assert b"line twenty\nline 21!\n" in engine
    assert engine.endswith(
        b"# Modified by the builder of this wheel; the NOTICE in this distribution's metadata lists the changes.\n"
    )
    assert b"Modified by the sglang-bw developers" in member(built, "sglang/windows.py")
    notice = member(built, "/NOTICE").decode()
    ours, own_part = notice.split("Local patches of the builder of this wheel")
    assert "0002-odd-files.patch" in ours
    assert "0001-faster.patch: Faster" in own_part
    assert "series\nbw.0.d" in notice  # the project's own id, without the local part
    bom = json.loads(member(built, "sglang-bw.cdx.json"))
    pedigree = bom["metadata"]["component"]["pedigree"]
    listed = {patch["resolves"][0]["id"] for patch in pedigree["patches"]}
    assert listed == {*upstream.series().order, "0001-faster.patch", "0002-table.patch"}
    assert "local patches of the builder: 0001-faster.patch, 0002-table.patch" in pedigree["notes"]


def test_wheel_without_local_patches_says_nothing_of_them(upstream: FakeUpstream, tmp_path: Path) -> None:
    built = run(upstream, None, tmp_path / "dist")
    assert b"local" not in member(built, "sglang/_bw.json").replace(built.version.encode(), b"")


def test_same_bytes_on_every_day(upstream: FakeUpstream, own: Path, tmp_path: Path) -> None:
    first, second = run(upstream, own, tmp_path / "a"), run(upstream, own, tmp_path / "b")
    assert first.path.read_bytes() == second.path.read_bytes()


def test_verify_tells_local_patches_and_finds_an_edit(upstream: FakeUpstream, own: Path, tmp_path: Path) -> None:
    built = run(upstream, own, tmp_path / "dist")
    tree = tmp_path / "tree"
    with zipfile.ZipFile(built.path) as archive:
        archive.extractall(tree)
    found = inspect(tree=tree)
    assert (found.state, found.version) == (State.INTACT, built.version)
    assert [patch["file"] for patch in found.as_json()["local_patches"]] == ["0001-faster.patch", "0002-table.patch"]
    said = bw("verify", "--tree", tree)
    assert said.returncode == 0
    assert [line.split()[0] for line in said.stdout.splitlines() if "local: no part" in line] == [
        "0001-faster.patch",
        "0002-table.patch",
    ]
    (tree / "sglang/ours.py").write_text("ours = 2\n")
    assert inspect(tree=tree).problems == (("edited", "sglang/ours.py"),)


def test_patch_that_does_not_fit_is_told_as_yours(upstream: FakeUpstream, own: Path, tmp_path: Path) -> None:
    path = own / "0001-faster.patch"
    path.write_bytes(path.read_bytes().replace(b"-line 21\n", b"-line 2l\n"))
    with pytest.raises(PatchApplyError, match=r"local series .*/own: 0001-faster\.patch: .*line 21") as caught:
        run(upstream, own, tmp_path / "dist")
    assert f"rebase {VERSION} --local" in caught.value.hint
    assert not list((tmp_path / "dist").glob("*.whl"))


def test_little_is_asked_of_a_local_patch(upstream: FakeUpstream, tmp_path: Path) -> None:
    own_patch(upstream, tmp_path / "own", "blanks", {"python/sglang/x.py": b"x = 1 \n"})
    assert lint(LocalSeries.load(tmp_path / "own"), VERSION) == []


@pytest.mark.parametrize(
    ("message", "edits", "finding"),
    [
        ("No reason.", {"python/sglang/x.py": b"x\n"}, "trailer Why is missing"),
        ("Why: TODO say it", {"python/sglang/x.py": b"x\n"}, "Why is still to be filled in"),
        ("Why: a\nUpstream-Status: Maybe", {"python/sglang/x.py": b"x\n"}, "Upstream-Status 'Maybe'"),
        ("Why: a\nApplies-To: ==9", {"python/sglang/x.py": b"x\n"}, f"leaves out {VERSION}"),
        ("Why: a", {"sglang/x.py": b"x\n"}, "in upstream's tree the package is python/sglang/"),
    ],
)
def test_what_is_wrong_in_a_local_patch(
    message: str, edits: dict[str, bytes | None], finding: str, upstream: FakeUpstream, tmp_path: Path
) -> None:
    own_patch(upstream, tmp_path / "own", "bad", edits, message)
    findings = lint(LocalSeries.load(tmp_path / "own"), VERSION)
    assert len(findings) == 1
    assert finding in findings[0]
    with pytest.raises(LocalSeriesError, match="the local series has 1 finding"):
        load_for(tmp_path / "own", upstream.series())


@pytest.mark.parametrize(
    ("spoil", "finding"),
    [
        (lambda raw: raw.replace(b"\n", b"\r\n"), "its lines end in CRLF"),
        (lambda raw: b"\xef\xbb\xbf" + raw, "begins with a byte order mark"),
        (lambda raw: raw[:-3], "its last line has no end"),
    ],
)
def test_what_others_do_to_a_file_is_told(spoil: Callable[[bytes], bytes], finding: str, own: Path) -> None:
    assert lint(LocalSeries.load(own), VERSION) == []
    path = own / "0001-faster.patch"
    path.write_bytes(spoil(path.read_bytes()))
    findings = lint(LocalSeries.load(own), VERSION)
    assert any(text.startswith("0001-faster.patch: ") and finding in text for text in findings), findings
    # The cure that is named is one.
    if "CRLF" in finding:
        subprocess.run(["sed", "-i", r"s/\r$//", path], check=True)
        assert lint(LocalSeries.load(own), VERSION) == []


def test_what_is_listed_is_a_file_of_its_own(own: Path, tmp_path: Path) -> None:
    path = own / "0001-faster.patch"
    for target in (path.rename(tmp_path / "elsewhere.patch"), tmp_path / "nowhere", path):
        path.symlink_to(target)
        findings = lint(LocalSeries.load(own), VERSION)
        assert [text for text in findings if "0001-faster.patch is a symbolic link" in text]
        path.unlink()
    path.mkdir()
    assert lint(LocalSeries.load(own), VERSION) == ["0001-faster.patch is no file"]


def test_order_file_may_begin_with_a_byte_order_mark(own: Path) -> None:
    order = (own / "series").read_bytes()
    (own / "series").write_bytes(b"\xef\xbb\xbf" + order)
    assert lint(LocalSeries.load(own), VERSION) == []


def test_file_in_place_of_the_folder_is_refused_before_a_tree_is_opened(upstream: FakeUpstream, own: Path) -> None:
    at = ("--patches", upstream.root, "--local", own / "series")
    done = bw("patches", "new", "topic", "--wheel", upstream.wheel, *at)
    assert done.returncode == OutputError.exit_code, done.stderr
    assert "series is no folder" in done.stderr


def test_folder_that_is_no_local_series(tmp_path: Path) -> None:
    for make, said in (
        (lambda: None, "is no folder"),
        (lambda: (tmp_path / "own").mkdir(), "has no file named series"),
        (lambda: (tmp_path / "own/series").write_text("# nothing\n"), "lists no patch"),
        (lambda: (tmp_path / "own/series").write_bytes(b"\xff\xfe"), "codec can't decode"),
    ):
        make()
        with pytest.raises(LocalSeriesError, match=said):
            LocalSeries.load(tmp_path / "own")


def test_commands(upstream: FakeUpstream, own: Path, tmp_path: Path) -> None:
    at = ("--patches", upstream.root, "--local", own)
    listed = bw("patches", "list", *at, "--json")
    assert listed.returncode == 0, listed.stderr
    rows = json.loads(listed.stdout)
    assert [row["file"] for row in rows["local_patches"]] == ["0001-faster.patch", "0002-table.patch"]
    assert f"local patches on top, from {own}" in bw("patches", "list", *at).stdout
    assert "+line 21!" in bw("patches", "show", "faster", *at).stdout
    assert bw("patches", "lint", *at).returncode == 0
    planned = bw("build", *at, "--wheel", upstream.wheel, "--dry-run", "--json", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    dry = json.loads(planned.stdout)
    assert dry["patches"][-2:] == ["0001-faster.patch", "0002-table.patch"]
    assert "+bw.0.local.<tree>-" in dry["wheel"]
    done = bw("build", *at, "--wheel", upstream.wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "(4 patches)" in done.stdout
    (own / "0002-table.patch").unlink()
    for command in (("patches", "list"), ("patches", "list", "--json")):
        assert bw(*command, *at, cwd=tmp_path).returncode == LocalSeriesError.exit_code
    for command in (("patches", "lint"), ("build", "--wheel", upstream.wheel)):
        done = bw(*command, *at, cwd=tmp_path)
        assert done.returncode == LocalSeriesError.exit_code
        assert "0002-table.patch is listed, but there is no such file" in done.stderr
