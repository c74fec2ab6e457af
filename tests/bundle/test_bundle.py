"""What goes into a bundle, what is refused, and that it is the same on every day."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import warnings
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from installer.sources import WheelFile
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sglang_bw
from sglang_bw.bundle import make, members, plan, toolwheel, wheels
from sglang_bw.bundle.archive import SMALLEST_PART, Member, parse_size, write
from sglang_bw.bundle.make import STAGE, Bundle, choose
from sglang_bw.bundle.manifest import Manifest, read_parts, read_sums
from sglang_bw.bundle.reader import verify
from sglang_bw.errors import BundleDamagedError, BundleDigestError, BundleError, BundleUnsafeError, BwError, OutputError
from sglang_bw.fork import locks
from sglang_bw.fork.locks import Locked
from sglang_bw.fork.wheel import entry_problems
from sglang_bw.models import TINY_DRAFT
from sglang_bw.recipes import lookup
from tests.bundle.conftest import Release
from tests.conftest import CHECKOUT, PATCHES
from tests.fork.target import PYTHON, Quiet


def content(bundle: Bundle) -> bytes:
    return b"".join((bundle.folder / part.file).read_bytes() for part in bundle.parts)


# --- what is in it


@pytest.mark.environments
def test_same_bytes_on_every_day_and_nothing_is_fetched_twice(
    release: Release, in_parts: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed run has left is taken, and however the archive is cut, it is the same."""
    stage = tmp_path / "out" / STAGE
    stage.mkdir(parents=True)
    for wheel in release.engine.mirror.glob("*.whl"):
        shutil.copy(wheel, stage)
    run = wheels.Pip.run

    def no_download(pip: wheels.Pip, verb: str, *rest: str) -> None:
        assert verb != "download"
        run(pip, verb, *rest)

    monkeypatch.setattr(wheels.Pip, "run", no_download)
    whole = release.make(tmp_path / "out")
    assert (whole.digest, content(whole)) == (in_parts.digest, content(in_parts))
    assert [len(bundle.parts) > 1 for bundle in (whole, in_parts)] == [False, True]
    assert {part.size for part in in_parts.parts[:-1]} == {SMALLEST_PART * 4}
    assert not stage.exists()


@pytest.mark.environments
def test_the_tree_is_that_of_the_engine_in_it(release: Release, tmp_path: Path) -> None:
    """A wheel that is named may be of an older series, or of local patches."""
    planned = release.plan()
    pins = dataclasses.replace(planned.series.pins, tree="0" * 40)
    other = dataclasses.replace(planned, series=dataclasses.replace(planned.series, pins=pins))
    with release.alone():
        made = make.make(other, choose(other, Quiet()), tmp_path / "out", None, Quiet())
    assert made.manifest.tree == planned.series.pins.tree


def test_wheels_are_the_locked_ones(release: Release, in_parts: Bundle) -> None:
    manifest = in_parts.manifest
    by_name = {wheel.name: wheel for wheel in manifest.wheels}
    assert set(by_name) == {"pip", "tinydep", "other-dep", "sglang", "sglang-bw"}
    for wheel in (by_name["tinydep"], by_name["other-dep"]):
        assert wheel.sha256 == hashlib.sha256((release.engine.mirror / wheel.file).read_bytes()).hexdigest()
    assert [by_name[name].used_by for name in ("tinydep", "pip")] == [("engine",), ("tool",)]
    lines = manifest.requirements().splitlines()
    assert [line.partition("==")[0] for line in lines] == ["pip", "other-dep", "tinydep", "sglang", "sglang-bw"]
    assert Manifest.model_validate_json((in_parts.folder / "bundle.json").read_text()) == manifest


def test_bill_of_materials_names_every_wheel(in_parts: Bundle) -> None:
    with tarfile.open(fileobj=io.BytesIO(content(in_parts))) as archive:
        bill = json.load(archive.extractfile(f"{in_parts.manifest.name}/sbom.cdx.json"))  # type: ignore[arg-type]
    found = {part["name"]: part["hashes"][0]["content"] for part in bill["components"]}
    assert found == {wheel.name: wheel.sha256 for wheel in in_parts.manifest.wheels}


@pytest.mark.parametrize(
    ("without", "says"),
    [
        pytest.param("absent", "no locked package", id="unknown"),
        pytest.param("p?p", "the tool itself needs pip", id="needed"),
    ],
)
def test_names_that_cannot_be_left_out(release: Release, without: str, says: str) -> None:
    with pytest.raises(BundleError, match=says):
        release.plan(without=(without,))


def test_the_list_of_packages_is_named_as_it_can_be_asked_for(release: Release) -> None:
    with pytest.raises(BundleError) as caught:
        release.plan(without=("absent",))
    assert "bundle --device cpu --dry-run --json" in str(caught.value.hint)


