"""The code in a model's directory: its digest, and what it takes from elsewhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_bw.errors import UnsafeLaunchError


def digest(folder: Path) -> str:
    """Return ``sha256:`` and the digest of a directory's code: names and bytes of ``**/*.py`` and ``*config.json``.

    :raises UnsafeLaunchError: one of them cannot be read.
    """
    total = hashlib.sha256()
    try:
        for path in sorted({*folder.rglob("*.py"), *folder.glob("*config.json")}):
            if path.is_file():
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                total.update(f"{content}  {path.relative_to(folder)}\n".encode(errors="surrogateescape"))
    except OSError as error:
        raise UnsafeLaunchError(
            f"the code in {folder} cannot be read: {error}", hint="Check its permissions."
        ) from error
    return f"sha256:{total.hexdigest()}"


def other_repositories(folder: Path) -> set[str]:
    """Return the repositories of which a model's configurations take code: ``owner/other--module.Class``."""
    found = set()
    for path in folder.glob("*config.json"):
        try:
            document = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue  # whether it is whole is looked at elsewhere
        found |= {text.partition("--")[0] for text in _texts(_auto_map(document)) if "--" in text}
    return found


def _auto_map(document: Any) -> Any:
    return document.get("auto_map") if isinstance(document, dict) else None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        yield from _texts(list(value.values()))
