"""Whether an engine was installed from sources, and what brings it back (PEP 610)."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse


@dataclass(frozen=True)
class Sources:
    """Where an engine that was installed from sources lies; ``editable`` when Python imports them from there.

    ``arguments``: what pip is to be asked for to get it again.
    """

    folder: Path
    editable: bool
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.folder} ({'editable' if self.editable else 'built from there'})"

    def back(self, python: Path) -> str:
        """Return the command that installs them again."""
        return f"python -m pip --python {shlex.quote(str(python))} install {shlex.join(self.arguments)}"


def sources_of(info: Path) -> Sources | None:
    """Return the sources that a distribution was installed from, ``None`` for one that came as a wheel.

    :param info: its ``.dist-info`` folder.
    """
    try:
        origin = json.loads((info / "direct_url.json").read_text(encoding="utf-8"))
        folder = Path(unquote(urlparse(str(origin["url"])).path))
        if "dir_info" in origin:
            editable = bool(origin["dir_info"].get("editable"))
            return Sources(folder, editable, ("-e", str(folder)) if editable else (str(folder),))
        if "vcs_info" in origin:
            return Sources(folder, False, (_of_repository(origin),))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return None


def _of_repository(origin: dict[str, Any]) -> str:
    vcs = origin["vcs_info"]
    below = f"#subdirectory={origin['subdirectory']}" if origin.get("subdirectory") else ""
    return f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}{below}"
