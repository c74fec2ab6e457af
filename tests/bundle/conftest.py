"""A small release to bundle: a patched stand-in engine, one dependency, this Python's own pip, and a tool that verifies."""

from __future__ import annotations

import ensurepip
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_bw.bundle import make, plan
from sglang_bw.bundle.make import Bundle
from sglang_bw.bundle.plan import Request
from sglang_bw.fork.build import build
from tests.fakeupstream import VERSION, FakeUpstream, patched
from tests.fork.target import MACHINE, PYTHON, Engine, Quiet, offline_settings, write_wheel

# `verify` as install.sh calls it, of the stand-in engine: the real tool needs dozens of packages.
TOOL = b"""
def main():
    import sys, sglang, tinydep
    print("intact", sglang.__version__, *sys.argv[1:])
"""
SCRIPTS = b"[console_scripts]\nsglang-bw = sglang_bw.cli:main\n"


@dataclass
class Release:
    """What bundles are made of; ``make`` makes one in ``out``."""

    engine: Engine
    out: Path

    def make(self, out: Path | None = None, split: int | None = None, **asked: object) -> Bundle:
        request = Request(**{"device": "cpu", "wheel": self.engine.built, **asked})  # type: ignore[arg-type]
        planned = plan.plan_bundle(self.engine.root, request)
        return make.make(planned, make.choose(planned, Quiet()), out or self.out, split, Quiet())


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("bundle")
    upstream = patched(FakeUpstream(folder / "upstream"))
    upstream.pin()
    built = build(upstream.root, VERSION, wheel=upstream.wheel, out=folder / "dist")
    mirror = folder / "mirror"
    mirror.mkdir()
    dependency = write_wheel(mirror, "tinydep", "1.0", {"tinydep.py": b"VALUE = 1\n"})
    other = write_wheel(mirror, "other-dep", "2.0", {"other_dep.py": b""})
    pip = next((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
    shutil.copy(pip, mirror)
    engine = Engine(upstream.root, VERSION, upstream.wheel, built.path, built.version, mirror)
    engine.lock(dependency, other)
    return engine


def lock_line(wheel: Path) -> str:
    name, version = wheel.name.split("-")[:2]
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


@pytest.fixture
def release(made: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """The release in a copy of its own; pip sees its mirror only, and the tool needs pip only."""
    for name, value in offline_settings(tmp_path / "mirror", tmp_path / "cache"):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    shutil.copytree(made.root, tmp_path / "patches")
    shutil.copytree(made.mirror, tmp_path / "mirror")
    lock = tmp_path / "tool.txt"
    lock.write_text(lock_line(next((tmp_path / "mirror").glob("pip-*.whl"))))
    monkeypatch.setattr(plan, "TOOL_LOCK", lock)
    monkeypatch.setattr(plan.toolwheel, "requirements", lambda: ["pip"])

    def tool_wheel(folder: Path) -> Path:
        info = f"sglang_bw-{make.sglang_bw.__version__}.dist-info"
        files = {"sglang_bw/__init__.py": b"", "sglang_bw/cli.py": TOOL, f"{info}/entry_points.txt": SCRIPTS}
        return write_wheel(folder, "sglang-bw", make.sglang_bw.__version__, files)

    monkeypatch.setattr(plan.toolwheel, "tool_wheel", tool_wheel)
    engine = Engine(tmp_path / "patches", VERSION, made.stock, made.built, made.version, tmp_path / "mirror")
    return Release(engine, tmp_path / "out")


Install = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Run ``install.sh`` of a bundle's folder as a user would, with an index that nobody answers at."""

    def run(folder: Path, *arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "UV_"))}
        dead = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "TMPDIR": str(tmp_path)}
        command = ["sh", str(folder / "install.sh"), *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env={**clean, **dead, **environ}, cwd=tmp_path
        )

    return run


__all__ = ["MACHINE", "PYTHON", "Install", "Release", "lock_line"]
