"""A carried environment: what is left out, whose kernels stay, and that it is there again after unpacking."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_bw.fork import upstream
from sglang_bw.fork.series import Series
from sglang_bw.host import elf, fatbin
from tests.conftest import CHECKOUT
from tests.fakeupstream import VERSION, FakeUpstream, patched
from tests.host.fake_binary import container, entry, shared_object

sys.path.append(str(CHECKOUT / "scripts"))
import carried
import thin_environment as thin

CODE = b"\x17" * 24


def filled(*targets: str) -> bytes:
    """A container whose payloads are not zeros."""
    whole = container(*targets)
    for target in targets:
        whole = whole.replace(entry(target), entry(target, CODE), 1)
    return whole


def kept(path: Path) -> list[list[str]]:
    with elf.opened(path) as opened:
        data = bytes(opened.data)
        return [
            [str(one.target) for one in found if data[one.start : one.start + one.size] == CODE]
            for found in fatbin.of(opened)
        ]


def test_device_code_of_other_architectures_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    before = shared_object(
        filled("sm_80", "sm_90a", "compute_90", "sm_120a"),  # its own machine code: nothing else is needed
        filled("sm_80", "compute_80"),  # none: the driver compiles the PTX
        filled("sm_100f", "sm_120a"),  # nothing that it could run: left alone
    )
    path.write_bytes(before)
    saved = thin.thin(path, (9, 0))
    assert kept(path) == [["sm_90a"], ["compute_80"], ["sm_100f", "sm_120a"]]
    assert saved == 4 * len(CODE)
    assert path.stat().st_size == len(before)
    with elf.opened(path) as opened:
        assert [len(found) for found in fatbin.of(opened)] == [4, 2, 2], "headers stay"
    assert thin.thin(path, (9, 0)) == saved, "twice is the same"


def test_what_a_server_does_without_is_not_installed() -> None:
    lock = (CHECKOUT / "patches" / "0.5.23" / "locks" / "cuda-3.12-x86_64.txt").read_text()
    names = {line.partition("==")[0] for line in thin.wanted(lock, thin.WITHOUT, ["sgl-deep-gemm"])}
    assert {"torch", "triton", "sglang-kernel", "nvidia-nccl-cu13", "nvidia-cudnn-frontend", "zstandard"} <= names
    assert "sgl-deep-gemm" in names
    assert not {"flashinfer-python", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cuda-nvrtc", "sgl-deep-ep"} & names
    assert all("==" in line and " " not in line for line in thin.wanted(lock, thin.WITHOUT, []))


def test_files_for_building_only_are_dropped(tmp_path: Path) -> None:
    for name in (
        "a/lib.a",
        "a/__pycache__/x.pyc",
        "scipy/stats/tests/test_x.py",
        "sgl_kernel/flash_ops.abi3.so",
        "a/lib.so",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"12345")
    assert thin.drop(tmp_path) == 20
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["lib.so"]


def test_what_was_packed_is_there_after_unpacking(tmp_path: Path) -> None:
    site, engine, parts = tmp_path / "site", tmp_path / "engine", tmp_path / "parts"
    (site / "carried").mkdir(parents=True)
    (site / "carried" / "__init__.py").write_text("SAID = 'here'\n")
    spec = importlib.util.find_spec("zstandard")
    assert spec
    assert spec.origin
    shutil.copytree(Path(spec.origin).parent, site / "zstandard")
    engine.mkdir()
    (engine / "noise").write_bytes(os.urandom(300_000))
    parts.mkdir()
    paths = thin.pack({"site": site, "engine": engine}, parts, size=100_000)
    assert [path.name for path in paths] == [f"part.{number:03}" for number in range(len(paths))]
    assert {path.stat().st_size for path in paths[:-1]} == {100_000}
    thin.carry_decompressor(site, parts)
    shutil.copy(thin.UNPACK, parts)
    shutil.rmtree(site)
    (parts / "python").write_text("2.7\n")
    environ = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    into = tmp_path / "a folder"
    command = ["sh", "unpack.sh", str(into)]
    done = subprocess.run(command, cwd=parts, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: these packages are for Python 2.7, and python3 is 3.")
    (parts / "python").write_text(f"{sys.version_info.major}.{sys.version_info.minor}\n")
    done = subprocess.run(command, cwd=parts, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (into / "engine" / "noise").read_bytes() == (engine / "noise").read_bytes()
    # Its own packages, and behind them those of the Python that unpacked it.
    program = "import carried, pytest, sys; print(carried.SAID, sys.prefix)"
    line = f"{done.stdout}python -c '{program}'"
    said = subprocess.run(["sh", "-c", line], env=environ, capture_output=True, text=True, check=False)
    assert said.stdout == f"here {into}/v\n", said.stderr


def test_the_checkout_is_carried_without_what_git_ignores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made"
    for name in (".gitignore", "a/new", "a/old", "left/out", "gone"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text("left/\n" if name == ".gitignore" else name)
    for command in (["init", "-q"], ["add", "a/old", "gone"]):
        subprocess.run(["git", *command], cwd=made, check=True)
    (made / "gone").unlink()
    (made / "a" / "old").write_text("changed")
    monkeypatch.setattr(carried, "ROOT", made)
    found = carried.checkout(tmp_path / "copy")
    files = {str(path.relative_to(found)): path.read_text() for path in found.rglob("*") if path.is_file()}
    assert files == {".gitignore": "left/\n", "a/new": "a/new", "a/old": "changed"}


def test_both_engines_are_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fake = patched(FakeUpstream(tmp_path / "upstream"))
    fake.pin()
    upstream.keep(fake.wheel)
    found = carried.engines(Series.load(fake.root, VERSION), "3.12", tmp_path / "into")
    assert list(found) == ["stock", "patched"]
    stock, own = (folder / "sglang" for folder in found.values())
    assert (stock / "tool.sh").exists()
    assert (own / "added.py").exists()
    assert not (own / "tool.sh").exists(), "the series removes it"


@pytest.mark.environments
def test_the_tool_agrees_with_the_engine_about_versions(tmp_path: Path) -> None:
    lock = (CHECKOUT / "patches" / "0.5.23" / "locks" / "cuda-3.12-x86_64.txt").read_text()
    engine = list(thin.wanted(lock, "", []))
    own = list(thin.wanted(carried.tool_lock(engine, "3.12", tmp_path), "", []))
    names = {line.partition("==")[0] for line in engine}
    assert {line for line in own if line.partition("==")[0] in names} <= set(engine)
    assert {"installer", "optuna", "unidiff"} <= {line.partition("==")[0] for line in own}


def test_the_script_is_clean() -> None:
    shellcheck = shutil.which("shellcheck") or Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, thin.UNPACK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