@pytest.mark.environments
def test_packages_without_a_wheel_are_all_named(release: Release) -> None:
    planned = release.plan()
    absent = tuple(Locked(name, "1.0", ("0" * 64,)) for name in ("absent", "other-absent"))
    with pytest.raises(BundleError, match=r"absent==1\.0, other-absent==1\.0"), release.alone():
        choose(dataclasses.replace(planned, packages=(absent[0], *planned.packages, absent[1])), Quiet())


@pytest.mark.environments
def test_recipe_and_draft_travel_and_what_stays_is_written_down(release: Release, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "id: mine\ntitle: Mine\ntarget: {id: owner/target, revision: main}\n"
        f"draft: {{path: {TINY_DRAFT}, kind: mha}}\nspec: {{algorithm: EAGLE3, steps: 3, topk: 1, draft_tokens: 4}}\n"
    )
    made = release.make(tmp_path / "out", recipes=(str(recipe), "tiny"), models=(TINY_DRAFT,), without=("Other_*",))
    assert [package.name for package in made.manifest.left_out] == ["other-dep"]
    assert "left_out other-dep\n" in (made.folder / "TARGET").read_text()
    assert "other-dep" not in (made.folder / "requirements.txt").read_text()
    with tarfile.open(fileobj=io.BytesIO(content(made))) as archive:
        archive.extractall(tmp_path / "there", filter="data")
    there = tmp_path / "there" / made.manifest.name
    moved = lookup.find(str(there / "recipes/mine.yaml"))
    assert moved.draft is not None
    assert moved.draft.path is not None
    assert moved.draft.path.resolve() == (there / "models" / TINY_DRAFT.name).resolve()
    for path in TINY_DRAFT.iterdir():
        assert (there / "models" / TINY_DRAFT.name / path.name).read_bytes() == path.read_bytes()
    planned = release.plan(recipes=(str(recipe),))
    assert any("owner/target is not in the bundle" in note for note in planned.notes)
    assert any(f"the host needs {TINY_DRAFT}" in note for note in planned.notes)


def test_folder_that_is_no_model(release: Release, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"no config\.json"):
        release.plan(models=(tmp_path,))


def test_model_with_a_link_to_nothing(release: Release, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "absent")
    with pytest.raises(BundleError, match=r"model\.safetensors is a link"):
        release.plan(models=(tmp_path,))


def test_wheel_of_another_base(release: Release) -> None:
    with pytest.raises(BundleError, match=r"is of SGLang 1\.2\.3, --base says 0\.5\.9"):
        release.plan(base="0.5.9")


