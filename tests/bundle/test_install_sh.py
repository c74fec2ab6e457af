"""A bundle is made, carried and installed by its own script, with no network."""

from __future__ import annotations

import fcntl
import io
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_bw.bundle.archive import Member
from sglang_bw.bundle.make import Bundle
from sglang_bw.bundle.manifest import Part, parts_text, read_parts
from sglang_bw.bundle.reader import verify
from sglang_bw.errors import BundleDamagedError, BundleUnsafeError
from tests.bundle.conftest import Install, Release
from tests.fork.target import Quiet

pytestmark = pytest.mark.environments


def installed(into: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in into.glob("lib/python*/site-packages/*.dist-info")}


def test_installs_from_parts_and_goes_on_after_a_kill(bundle: Bundle, install: Install, tmp_path: Path) -> None:
    assert len(bundle.parts) > 3
    into = tmp_path / "my env"
    done = install(bundle.folder, "--into", into, "--expect", bundle.digest.upper())
    assert done.returncode == 0, done.stderr
    assert f"intact {bundle.manifest.engine} verify" in done.stdout
    assert installed(into) == {"pip", "tinydep", "other_dep", "sglang", "sglang_bw"}
    assert not (into / ".bundle").exists()
    site = next(into.glob("lib/python*/site-packages"))
    assert not list(site.glob("*/direct_url.json"))
    (into / ".bundle").mkdir()  # of a run that was killed at its very end
    again = install(bundle.folder, "--into", into)
    assert (again.returncode, "nothing to do" in again.stdout) == (0, True)
    assert not (into / ".bundle").exists()

    # As a killed pip leaves it: files and a RECORD from the wheel, without what pip writes last.
    record = site / "tinydep-1.0.dist-info" / "RECORD"
    record.write_text("".join(line for line in record.read_text().splitlines(True) if "INSTALLER" not in line))
    (site / "tinydep.py").unlink()
    shutil.rmtree(site / "other_dep-2.0.dist-info")
    kept = (site / "sglang" / "__init__.py").stat().st_mtime_ns
    (into / ".sglang-bw-bundle").write_text("")  # killed while the mark was written
    done = install(bundle.folder, "--into", into)
    assert (done.returncode, "going on" in done.stdout) == (0, True), done.stderr
    assert (site / "tinydep.py").is_file()
    assert (site / "sglang" / "__init__.py").stat().st_mtime_ns == kept


@pytest.mark.slow
def test_installs_from_the_unpacked_archive(release: Release, install: Install, tmp_path: Path) -> None:
    bundle = release.make(tmp_path / "out")
    with tarfile.open(bundle.folder / bundle.parts[0].file) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    folder = tmp_path / "unpacked" / bundle.manifest.name
    done = install(folder, "--into", "env", "--expect", bundle.digest)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "env/bin/sglang-bw").is_file()
    assert (folder / "wheels").is_dir()


def test_dry_run_changes_nothing(bundle: Bundle, install: Install, tmp_path: Path) -> None:
    done = install(bundle.folder, "--into", tmp_path / "env", "--dry-run")
    assert (done.returncode, (tmp_path / "env").exists()) == (0, False), done.stderr
    assert "dry run" in done.stdout


def _cut(folder: Path) -> None:
    part = folder / read_parts((folder / "PARTS").read_text())[1].file
    part.write_bytes(part.read_bytes()[:-1])


def _flip(folder: Path) -> None:
    part = folder / read_parts((folder / "PARTS").read_text())[1].file
    data = bytearray(part.read_bytes())
    data[100] ^= 1
    part.write_bytes(data)


def _lose(folder: Path) -> None:
    (folder / read_parts((folder / "PARTS").read_text())[1].file).unlink()


def _edit_requirements(folder: Path) -> None:
    with (folder / "requirements.txt").open("a") as file:
        file.write("evil==1\n")


