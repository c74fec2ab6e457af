"""Keeping an installed engine as a wheel, so that what nobody can build again can still be put back.

The files are taken from the disk, and the result is a wheel with the content digest of the one that was installed:
what installers add is left out, and every other file has to be the recorded one.
"""

from __future__ import annotations

import csv
import os
import tempfile
from pathlib import Path

import platformdirs
from packaging.utils import canonicalize_name

from sglang_bw.errors import OutputError
from sglang_bw.fork.record import counts
from sglang_bw.fork.verify import PACKAGE, Installation
from sglang_bw.fork.wheel import Member, write_zip

# Zip knows no date before 1980, and the wheel's own is not recorded anywhere.
_DATE = (1980, 1, 1, 0, 0, 0)


def kept_folder() -> Path:
    """Return where kept engines are."""
    return Path(platformdirs.user_cache_dir("sglang-bw")) / "kept"


def kept_path(found: Installation) -> Path:
    """Return where an installed engine is kept: a folder of its own for each content."""
    return kept_folder() / found.digest[:16] / f"{PACKAGE}-{found.version}-{_tag(found)}.whl"


def keep(found: Installation) -> Path:
    """Write the wheel of an intact installed engine and return it; one that is there already stays.

    :raises OutputError: it cannot be written.
    """
    path = kept_path(found)
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=".", delete=False) as file:
            file.write(write_zip(_members(found), _DATE))
        os.replace(file.name, path)  # noqa: PTH105
    except OSError as error:
        raise OutputError(
            f"cannot keep the installed engine in {path.parent}: {error.strerror}",
            hint="free about 100 MB, or set XDG_CACHE_HOME; without it there is no way back",
        ) from None
    return path


def _members(found: Installation) -> list[tuple[str, Member]]:
    assert found.location is not None
    info = _info(found)
    rows = [row for row in csv.reader((info / "RECORD").read_text(encoding="utf-8").splitlines()) if counts(row)]
    members = [(path, _member(found.location / path)) for path, _, _ in rows]
    record = "".join(f"{','.join(_quoted(row))}\n" for row in rows) + f"{info.name}/RECORD,,\n"
    return [*members, (f"{info.name}/RECORD", Member(record.encode()))]


def _quoted(row: list[str]) -> list[str]:
    return [f'"{cell}"' if "," in cell else cell for cell in row]


def _member(path: Path) -> Member:
    return Member(path.read_bytes(), path.stat().st_mode & 0o777)


def _info(found: Installation) -> Path:
    assert found.location is not None
    return next(
        path for path in found.location.glob("*.dist-info") if canonicalize_name(path.name.partition("-")[0]) == PACKAGE
    )


def _tag(found: Installation) -> str:
    """Return the wheel's tag; one of several stands for all, since they name the same file."""
    lines = (_info(found) / "WHEEL").read_text(encoding="utf-8").splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("Tag:"))
