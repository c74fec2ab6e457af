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


def partial(path: Path) -> Path:
    """Return where a result is kept while it is not whole, so that an earlier whole one stays."""
    return path.with_name(f"{path.stem}.partial.json")


def store(path: Path, result: dict[str, Any], *, whole: bool | None = None) -> None:
    """Write what was found so far beside ``path``, and a whole result to it.

    :param whole: whether it may take the place of an earlier one; left out: when it is complete.
    :raises OutputError: it cannot be written.
    """
    if not (result["complete"] if whole is None else whole):
        write(partial(path), result)
        return
    write(path, result)
    partial(path).unlink(missing_ok=True)


def try_out(path: Path) -> None:
    """Write beside a result that will be written there, before hours are spent on it.

    :raises OutputError: it cannot be.
    """
    trial = path.with_name(f".{path.name}.trial")
    write(trial, {})
    trial.unlink(missing_ok=True)


def write(path: Path, result: dict[str, Any]) -> None:
    """Write JSON so that a reader sees the old file or the new one.

    :raises OutputError: it cannot be written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(json.dumps(result, indent=2) + "\n")
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        if temporary:
            temporary.unlink(missing_ok=True)
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}", hint="choose another place with --out FILE."
        ) from error
