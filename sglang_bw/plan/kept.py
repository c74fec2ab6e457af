"""Inventories kept in the user's cache: a large model has hundreds of thousands of headers, and they do not change."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import platformdirs

from sglang_bw.plan.inventory import Inventory, Role, Slot

_FORMAT = 1  # raise it when roles or slots change


def load(key: str) -> tuple[Inventory | None, dict[str, Any]] | None:
    """Return what was saved under a key: an inventory, and other plain values; ``None`` when nothing usable was."""
    try:
        data = json.loads(_path(key).read_text())
        slots = {Slot(part, Role(role), layer, wide): size for part, role, layer, wide, size in data["slots"]}
        return (Inventory(slots, measured=True) if slots else None), dict(data["more"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(key: str, inventory: Inventory | None, more: dict[str, Any]) -> None:
    """Save an inventory; a cache that cannot be written costs a second reading, no more."""
    slots = inventory.bytes if inventory else {}
    rows = [[slot.part, slot.role.value, slot.layer, slot.wide, size] for slot, size in slots.items()]
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"slots": rows, "more": more}))
        part.replace(path)
    except OSError:
        return


def _path(key: str) -> Path:
    name = hashlib.sha256(f"{_FORMAT}\n{key}".encode()).hexdigest()[:24]
    return platformdirs.user_cache_path("sglang-bw") / "headers" / f"{name}.json"
