from __future__ import annotations

from pathlib import Path

import pytest

from sglang_bw.errors import LintError, OutputError, UnknownBaseError
from sglang_bw.fork import series as series_module
from sglang_bw.fork.lint import lint, require_clean
from sglang_bw.fork.mail import STATUS_FORM, read_patch
from sglang_bw.fork.series import Series, bases, newest_base, patches_root
from tests.conftest import PATCHES
from tests.fakeupstream import VERSION, FakeUpstream


@pytest.mark.parametrize("base", bases(PATCHES))
def test_shipped_series_is_clean(base: str) -> None:
    assert lint(Series.load(PATCHES, base)) == []


def test_good_series_has_no_findings(upstream: FakeUpstream) -> None:
    assert lint(upstream.series()) == []


def test_mail_is_read_as_git_wrote_it(upstream: FakeUpstream) -> None:
    long = "Bug: https://github.com/sgl-project/sglang/issues/1"
    path = upstream.add_patch(
        "a-long-topic-that-makes-git-fold-the-subject-line-because-it-is-longer-than-a-mail-header-should-be",
        {"python/sglang/x.py": "# größer\n".encode()},
        {"Bug": long.removeprefix("Bug: "), "Why": "Größer: with a colon, and more words"},
    )
    patch = read_patch(path)
    assert patch.subject.endswith("longer than a mail header should be")
    assert patch.trailer("Why") == "Größer: with a colon, and more words"
    assert patch.all("Bug") == [long.removeprefix("Bug: ")]


@pytest.mark.parametrize(
    ("trailers", "finding"),
    [
        ({"Upstream-Status": "Maybe"}, "Upstream-Status 'Maybe'"),
        ({"Upstream-Status": "Submitted"}, "Upstream-Status 'Submitted'"),
        ({"Upstream-Status": "Backport [https://x.y/1]"}, "Upstream-Status 'Backport"),
        ({"Upstream-Status": "Inappropriate"}, "Upstream-Status 'Inappropriate'"),
        ({"Upstream-Status": ""}, "trailer Upstream-Status is missing"),
        ({"Why": ""}, "trailer Why is missing"),
        ({"Removal": ""}, "trailer Removal is missing"),
        ({"Test": ""}, "trailer Test is missing"),
        ({"Bug": "none"}, "Bug 'none'"),
        ({"Bug": "#123"}, "Bug '#123'"),
        ({"Applies-To": "==9.9.9"}, "leaves out 1.2.3"),
        ({"Applies-To": "newer"}, "is no version range"),
        ({"Verified-On": "cpu, my rig!"}, "Verified-On 'my rig!'"),
    ],
)
def test_each_bad_trailer_is_found(trailers: dict[str, str], finding: str, tmp_path: Path) -> None:
    upstream = FakeUpstream(tmp_path)
    upstream.add_patch("bad", {"python/sglang/x.py": b"x = 1\n"}, trailers)
    upstream.pin()
    findings = lint(upstream.series())
    assert len(findings) == 1
    assert finding in findings[0]


@pytest.mark.parametrize(
    "status",
    [
        "Pending",
        "Submitted [https://github.com/o/r/pull/1]",
        "Backport [https://github.com/o/r/pull/1, in 0.5.24]",
        "Denied [https://github.com/o/r/pull/1]",
        "Inappropriate [only for this distribution]",
    ],
)
def test_every_status_word_is_accepted(status: str) -> None:
    assert STATUS_FORM.fullmatch(status)


def test_all_findings_come_at_once(upstream: FakeUpstream) -> None:
    order = upstream.base / "series"
    first = order.read_text().split()[0]
    order.write_text(f"{first}\n{first}\n0009-missing.patch\nBad_Name.patch\n")
    text = "\n".join(lint(upstream.series()))
    for finding in (
        f"{first} is listed 2 times",
        "0009-missing.patch is listed, but there is no such file",
        "0002-odd-files.patch is on disk, but not listed",
        "Bad_Name.patch: a name is NNNN-topic.patch",
    ):
        assert finding in text
    with pytest.raises(LintError) as caught:
        require_clean(upstream.series())
    assert len(caught.value.findings) >= 4


