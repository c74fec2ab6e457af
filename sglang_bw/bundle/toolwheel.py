"""The tool's own wheel, made of the package that is running: the same from a checkout and from an installed tool.

A build backend would have to be fetched, and an installed tool has no sources to build; its files are all there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import sglang_bw
from sglang_bw.errors import BundleError
from sglang_bw.fork.series import patches_root
from sglang_bw.fork.wheel import Member, recorded, write_zip

DISTRIBUTION = "sglang-bw"
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)
_WHEEL = "Wheel-Version: 1.0\nGenerator: sglang-bw\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def tool_wheel(folder: Path) -> Path:
    """Write the wheel into ``folder`` and return it.

    :raises BundleError: the tool runs without being installed, or as another version than the one installed.
    """
    version = sglang_bw.__version__
    try:
        installed = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise BundleError("the tool is not installed here", hint="`pip install .` in a clone, then again") from None
    if installed.version != version:
        raise BundleError(
            f"the tool that runs is {version}, the installed one {installed.version}", hint="install it again"
        )
    info = f"sglang_bw-{version}.dist-info"
    files = dict(_package()) | {
        f"{info}/METADATA": Member((installed.read_text("METADATA") or "").encode()),
        f"{info}/WHEEL": Member(_WHEEL.encode()),
        f"{info}/entry_points.txt": Member((installed.read_text("entry_points.txt") or "").encode()),
    }
    for name in ("LICENSE", "NOTICE"):
        if text := installed.read_text(f"licenses/{name}"):
            files[f"{info}/licenses/{name}"] = Member(text.encode())
    path = folder / f"sglang_bw-{version}-py3-none-any.whl"
    path.write_bytes(write_zip(recorded(files, info), _FIRST_DAY))
    return path


def requirements() -> list[str]:
    """Return what the installed tool requires."""
    return metadata.requires(DISTRIBUTION) or []


def _package() -> Iterator[tuple[str, Member]]:
    package, series = Path(sglang_bw.__file__).parent, patches_root()
    for root, where, left_out in ((package, "sglang_bw", {"patches"}), (series, "sglang_bw/patches", set[str]())):
        for path in root.rglob("*"):
            parts = path.relative_to(root).parts
            # A folder with a dot is one that is being written.
            hidden = any(part == "__pycache__" or part.startswith(".") for part in parts)
            if path.is_file() and not hidden and parts[0] not in left_out:
                yield "/".join((where, *parts)), Member(path.read_bytes())
