from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from sglang_bw.errors import DownloadError, HashMismatchError, UnknownBaseError
from sglang_bw.fork.series import Pins
from sglang_bw.fork.upstream import fetch, pick_wheel
from tests.fakeupstream import FILES, VERSION, FakeUpstream, wheel_bytes

SIX = {
    f"sglang-0.5.23-cp{py}-cp{py}-manylinux_2_34_{machine}.whl": "0" * 64
    for py in ("311", "312", "313")
    for machine in ("x86_64", "aarch64")
}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give an empty cache and a directory as pip's only source."""
    source = tmp_path / "index"
    source.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(source))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return source


@pytest.mark.parametrize(
    ("python", "machine", "tag"),
    [("3.11", "x86_64", "cp311-x86_64"), ("3.12", "arm64", "cp312-aarch64"), ("3.13", "AMD64", "cp313-x86_64")],
)
def test_wheel_fits_python_and_machine(python: str, machine: str, tag: str) -> None:
    interpreter, arch = tag.split("-")
    name = pick_wheel(Pins("0.5.23", SIX), python, machine)
    assert name == f"sglang-0.5.23-{interpreter}-{interpreter}-manylinux_2_34_{arch}.whl"


def test_pure_wheel_fits_everything() -> None:
    name = "sglang-0.5.9-py3-none-any.whl"
    assert pick_wheel(Pins("0.5.9", {name: "0"}), "3.13", "aarch64") == name


@pytest.mark.parametrize(("python", "machine"), [("3.10", "x86_64"), ("3.12", "riscv64")])
def test_missing_wheel_lists_what_upstream_has(python: str, machine: str) -> None:
    with pytest.raises(UnknownBaseError) as caught:
        pick_wheel(Pins("0.5.23", SIX), python, machine)
    assert "cp311-cp311-manylinux_2_34_aarch64" in caught.value.hint


def test_fetch_downloads_once_and_keeps(offline: Path, tmp_path: Path) -> None:
    upstream = FakeUpstream(tmp_path / "upstream")
    served = offline / upstream.wheel.name
    served.write_bytes(upstream.wheel.read_bytes())
    kept = fetch(upstream.pins, upstream.wheel.name)
    assert kept.read_bytes() == upstream.wheel.read_bytes()
    served.unlink()
    assert fetch(upstream.pins, upstream.wheel.name) == kept


def test_fetch_again_when_the_kept_file_was_damaged(offline: Path, tmp_path: Path) -> None:
    upstream = FakeUpstream(tmp_path / "upstream")
    (offline / upstream.wheel.name).write_bytes(upstream.wheel.read_bytes())
    kept = fetch(upstream.pins, upstream.wheel.name)
    kept.write_bytes(b"half")
    assert fetch(upstream.pins, upstream.wheel.name).read_bytes() == upstream.wheel.read_bytes()


def test_no_network_and_no_cache_says_how_to_go_on(offline: Path, tmp_path: Path) -> None:
    upstream = FakeUpstream(tmp_path / "upstream")
    with pytest.raises(DownloadError) as caught:
        fetch(upstream.pins, upstream.wheel.name)
    _, _, folder = caught.value.hint.partition("copy that file into ")
    shutil.copy(upstream.wheel, folder)
    assert fetch(upstream.pins, upstream.wheel.name).read_bytes() == upstream.wheel.read_bytes()


def test_other_bytes_from_the_index_never_enter_the_cache(offline: Path, tmp_path: Path) -> None:
    upstream = FakeUpstream(tmp_path / "upstream")
    other = wheel_bytes({**FILES, "sglang/evil.py": b"x\n"})
    (offline / upstream.wheel.name).write_bytes(other)
    with pytest.raises(HashMismatchError, match=hashlib.sha256(other).hexdigest()):
        fetch(upstream.pins, upstream.wheel.name)
    assert not list((tmp_path / "cache").rglob("*.whl"))
    assert VERSION in upstream.wheel.name
