"""Where results of probes are kept, for `plan` and for comparison."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import platformdirs

from sglang_bw.errors import OutputError


def folder() -> Path:
    """Return the directory below the user's data."""
    return platformdirs.user_data_path("sglang-bw") / "probes"


def place(kind: str, *parts: str) -> Path:
    """Return the file of a result; measuring the same again replaces it."""
    return folder() / ("-".join([kind, *parts]) + ".json")


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result so that a reader sees the old one or the new one.

    :raises OutputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(json.dumps(result, indent=2) + "\n")
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}", hint="choose another place with --out FILE."
        ) from error


def stored(kind: str) -> list[Path]:
    """Return the results of a kind, newest first."""
    found = [path for path in folder().glob(f"{kind}-*.json") if path.is_file()]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
