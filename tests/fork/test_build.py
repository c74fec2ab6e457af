from __future__ import annotations

import errno
import hashlib
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import warnings
import zipfile
import zlib
from pathlib import Path

import pytest
from installer.sources import WheelFile

from sglang_bw.errors import BadWheelError, HashMismatchError, OutputError, PatchApplyError
from sglang_bw.fork.build import BuiltWheel, build
from sglang_bw.fork.record import BwRecord, content_digest
from sglang_bw.fork.wheel import Member, parse_wheel, write_zip
from tests.fakeupstream import FILES, VERSION, FakeUpstream, wheel_bytes


def run(upstream: FakeUpstream, out: Path) -> BuiltWheel:
    return build(upstream.root, VERSION, wheel=upstream.wheel, out=out)


def members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_result_is_a_wheel_that_installer_accepts(upstream: FakeUpstream, tmp_path: Path) -> None:
    built = run(upstream, tmp_path / "dist")
    with WheelFile.open(built.path) as wheel:
        wheel.validate_record()
        assert (wheel.distribution, wheel.version) == ("sglang", built.version)
    names = list(members(built.path))
    assert names[-1].endswith("/RECORD")
    assert not [name for name in names if name.endswith("/") or "__pycache__" in name]


def test_only_what_must_differ_differs(upstream: FakeUpstream, tmp_path: Path) -> None:
    built = run(upstream, tmp_path / "dist")
    old, new = members(upstream.wheel), members(built.path)
    info, new_info = f"sglang-{VERSION}.dist-info", f"sglang-{built.version}.dist-info"
    moved = {path.replace(info, new_info): data for path, data in old.items() if not path.endswith("/")}
    added = set(new) - set(moved)
    changed = {path for path, data in moved.items() if path in new and new[path] != data}
    assert added == {
        "sglang/added.py",
        "sglang/_bw.json",
        f"{new_info}/licenses/NOTICE",
        f"{new_info}/sboms/sglang-bw.cdx.json",
    }
    assert set(moved) - set(new) == {"sglang/tool.sh"}
    assert changed == {
        "sglang/engine.py",
        "sglang/windows.py",
        "sglang/unended.py",
        "sglang/latin.cuh",
        "sglang/table.json",
        "sglang/_version.py",
        f"{new_info}/METADATA",
        f"{new_info}/RECORD",
    }


def test_changed_files_carry_a_notice_in_their_own_line_ends(upstream: FakeUpstream, tmp_path: Path) -> None:
    new = members(run(upstream, tmp_path / "dist").path)
    assert new["sglang/engine.py"].endswith(
        b"\n# Modified by the sglang-bw developers; the NOTICE in this distribution's metadata lists the changes.\n"
    )
    assert re.fullmatch(rb"first\r\n2nd\r\nthird\r\nfourth\r\n# Modified [^\r\n]+\r\n", new["sglang/windows.py"])
    assert new["sglang/unended.py"].startswith(b"one\n2\n# Modified")
    assert b"\n// Modified" in new["sglang/latin.cuh"]
    assert new["sglang/table.json"] == b'{"a": 2}\n'
    assert new["sglang/added.py"] == b"new = 1\n"
    notice = next(data for path, data in new.items() if path.endswith("/NOTICE")).decode()
    for path in ("sglang/engine.py", "sglang/table.json", "sglang/added.py", "sglang/tool.sh"):
        assert f"  {path}\n" in notice


def test_version_stands_in_name_metadata_and_module(upstream: FakeUpstream, tmp_path: Path) -> None:
    built = run(upstream, tmp_path / "dist")
    tree = upstream.series().pins.tree
    assert built.version == f"{VERSION}+bw.0.d{tree[:8]}"
    new = members(built.path)
    metadata = new[f"sglang-{built.version}.dist-info/METADATA"].decode()
    old = members(upstream.wheel)[f"sglang-{VERSION}.dist-info/METADATA"].decode()
    expected = old.replace(f"\nVersion: {VERSION}\nSummary", f"\nVersion: {built.version}\nSummary", 1)
    assert metadata == expected.replace("License-File: LICENSE\n", "License-File: LICENSE\nLicense-File: NOTICE\n")
    module: dict[str, object] = {}
    exec(new["sglang/_version.py"], module)
    assert module["__version__"] == built.version
    assert module["version_tuple"] == (1, 2, 3, f"bw.0.d{tree[:8]}")


