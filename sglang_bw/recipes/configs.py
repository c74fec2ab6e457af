"""A model's config.json: on the disk, in the hub's cache, or the facts that ship with the recipe."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from sglang_bw.models import BUNDLED
from sglang_bw.recipes.schema import Weights

Origin = Literal["local", "hub cache", "shipped"]


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a ``config.json``.

    :ivar origin: ``shipped`` when only configuration facts are there, and never weights.
    :ivar source: where shipped facts come from.
    :ivar assumed: which of them no source states.
    """

    path: Path
    origin: Origin
    source: str = ""
    assumed: str = ""


def find(weights: Weights) -> ModelFolder | None:
    """Return the folder of a model; ``None`` when only the hub has it."""
    if weights.bundled:
        return ModelFolder(BUNDLED / weights.bundled, "local")
    if weights.path:
        return ModelFolder(weights.path, "local") if weights.path.is_dir() else None
    if weights.id and (snapshot := cached(weights.id, weights.revision)):
        return ModelFolder(snapshot, "hub cache")
    return shipped(weights.config) if weights.config else None


def by_id(model: str) -> ModelFolder | None:
    """Return the folder of a hub model: in the cache, or the facts that ship under its id."""
    if snapshot := cached(model):
        return ModelFolder(snapshot, "hub cache")
    name = next((name for name, facts in _sources().items() if model in facts.get("ids", ())), None)
    return shipped(name) if name else None


def cached(model: str, revision: str | None = None) -> Path | None:
    """Return the snapshot of a hub model in the local cache, ``None`` when its config.json is not there."""
    folder = hub_cache() / f"models--{model.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    try:
        commit = reference.read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision or ""
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and (snapshot / "config.json").is_file() else None


def hub_cache() -> Path:
    """Return the hub's cache, found as huggingface_hub finds it."""
    if explicit := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(explicit).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def shipped(name: str) -> ModelFolder:
    """Return the facts that ship under a name.

    :raises KeyError: there are none.
    """
    known = _sources()[name]
    return ModelFolder(_root() / name, "shipped", known["source"], known.get("assumed", ""))


def shipped_names() -> tuple[str, ...]:
    """Return every name of :func:`shipped`."""
    return tuple(_sources())


def _root() -> Path:
    return Path(str(resources.files("sglang_bw.recipes"))) / "models"


@cache
def _sources() -> dict[str, dict[str, Any]]:
    sources: dict[str, dict[str, Any]] = yaml.safe_load((_root() / "sources.yaml").read_text(encoding="utf-8"))
    return sources