def _edit_sums(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text((folder / "SHA256SUMS").read_text().replace("wheels/", "../wheels/"))


@pytest.mark.parametrize(
    ("damage", "code", "says"),
    [
        pytest.param(_cut, 81, ".tar.001", id="cut off"),
        pytest.param(_flip, 81, ".tar.001 is not what its checksum says", id="one bit"),
        pytest.param(_lose, 81, ".tar.001 is missing", id="a part is missing"),
        pytest.param(_edit_requirements, 81, "requirements.txt", id="edited requirements"),
        pytest.param(_edit_sums, 82, "leaves the folder", id="checksums that lead out"),
    ],
)
def test_damage_is_found_before_anything_is_installed(
    bundle: Bundle, install: Install, tmp_path: Path, damage: Callable[[Path], None], code: int, says: str
) -> None:
    damage(bundle.folder)
    done = install(bundle.folder, "--into", tmp_path / "env")
    assert (done.returncode, (tmp_path / "env").exists()) == (code, False)
    assert says in done.stdout + done.stderr


def test_another_digest_than_expected(bundle: Bundle, install: Install, tmp_path: Path) -> None:
    done = install(bundle.folder, "--into", tmp_path / "env", "--expect", "0" * 64)
    assert (done.returncode, (tmp_path / "env").exists()) == (83, False)


def test_parts_are_checked_one_by_one(bundle: Bundle, install: Install) -> None:
    first, second = bundle.parts[0].file, bundle.parts[1].file
    (bundle.folder / second).unlink()
    assert install(bundle.folder, "--check", first).returncode == 0
    assert install(bundle.folder, "--check", first, bundle.folder / second).returncode == 81
    assert install(bundle.folder, "--check", "another").returncode == 2


def test_folder_of_somebody_else(bundle: Bundle, install: Install, tmp_path: Path) -> None:
    into = tmp_path / "env"
    into.mkdir()
    (into / "theirs").touch()
    assert install(bundle.folder, "--into", into).returncode == 18
    (into / "theirs").unlink()
    (into / ".sglang-bw-bundle").write_text("complete 00\n")
    assert install(bundle.folder, "--into", into).returncode == 18
    assert [path.name for path in into.iterdir()] == [".sglang-bw-bundle"]


@pytest.mark.parametrize("name", ['a "b"', "a$b", "a`b`", "a\\b", "a\nb"])
def test_names_that_shell_or_tar_would_read_otherwise(
    bundle: Bundle, install: Install, tmp_path: Path, name: str
) -> None:
    done = install(bundle.folder, "--into", tmp_path / name)
    assert (done.returncode, (tmp_path / name).exists()) == (18, False)
    assert "in its name" in done.stderr


def test_folder_below_a_file(bundle: Bundle, install: Install, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = install(bundle.folder, "--into", tmp_path / "file" / "env")
    assert (done.returncode, "is no folder" in done.stderr) == (17, True)


def test_python_of_another_version(bundle: Bundle, install: Install, tmp_path: Path) -> None:
    wrong = tmp_path / "python"
    wrong.write_text("#!/bin/sh\necho 3.9\n")
    wrong.chmod(0o755)
    done = install(bundle.folder, "--into", tmp_path / "env", "--python", wrong)
    assert (done.returncode, f"is not Python {bundle.manifest.python}" in done.stderr) == (18, True)


def test_wheel_that_is_not_the_listed_one(bundle: Bundle, install: Install, tmp_path: Path) -> None:
    """The parts are whole, but what they hold is not what the checksums name: somebody packed it anew."""
    repack(bundle, lambda members: {**members, f"{bundle.manifest.name}/wheels/tinydep-1.0-py3-none-any.whl": b"x"})
    done = install(bundle.folder, "--into", tmp_path / "env")
    assert (done.returncode, "tinydep-1.0-py3-none-any.whl" in done.stdout) == (81, True)
    assert not (tmp_path / "env/bin").exists()


def repack(bundle: Bundle, change: Callable[[dict[str, bytes]], dict[str, bytes]]) -> None:
    """Write the archive anew, as one part."""
    members = change(unpacked(bundle))
    write_part(bundle.folder, [(tarfile.TarInfo(name), data) for name, data in members.items()])


def unpacked(bundle: Bundle) -> dict[str, bytes]:
    whole = io.BytesIO(b"".join((bundle.folder / part.file).read_bytes() for part in bundle.parts))
    with tarfile.open(fileobj=whole) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def write_part(folder: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    path = folder / "hostile.tar"
    with tarfile.open(path, "w") as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    part = Part(path.name, path.stat().st_size, Member(path.name, path).sha256())
    (folder / "PARTS").write_text(parts_text([part]))


def _link(name: str, kind: bytes, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(lambda top: tarfile.TarInfo(f"{top}/../../escaped"), id="parent"),
        pytest.param(lambda top: tarfile.TarInfo("../escaped"), id="outside"),
        pytest.param(lambda top: tarfile.TarInfo("/tmp/escaped"), id="absolute"),
        pytest.param(lambda top: _link(f"{top}/link", tarfile.SYMTYPE, "/etc/passwd"), id="symbolic link"),
        pytest.param(lambda top: _link(f"{top}/link", tarfile.LNKTYPE, f"{top}/TARGET"), id="hard link"),
        pytest.param(lambda top: _link(f"{top}/device", tarfile.CHRTYPE, ""), id="device"),
        pytest.param(lambda top: _link(f"{top}/pipe", tarfile.FIFOTYPE, ""), id="pipe"),
        pytest.param(lambda top: _link(f"{top}/wheels", tarfile.SYMTYPE, "/"), id="link in place of a folder"),
        pytest.param(lambda top: tarfile.TarInfo(f"{top}/TARGET"), id="twice"),
        pytest.param(lambda top: tarfile.TarInfo(f"{top}/one more"), id="not listed"),
    ],
)
def test_hostile_archive_is_refused_by_both(
    bundle: Bundle, install: Install, tmp_path: Path, extra: Callable[[str], tarfile.TarInfo]
) -> None:
    members = [(tarfile.TarInfo(name), data) for name, data in unpacked(bundle).items()]
    write_part(bundle.folder, [(extra(bundle.manifest.name), b""), *members])
    done = install(bundle.folder, "--into", tmp_path / "a/b/env")
    assert done.returncode == BundleUnsafeError.exit_code, done.stdout + done.stderr
    assert not (tmp_path / "a").exists()
    with pytest.raises(
        (BundleUnsafeError, BundleDamagedError), match=r"path|regular|link|plain|twice|no checksum|outside"
    ):
        verify(bundle.folder, Quiet())


def test_script_is_clean_shell() -> None:
    script = Path("sglang_bw/bundle/install.sh")
    shellcheck = shutil.which("shellcheck") or Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is not here")
def test_second_run_waits_for_the_first(bundle: Bundle, tmp_path: Path) -> None:
    into = tmp_path / "env"
    (into / "bin").mkdir(parents=True)
    tool = into / "bin/sglang-bw"
    tool.write_text("#!/bin/sh\necho intact\n")
    tool.chmod(0o755)
    mark = into / ".sglang-bw-bundle"
    mark.write_text(f"begun {bundle.digest}\n")
    command = ["sh", bundle.folder / "install.sh", "--into", into]
    with mark.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert any("waiting for another install" in line for line in second.stdout)
        held.write("complete " + bundle.digest)
    said = second.stdout.read()
    second.stdout.close()
    assert (second.wait(60), "nothing to do" in said) == (0, True)
