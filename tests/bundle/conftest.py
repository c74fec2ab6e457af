"""A small release to bundle: a patched stand-in engine, two dependencies, Python's own pip, a tool that verifies."""

from __future__ import annotations

import ensurepip
import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sglang_bw import __version__
from sglang_bw.bundle import make, plan, toolwheel
from sglang_bw.bundle.archive import SMALLEST_PART
from sglang_bw.bundle.make import Bundle
from sglang_bw.fork.build import build
from tests.fakeupstream import VERSION, FakeUpstream, patched
from tests.fork.target import Engine, Quiet, offline_settings, write_wheel

# `verify` as install.sh calls it, of the stand-in engine: the real tool needs dozens of packages.
TOOL = b"""
def main():
    import sys, sglang, tinydep
    print("intact", sglang.__version__, *sys.argv[1:])
"""
SCRIPTS = b"[console_scripts]\nsglang-bw = sglang_bw.cli:main\n"


@dataclass(frozen=True)
class Release:
    """What bundles are made of."""

    engine: Engine
    tool: Path
    lock: Path

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let pip see the mirror only, and the tool be a small one that needs nothing but pip."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            for name, value in offline_settings(self.engine.mirror, self.lock.parent / "cache"):
                monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
            monkeypatch.setattr(plan, "TOOL_LOCK", self.lock)
            monkeypatch.setattr(toolwheel, "requirements", lambda: ["pip"])
            monkeypatch.setattr(toolwheel, "tool_wheel", lambda folder: Path(shutil.copy(self.tool, folder)))
            yield

    def plan(self, **asked: object) -> plan.Plan:
        with self.alone():
            request = plan.Request(**{"device": "cpu", "wheel": self.engine.built, **asked})  # type: ignore[arg-type]
            return plan.plan_bundle(self.engine.root, request)

    def make(self, out: Path, split: int | None = None, **asked: object) -> Bundle:
        planned = self.plan(**asked)
        with self.alone():
            return make.make(planned, make.choose(planned, Quiet()), out, split, Quiet())


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
    # Debian's Python has its wheels elsewhere.
    bundled = sysconfig.get_config_var("WHEEL_PKG_DIR") or Path(ensurepip.__file__).parent / "_bundled"
    pip = next(Path(bundled).glob("pip-*.whl"))
    shutil.copy(pip, mirror)
    engine = Engine(upstream.root, VERSION, upstream.wheel, built.path, built.version, mirror)
    engine.lock(dependency, other)
    return engine


def lock_line(wheel: Path) -> str:
    name, version = wheel.name.split("-")[:2]
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


@pytest.fixture(scope="session")
def release(made: Engine, tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("release")
    info = f"sglang_bw-{__version__}.dist-info"
    files = {"sglang_bw/__init__.py": b"", "sglang_bw/cli.py": TOOL, f"{info}/entry_points.txt": SCRIPTS}
    tool = write_wheel(folder, "sglang-bw", __version__, files)
    (folder / "tool.txt").write_text(lock_line(next(made.mirror.glob("pip-*.whl"))))
    return Release(made, tool, folder / "tool.txt")


@pytest.fixture(scope="session")
def in_parts(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return release.make(tmp_path_factory.mktemp("in-parts"), split=SMALLEST_PART * 4)


@pytest.fixture
def bundle(in_parts: Bundle, tmp_path: Path) -> Bundle:
    """A bundle in parts, in a copy of its own."""
    folder = tmp_path / in_parts.folder.name
    shutil.copytree(in_parts.folder, folder)
    return replace(in_parts, folder=folder)


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