def test_order_of_numbers_is_the_order_of_the_list(upstream: FakeUpstream) -> None:
    order = upstream.base / "series"
    order.write_text("\n".join(reversed(order.read_text().split())))
    assert any("not in the order" in finding for finding in lint(upstream.series()))


def test_trailing_blanks_and_foreign_files_are_found(tmp_path: Path) -> None:
    upstream = FakeUpstream(tmp_path)
    (upstream.repo.path / "docs").mkdir()
    (upstream.repo.path / "docs" / "a.md").write_text("a\n")
    upstream.repo.commit_all("upstream has docs")
    upstream.add_patch("blanks", {"python/sglang/x.py": b"x = 1 \n", "docs/a.md": b"b\n"})
    text = "\n".join(lint(upstream.series()))
    assert "python/sglang/x.py:1: trailing blanks" in text
    assert "docs/a.md: the wheel does not hold this file" in text


def test_crlf_is_no_trailing_blank(upstream: FakeUpstream) -> None:
    assert not [finding for finding in lint(upstream.series()) if "windows.py" in finding]


@pytest.mark.parametrize("data", [b"", b"no mail at all\n", b"\x00\xff", b"From x\nSubject: y\n\nbody\n"])
def test_what_is_no_patch_mail_is_a_finding_not_a_crash(data: bytes, upstream: FakeUpstream) -> None:
    (upstream.base / "0001-better-engine.patch").write_bytes(data)
    assert [finding for finding in lint(upstream.series()) if finding.startswith("0001-better-engine.patch")]


def test_pins_of_another_version_and_broken_toml(upstream: FakeUpstream) -> None:
    pins = upstream.base / "upstream.toml"
    good = pins.read_text()
    pins.write_text(good.replace(f'version = "{VERSION}"', 'version = "1.0"'))
    with pytest.raises(LintError, match=r"pins SGLang 1\.0"):
        upstream.series()
    pins.write_text("version = ")
    with pytest.raises(LintError, match=r"upstream\.toml"):
        upstream.series()


def test_unknown_base_names_the_known_ones(upstream: FakeUpstream) -> None:
    with pytest.raises(UnknownBaseError, match=r"no patch series for SGLang 0\.0\.1") as caught:
        Series.load(upstream.root, "0.0.1")
    assert VERSION in caught.value.hint


def test_bases_sort_as_versions_do(tmp_path: Path) -> None:
    for version in ("0.5.9", "0.5.23", "0.5.10.post1", "notes"):
        (tmp_path / version).mkdir()
        if version != "notes":
            (tmp_path / version / "upstream.toml").write_text("")
    assert bases(tmp_path) == ["0.5.9", "0.5.10.post1", "0.5.23"]
    assert newest_base(tmp_path) == "0.5.23"


def test_named_directory_wins_and_must_exist(tmp_path: Path) -> None:
    assert patches_root(tmp_path) == tmp_path
    with pytest.raises(UnknownBaseError):
        patches_root(tmp_path / "nowhere")


def test_copy_inside_the_installed_tool_is_never_written(
    upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (upstream.base / "upstream.toml").read_bytes()
    monkeypatch.setattr(series_module, "_PACKAGE_DIR", upstream.root.parent.resolve())
    with pytest.raises(OutputError, match="inside the installed tool"):
        upstream.pin(release=True)
    assert (upstream.base / "upstream.toml").read_bytes() == before


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        (b"\n\nWhat hurts", b"\n\n\nWhat hurts", "is a second blank line"),
        (b"\n---\n", b"\n\n---\n", "a blank line before ---"),
        (b"\n---\n", b"\n---\n\n", "the summary and one blank line"),
        (b"\n\ndiff --git", b"\ndiff --git", "the summary and one blank line"),
        (b"\n\ndiff --git", b"\n\n\ndiff --git", "the summary and one blank line"),
        (b"\n line 19\n", b"\n\n line 19\n", "is empty: a line of a hunk begins with a sign"),
        (b"\n line 23\n", b"\n line 23\n\n", "is empty: a line of a hunk begins with a sign"),
    ],
)
def test_blank_lines_are_those_of_an_export(old: bytes, new: bytes, finding: str, upstream: FakeUpstream) -> None:
    path = upstream.series().files[0]
    assert lint(upstream.series()) == []
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    text = "\n".join(lint(upstream.series()))
    assert f"{path.name}: not as exported: " in text
    assert finding in text
