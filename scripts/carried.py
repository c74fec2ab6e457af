"""What a machine that measures gets of this project: the checkout, the tool with its packages, and both engines."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

from sglang_bw.fork import build, upstream
from sglang_bw.fork.series import Series

ROOT = Path(__file__).resolve().parent.parent
UV = (sys.executable, "-m", "uv", "pip")
PLATFORM = "x86_64-manylinux_2_34"


def checkout(into: Path) -> Path:
    """Copy every file that git does not ignore, changed ones as they are."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, into / name)
    return into


def tool_lock(engine: Iterable[str], python: str, scratch: Path) -> str:
    """Return the tool's packages, pinned a line each; what the engine has too, in the engine's version.

    :param engine: the engine's requirements, ``name==version``.
    """
    constraints = scratch / "constraints.txt"
    constraints.write_text("\n".join(engine) + "\n")
    command = [
        *(*UV, "compile", "--quiet", "--no-header", "--no-annotate", "--only-binary", ":all:"),
        *("--python-version", python, "--python-platform", PLATFORM, "--constraints", str(constraints)),
        str(ROOT / "pyproject.toml"),
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def tool(site: Path) -> None:
    """Install the tool itself, of this checkout."""
    subprocess.run([*UV, "install", "--quiet", "--no-deps", "--target", str(site), str(ROOT)], check=True)


def engines(series: Series, python: str, into: Path) -> dict[str, Path]:
    """Return the stock and the patched engine of a base as folders to import from, by those names."""
    stock = upstream.fetch(series.pins, upstream.pick_wheel(series.pins, python, "x86_64"))
    made = into / "wheel"
    patched = build.build(series.folder.parent, series.base, wheel=stock, out=made).path
    found = {"stock": into / "stock", "patched": into / "patched"}
    for wheel, folder in zip((stock, patched), found.values(), strict=True):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return found
