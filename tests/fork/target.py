"""Environments to install into: real venvs, a tiny locked dependency, and pip and uv that see one folder only."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sglang_bw.fork.install_plan import Request

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine())


def make_venv(folder: Path) -> Path:
    """Create a virtual environment without pip, as uv does, and return its folder."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder


def site_packages(venv: Path) -> Path:
    return venv / "lib" / f"python{PYTHON}" / "site-packages"


def write_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    """Write a pure-Python wheel with a correct RECORD."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    content = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **files,
    }
    rows = [f"{path},{record_digest(data)},{len(data)}" for path, data in content.items()]
    content[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in content.items():
            archive.writestr(member, data)
    return path


def record_digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def with_other_bytes(wheel: Path, folder: Path, member: str, data: bytes) -> Path:
    """Write a wheel of the same name and version in which one recorded file differs."""
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(result, "w") as new:
        before = old.read(member)
        hexes = (hashlib.sha256(before).hexdigest().encode(), hashlib.sha256(data).hexdigest().encode())
        for name in old.namelist():
            content = data if name == member else old.read(name)
            if name == "sglang/_bw.json":
                content = content.replace(*hexes)
            new.writestr(name, content)
        info = next(name for name in new.namelist() if name.endswith("/RECORD"))
    return _rerecord(result, info)


def _rerecord(wheel: Path, record: str) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist() if name != record}
    rows = [f"{name},{record_digest(data)},{len(data)}" for name, data in content.items()]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
        archive.writestr(record, "\n".join([*rows, f"{record},,", ""]))
    return wheel


def fake_interpreter(path: Path, **facts: object) -> Path:
    """Write a program that answers the probe as this Python would, but for ``facts``."""
    code = f"""#!{sys.executable}
import json, subprocess, sys
said = subprocess.run([{sys.executable!r}, *sys.argv[1:]], capture_output=True, text=True, check=True).stdout
facts = json.loads(said.strip().splitlines()[-1])
facts.update(json.loads({json.dumps(facts)!r}))
print(json.dumps(facts))
"""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    path.chmod(0o755)
    return path


@dataclass
class Quiet:
    """A report that only remembers."""

    steps: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)

    def step(self, text: str) -> None:
        self.steps.append(text)

    def detail(self, text: str) -> None:
        self.details.append(text)


@dataclass
class Engine:
    """A release with a pinned series, its built wheel, and a lock of one package."""

    root: Path
    base: str
    stock: Path
    built: Path
    version: str
    mirror: Path

    def request(self, venv: Path, **more: object) -> Request:
        return Request(python=venv, device="cpu", **{"wheel": self.built, **more})  # type: ignore[arg-type]

    def add_base(self, version: str) -> None:
        """Give another upstream version the same series."""
        shutil.copytree(self.root / self.base, self.root / version)
        pins = self.root / version / "upstream.toml"
        pins.write_text(pins.read_text().replace(f'version = "{self.base}"', f'version = "{version}"'))

    def lock(self, *packages: Path, device: str = "cpu") -> None:
        """Write this Python's lock, of wheels in the mirror."""
        folder = self.root / self.base / "locks"
        folder.mkdir(exist_ok=True)
        lines = []
        for wheel in packages:
            name, version = wheel.name.split("-")[:2]
            lines.append(f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
        (folder / f"{device}-{PYTHON}-{MACHINE}.txt").write_text("".join(lines))


def offline_settings(mirror: Path, cache: Path) -> Iterator[tuple[str, str | None]]:
    """Yield the variables under which pip and uv know one folder and nothing else."""
    for name in os.environ:
        if name.startswith(("PIP_", "UV_")):
            yield name, None
    yield from {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(mirror),
        "UV_NO_CONFIG": "1",
        "UV_OFFLINE": "1",
        "UV_FIND_LINKS": str(mirror),
        "UV_CACHE_DIR": str(cache / "uv"),
        "XDG_CACHE_HOME": str(cache),
    }.items()
