"""docs/rebase-matrix.md from docs/rebase-matrix.json."""

from __future__ import annotations

from typing import Any


def page(data: dict[str, Any]) -> str:
    return ""