def test_released_tree_gets_the_short_version_and_an_edit_loses_it(upstream: FakeUpstream, tmp_path: Path) -> None:
    upstream.pin(release=True)
    assert run(upstream, tmp_path / "a").version == f"{VERSION}+bw.1"
    upstream.pin(release=True)  # again: the same tree is the same release
    assert run(upstream, tmp_path / "b").version == f"{VERSION}+bw.1"
    upstream.add_patch("third", {"python/sglang/third.py": b"x = 3\n"})
    tree = upstream.pin().pins.tree
    assert run(upstream, tmp_path / "c").version == f"{VERSION}+bw.1.d{tree[:8]}"
    assert upstream.pin(release=True).pins.full_version == f"{VERSION}+bw.2"


def test_record_names_every_changed_file_with_its_final_hash(upstream: FakeUpstream, tmp_path: Path) -> None:
    built = run(upstream, tmp_path / "dist")
    new = members(built.path)
    record = BwRecord.model_validate_json(new["sglang/_bw.json"])
    assert record.version == built.version
    assert record.upstream.sha256 == hashlib.sha256(upstream.wheel.read_bytes()).hexdigest()
    assert [patch.file for patch in record.patches] == list(upstream.series().order)
    assert record.patches[0].upstream_status == "Pending"
    assert record.removed == ("sglang/tool.sh",)
    assert "sglang/_version.py" in record.files
    for path, digest in record.files.items():
        assert hashlib.sha256(new[path]).hexdigest() == digest


def test_sbom_names_the_ancestor_and_each_patch_and_nothing_random(upstream: FakeUpstream, tmp_path: Path) -> None:
    built = run(upstream, tmp_path / "dist")
    path = f"sglang-{built.version}.dist-info/sboms/sglang-bw.cdx.json"
    bom = json.loads(members(built.path)[path])
    component = bom["metadata"]["component"]
    assert component["purl"].startswith("pkg:pypi/sglang@1.2.3")
    assert component["pedigree"]["ancestors"][0]["hashes"][0]["content"] == next(iter(upstream.pins.wheels.values()))
    assert [patch["type"] for patch in component["pedigree"]["patches"]] == ["unofficial", "unofficial"]
    assert bom["metadata"]["timestamp"].startswith("2026-01-02T03:04:06")
    again = json.loads(members(run(upstream, tmp_path / "again").path)[path])
    assert bom == again


def test_same_input_gives_the_same_bytes_in_another_process(upstream: FakeUpstream, tmp_path: Path) -> None:
    here = run(upstream, tmp_path / "a")
    command = [sys.executable, "-m", "sglang_bw", "build", "--patches", str(upstream.root), "--wheel"]
    command += [str(upstream.wheel), "--out", str(tmp_path / "b"), "--json"]
    there = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert Path(there["wheel"]).read_bytes() == here.path.read_bytes()
    assert there["digest"] == here.digest


def test_files_packed_as_they_came_give_the_bytes_that_packing_gives(upstream: FakeUpstream, tmp_path: Path) -> None:
    date = (2026, 11, 29, 0, 0, 0)
    names = ["sglang/a.py", "sglang/\u00e4.py", "sglang/empty.py"]
    plain = [(name, Member(b"x = 1\n" * (9 * number), 0o755)) for number, name in reversed(list(enumerate(names)))]
    packed = write_zip(plain, date)
    raw = {}
    for name, member in plain:
        engine = zlib.compressobj(6, zlib.DEFLATED, -15)
        raw[name] = engine.compress(member.data) + engine.flush()
    again = [(name, Member(member.data, member.mode, raw[name])) for name, member in plain]
    assert write_zip(again, date) == packed
    built = run(upstream, tmp_path / "dist")
    wheel = parse_wheel(built.path, built.path.read_bytes(), version=built.version)
    held = [member for member in wheel.members.values() if member.deflated]
    assert held
    assert all(zlib.decompress(member.deflated, -15) == member.data for member in held)