def test_no_room_or_no_folder(release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out before anything is fetched; what is fetched stays."""
    chosen = (wheels.Chosen("large", "1", "file:///large-1-py3-none-any.whl", "0" * 64, size=4 * 10**9),)
    monkeypatch.setattr(wheels, "fetch", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: argparse.Namespace(free=8 * 10**9))
    with pytest.raises(OutputError, match=r"takes 9\.1 GB .* has 8\.0 GB"):
        make.make(release.plan(), chosen, tmp_path / "out", None, Quiet())
    assert (tmp_path / "out" / STAGE).is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"):
        make.make(release.plan(), chosen, tmp_path / "file", None, Quiet())


# --- the tool in it


def test_tool_wheel_is_whole_and_always_the_same(tmp_path: Path) -> None:
    made = [toolwheel.tool_wheel(_folder(tmp_path / name)) for name in ("one", "two")]
    assert made[0].read_bytes() == made[1].read_bytes()
    with WheelFile.open(made[0]) as wheel:
        wheel.validate_record()
    with zipfile.ZipFile(made[0]) as archive:
        names = set(archive.namelist())
    package = Path(sglang_bw.__file__).parent
    code = {f"sglang_bw/{path.relative_to(package).as_posix()}" for path in package.rglob("*.py")}
    assert code <= names
    assert {"sglang_bw/bundle/install.sh", "sglang_bw/patches/0.5.23/series"} <= names
    assert not [name for name in names if "__pycache__" in name or "/." in name]


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize(
    "lock", sorted(PATCHES.glob("*/locks/*-*-*.txt")), ids=lambda path: f"{path.parts[-3]}-{path.stem}"
)
def test_tool_fits_beside_every_lock(lock: Path) -> None:
    device, python, machine = lock.stem.split("-")
    packages = locks.parse(lock)
    found = plan.tool_packages(locks.Lock(lock, device, python, machine, packages))
    names = {package.name for package in (*packages, *found)}
    assert {canonicalize_name(Requirement(text).name) for text in toolwheel.requirements()} <= names
    assert not {package.name for package in packages} & {package.name for package in found}


def test_tool_lock_is_up_to_date() -> None:
    """Every dependency of pyproject.toml, in the versions that a checkout installs: `make constraints` sees to it."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    locked = {package.name: package.version for package in locks.parse(plan.TOOL_LOCK)}
    asked = [Requirement(text) for text in project["dependencies"]]
    assert [
        str(each) for each in asked if not each.specifier.contains(locked.get(canonicalize_name(each.name), "0"))
    ] == []
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    constrained = dict(line.partition(" ;")[0].split("==") for line in lines if "==" in line)
    assert {name: constrained.get(name) for name in locked} == locked


# --- names and sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [("60M", 60_000_000), ("60MB", 60_000_000), ("1MiB", 1 << 20), ("0.1g", 100_000_000), ("65536", 65536)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "1k", "-60M", "60X", "inf", "1e9", "9" * 400 + "M"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|small"):
        parse_size(text)


def test_platforms_are_those_of_the_locks() -> None:
    tags = list(wheels.platforms("aarch64"))
    assert tags[0] == "manylinux_2_34_aarch64"
    assert tags.index("manylinux_2_17_aarch64") + 1 == tags.index("manylinux2014_aarch64")
    files = ["a-1-py3-none-any.whl", "b-1-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"]
    assert wheels.oldest_glibc(files) == 17
    assert wheels.oldest_glibc([*files, "c-1-cp312-cp312-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl"]) == 27


@given(st.text(max_size=40))
def test_a_name_that_passes_stays_in_its_folder(name: str) -> None:
    try:
        members.check_name("archive", name)
    except BundleUnsafeError:
        return
    assert (Path("/top") / name).resolve().is_relative_to("/top")
    assert Path(name).as_posix() == name
    assert name.isascii()
    assert name.isprintable()


_names = st.sampled_from(
    [
        "../x",
        "/x",
        "top/../../x",
        "top/a",
        "top/./a",
        "top//a",
        "top/-rf",
        "top/a\nb",
        "top/\x00",
        "C:\\x",
        "top",
        "top/é",
    ]
)
_kinds = st.sampled_from(
    [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
)


@settings(deadline=None)
@given(st.lists(st.tuples(_names, _kinds, st.binary(max_size=20)), min_size=1, max_size=5), st.data())
def test_reader_ends_with_an_error_of_its_own(entries: list[tuple[str, bytes, bytes]], data: st.DataObject) -> None:
    """Whatever an archive holds, and wherever it is damaged: refused, never unpacked, never a crash."""
    buffer = io.BytesIO()
    form = data.draw(st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, kind, body in entries:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            info.size = len(body) if kind == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(body))
    raw = bytearray(buffer.getvalue())
    for position in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=4)):
        raw[position] = data.draw(st.integers(0, 255))
    with _File(bytes(raw[: data.draw(st.integers(1, len(raw)))])) as path, pytest.raises(BwError) as caught:
        verify(path, Quiet())
    assert isinstance(caught.value, BundleUnsafeError | BundleDamagedError)


class _File:
    """A file for the length of a block: hypothesis and tmp_path do not go together."""

    def __init__(self, data: bytes) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name) / "bundle.tar"
        self.path.write_bytes(data)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


@pytest.mark.parametrize(
    ("entry", "mode"),
    [
        ("../x", 0o100644),
        ("/x", 0o100644),
        ("a\\..\\x", 0o100644),
        ("c:/x", 0o100644),
        ("link", 0o120777),
        ("device", 0o020644),
    ],
)
def test_hostile_wheel(tmp_path: Path, entry: str, mode: int) -> None:
    path = tmp_path / "a-1-py3-none-any.whl"
    info = zipfile.ZipInfo(entry)
    info.filename, info.external_attr, info.create_system = entry, mode << 16, 3
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(info, b"x")
    with pytest.raises(BundleUnsafeError):
        members.check_wheel(path)


_pieces = st.text(st.sampled_from("ab./\\:~ \0é-"), min_size=1, max_size=8)


@given(
    st.lists(st.tuples(_pieces, st.sampled_from([0, 0o100644, 0o120777, 0o020644, 0o010644])), min_size=1, max_size=4)
)
def test_wheel_that_passes_stays_in_its_folder(entries: list[tuple[str, int]]) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, mode in entries:
            info = zipfile.ZipInfo("x")
            info.filename, info.external_attr, info.create_system = name, mode << 16, 3
            archive.writestr(info, b"x")
    infos = zipfile.ZipFile(buffer).infolist()
    if list(entry_problems(infos)):
        return
    names = [info.filename for info in infos]
    assert len(set(names)) == len(names)
    assert all((Path("/top") / name).resolve().is_relative_to("/top") for name in names if "\0" not in name)
    assert not [info for info in infos if (info.external_attr >> 28) not in (0, 8)]


# --- checking one