def test_content_digest_does_not_depend_on_the_zip(upstream: FakeUpstream, tmp_path: Path) -> None:
    built = run(upstream, tmp_path / "dist")
    new = members(built.path)
    record = new[f"sglang-{built.version}.dist-info/RECORD"].decode().splitlines()
    assert content_digest(reversed(record)) == built.digest
    info = f"sglang-{built.version}.dist-info"
    installed = [*record, f"{info}/INSTALLER,sha256=abc,4", "../../../bin/sglang,sha256=abc,9", "sglang/x.pyc,,"]
    assert content_digest(installed) == built.digest
    assert content_digest([line for line in record if "engine.py" not in line]) != built.digest
    assert (tmp_path / "dist" / (built.path.name + ".digest")).read_text().strip() == built.digest


def test_index_quotes_the_plus_and_carries_the_hash(upstream: FakeUpstream, tmp_path: Path) -> None:
    built = run(upstream, tmp_path / "dist")
    page = (built.index / "sglang" / "index.html").read_text()
    digest = hashlib.sha256(built.path.read_bytes()).hexdigest()
    assert f'href="../../{built.path.name.replace("+", "%2B")}#sha256={digest}"' in page
    assert 'data-requires-python="&gt;=3.11"' in page
    assert '<a href="sglang/">' in (built.index / "index.html").read_text()


def test_files_outside_the_package_are_reported_not_packed(upstream: FakeUpstream, tmp_path: Path) -> None:
    assert run(upstream, tmp_path / "dist").left_out == ("test/test_engine.py",)


def test_wrong_hash_is_refused_before_anything_is_unpacked(
    upstream: FakeUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.wheel.write_bytes(wheel_bytes({**FILES, "sglang/evil.py": b"x\n"}))
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_a, **_k: pytest.fail("the wheel was opened"))
    with pytest.raises(HashMismatchError, match="pinned is"):
        run(upstream, tmp_path / "dist")


BAD_WHEELS = {
    "path traversal": wheel_bytes(FILES, extra={"../../evil.py": b"x"}),
    "absolute path": wheel_bytes(FILES, extra={"/etc/evil": b"x"}),
    "backslash": wheel_bytes(FILES, extra={"sglang\\..\\evil.py": b"x"}),
    "not in RECORD": wheel_bytes(FILES, extra={"sglang/evil.py": b"x"}),
    "truncated": wheel_bytes(FILES)[:-300],
    "no zip": b"<html>404</html>",
}


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in BAD_WHEELS.items()])
def test_bad_wheel_is_refused_even_when_its_hash_is_pinned(data: bytes, tmp_path: Path) -> None:
    upstream = FakeUpstream(tmp_path / "upstream")
    upstream.wheel.write_bytes(data)
    pins = upstream.base / "upstream.toml"
    digest = next(iter(upstream.pins.wheels.values()))
    pins.write_text(pins.read_text().replace(digest, hashlib.sha256(data).hexdigest()))
    with pytest.raises(BadWheelError):
        upstream.pin()


def test_symbolic_link_and_double_entry_are_refused(tmp_path: Path) -> None:
    path = tmp_path / f"sglang-{VERSION}-py3-none-any.whl"
    for make, what in ((_with_link, "symbolic link"), (_with_double, "comes twice")):
        path.write_bytes(wheel_bytes(FILES))
        make(path)
        with pytest.raises(BadWheelError, match=what):
            parse_wheel(path, path.read_bytes(), version=VERSION)


def _with_link(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        link = zipfile.ZipInfo("sglang/link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")


def _with_double(path: Path) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("sglang/engine.py", "other")


def test_wheel_of_another_release_is_refused(upstream: FakeUpstream, tmp_path: Path) -> None:
    other = tmp_path / "sglang-9.9.9-py3-none-any.whl"
    other.write_bytes(wheel_bytes(FILES, "9.9.9"))
    with pytest.raises(BadWheelError, match=r"not one of the wheels of SGLang 1\.2\.3"):
        build(upstream.root, VERSION, wheel=other, out=tmp_path / "dist")


def test_edited_series_is_refused_until_it_is_recorded(upstream: FakeUpstream, tmp_path: Path) -> None:
    upstream.add_patch("unpinned", {"python/sglang/extra.py": b"x = 1\n"})
    with pytest.raises(PatchApplyError, match=r"sglang/extra\.py.*not pinned"):
        run(upstream, tmp_path / "dist")
    assert list((tmp_path / "dist").iterdir()) == []


def test_full_disk_leaves_nothing_behind(
    upstream: FakeUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "dist"
    write = Path.write_bytes

    def until_full(path: Path, data: bytes) -> int:
        if path.parent.parent != out:
            return write(path, data)
        write(path, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", until_full)
    with pytest.raises(OutputError, match="No space left"):
        run(upstream, out)
    assert list(out.iterdir()) == []


def test_place_that_cannot_be_written_is_said(upstream: FakeUpstream, tmp_path: Path) -> None:
    in_the_way = tmp_path / "dist"
    in_the_way.write_text("a file")
    with pytest.raises(OutputError, match="cannot write to"):
        run(upstream, in_the_way)


def test_two_builds_at_once_give_one_good_wheel(upstream: FakeUpstream, tmp_path: Path) -> None:
    results: list[BuiltWheel] = []
    threads = [threading.Thread(target=lambda: results.append(run(upstream, tmp_path / "dist"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({built.digest for built in results}) == 1
    assert len(results) == 3
    left = sorted(path.name for path in (tmp_path / "dist").iterdir())
    assert left == sorted(["simple", results[0].path.name, results[0].path.name + ".digest"])


def test_killed_build_leaves_no_half_wheel(upstream: FakeUpstream, tmp_path: Path) -> None:
    out = tmp_path / "dist"
    script = (
        "import os, sys; from pathlib import Path; from sglang_bw.fork import build as b\n"
        "b.check_built = lambda *a: os.kill(os.getpid(), 9)\n"
        f"root, wheel, out = Path({str(upstream.root)!r}), Path({str(upstream.wheel)!r}), Path({str(out)!r})\n"
        f"b.build(root, {VERSION!r}, wheel=wheel, out=out)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert not list(out.glob("*.whl"))
    assert run(upstream, out).path.is_file()


def test_build_reads_nothing_of_the_users_git(
    upstream: FakeUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    hooks = home / "hooks"
    hooks.mkdir(parents=True)
    hook = hooks / "applypatch-msg"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    (home / ".gitconfig").write_text(
        f"[core]\n\tautocrlf = true\n\thooksPath = {hooks}\n[commit]\n\tgpgSign = true\n[user]\n\tsigningKey = none\n"
    )
    clean = run(upstream, tmp_path / "a").path.read_bytes()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.autocrlf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "input")
    assert run(upstream, tmp_path / "b").path.read_bytes() == clean


def test_build_works_below_another_repository(
    upstream: FakeUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    assert run(upstream, tmp_path / "dist").path.is_file()


def test_exec_bits_do_not_make_another_tree(upstream: FakeUpstream, tmp_path: Path) -> None:
    """Upstream's own wheels of one release differ in them."""
    plain = tmp_path / upstream.wheel.name
    with zipfile.ZipFile(upstream.wheel) as source, zipfile.ZipFile(plain, "w") as target:
        for info in source.infolist():
            info.external_attr = 0o100775 << 16 if info.filename.endswith("engine.py") else info.external_attr
            target.writestr(info, source.read(info))
    tree = upstream.series().pins.tree
    _repin(upstream, plain.read_bytes())
    assert upstream.pin().pins.tree == tree


def _repin(upstream: FakeUpstream, data: bytes) -> None:
    pins = upstream.base / "upstream.toml"
    old = next(iter(upstream.pins.wheels.values()))
    pins.write_text(pins.read_text().replace(old, hashlib.sha256(data).hexdigest()))
    upstream.wheel.write_bytes(data)


@pytest.mark.parametrize("seed", range(12))
def test_raw_damage_inside_a_wheel_is_one_clear_error(seed: int, tmp_path: Path) -> None:
    path = tmp_path / f"sglang-{VERSION}-py3-none-any.whl"
    data = bytearray(wheel_bytes({**FILES, "sglang/big.py": bytes(random.Random(1).choices(range(32, 120), k=60_000))}))
    place = random.Random(seed).randrange(200, len(data) - 4000)
    data[place : place + 64] = random.Random(seed + 99).randbytes(64)
    path.write_bytes(data)
    with pytest.raises(BadWheelError):
        parse_wheel(path, bytes(data), version=VERSION)