def test_whole_bundle_passes_in_every_form(in_parts: Bundle, tmp_path: Path) -> None:
    (tmp_path / "one.tar").write_bytes(content(in_parts))
    with tarfile.open(tmp_path / "one.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    forms = [in_parts.folder, tmp_path / "one.tar", tmp_path / in_parts.manifest.name]
    found = [verify(form, Quiet(), in_parts.digest.upper()) for form in forms]
    assert found[0] == found[1] == found[2]
    assert (found[0].manifest, found[0].digest) == (in_parts.manifest, in_parts.digest)
    part = verify(in_parts.folder / in_parts.parts[1].file, Quiet())
    assert (part.part, part.size) == (in_parts.parts[1].file, in_parts.parts[1].size)


def test_another_digest(in_parts: Bundle) -> None:
    with pytest.raises(BundleDigestError, match=in_parts.digest):
        verify(in_parts.folder, Quiet(), "0" * 64)


def test_a_part_has_no_digest(in_parts: Bundle) -> None:
    with pytest.raises(BundleDigestError, match="is one part"):
        verify(in_parts.folder / in_parts.parts[1].file, Quiet(), in_parts.digest)


def test_what_lies_beside_the_parts_counts(bundle: Bundle) -> None:
    """The installer that a user runs is the one beside the parts, not the one in them."""
    with (bundle.folder / "install.sh").open("a") as file:
        file.write("true\n")
    (bundle.folder / "requirements.txt").unlink()
    with pytest.raises(BundleDamagedError) as caught:
        verify(bundle.folder, Quiet(), bundle.digest)
    assert "install.sh beside the parts is not the one" in str(caught.value)
    assert "requirements.txt is missing beside the parts" in str(caught.value)


def test_every_wrong_part_is_named(bundle: Bundle) -> None:
    first, second, third = (bundle.folder / part.file for part in bundle.parts[:3])
    first.unlink()
    second.write_bytes(second.read_bytes()[1:])
    third.write_bytes(b"\0" * third.stat().st_size)
    with pytest.raises(BundleDamagedError) as caught:
        verify(bundle.folder, Quiet())
    assert [first.name in str(caught.value), second.name in str(caught.value), third.name in str(caught.value)] == [
        True
    ] * 3
    with pytest.raises(BundleDamagedError, match=r"has \d+ bytes"):
        verify(second, Quiet())


def test_any_bit_of_an_archive_counts(in_parts: Bundle, tmp_path: Path) -> None:
    data = content(in_parts)
    chance = random.Random(0)
    for position in [chance.randrange(len(data) - 20480) for _ in range(12)]:
        damaged = bytearray(data)
        damaged[position] ^= 1 << chance.randrange(8)
        (tmp_path / "one.tar").write_bytes(damaged)
        if _padding(data, position):
            continue
        with pytest.raises(BwError):
            verify(tmp_path / "one.tar", Quiet())


def _padding(data: bytes, position: int) -> bool:
    """Tell whether a byte lies between the end of a member and the next header, or is a field that nobody reads."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return not any(
            member.offset_data <= position < member.offset_data + member.size for member in archive.getmembers()
        )


def test_lists_that_are_none() -> None:
    for text in ("", "x", "0" * 64 + " a", "0" * 64 + "  ../a", f"{'0' * 64}  a\n{'0' * 64}  a"):
        with pytest.raises((BundleDamagedError, BundleUnsafeError)):
            read_sums(text)
    for text in ("", "x", f"{'0' * 64}  1  ../a", f"{'0' * 64}  1  a\n{'0' * 64}  1  a"):
        with pytest.raises(BundleDamagedError):
            read_parts(text)


def test_member_names_are_checked_when_written(tmp_path: Path) -> None:
    with pytest.raises(BundleUnsafeError):
        write(tmp_path, "top", [Member("../x", b"")], None, lambda name: None)


# --- the command


def bw(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_bw", "bundle", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_command_checks_a_bundle(in_parts: Bundle) -> None:
    done = bw("--verify", in_parts.folder, "--expect", in_parts.digest, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["whole"], found["digest"], found["manifest"]["python"]) == (True, in_parts.digest, PYTHON)
    wrong = bw("--verify", in_parts.folder, "--expect", "0" * 64)
    assert (wrong.returncode, "hint:" in wrong.stderr) == (BundleDigestError.exit_code, True)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--device", "cpu", "--split", "1"),
        ("--device", "cpu", "--split", "9" * 400),
        ("--device", "cpu", "--expect", "0"),
        ("--verify", "bundle", "--device", "cpu"),
        ("--verify", "bundle", "--dry-run"),
    ],
    ids=["no device", "tiny parts", "no size", "expect without verify", "verify and make", "verify and dry run"],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    done = bw(*arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
