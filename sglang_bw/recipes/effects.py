"""What another engine release means for a recipe: flags that it does not take, evidence that is of another engine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import yaml
from packaging.version import Version

from sglang_bw.errors import BwError
from sglang_bw.recipes import flags
from sglang_bw.recipes.lookup import SUFFIXES, read
from sglang_bw.recipes.releases import Fate, Translation, translate_all
from sglang_bw.recipes.schema import Recipe

_VERSION = re.compile(r"\d+\.\d+(\.\d+)*(\.?post\d+|rc\d+)?")


@dataclass(frozen=True)
class Effects:
    """What a move between two engine releases does to one recipe file.

    ``flags``: those that the new release refuses or calls deprecated, and the old one did not; ``stale``: evidence
    measured with another engine than the new one; ``problem``: why the recipe does not fit or cannot be read.
    """

    path: Path
    flags: tuple[Translation, ...] = ()
    stale: tuple[str, ...] = ()
    problem: str = ""

    @property
    def none(self) -> bool:
        """Whether the recipe goes on as it is."""
        return not (self.flags or self.stale or self.problem)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "recipe": str(self.path),
            "flags": [translation.as_json() for translation in self.flags],
            "stale_evidence": list(self.stale),
            "problem": self.problem,
        }


def user_recipes() -> list[Path]:
    """Return the recipe files in the working directory and below the user's configuration.

    Any YAML file may lie there: those that have the keys of a recipe count.
    """
    folders = (Path(), Path(platformdirs.user_config_dir("sglang-bw")) / "recipes")
    found = (path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir()))
    return [path for path in found if path.suffix in SUFFIXES and path.is_file() and _looks_like_one(path)]


def _looks_like_one(path: Path) -> bool:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError):
        return False
    return isinstance(data, dict) and {"id", "target"} <= data.keys()


def effects(path: Path, old: str, new: str) -> Effects:
    """Return what a move from engine ``old`` to ``new`` (full versions) does to a recipe file.

    A recipe that cannot be read is one of the effects, not an error.
    """
    try:
        recipe = read(path)
    except BwError as error:
        return Effects(path, problem=error.message)
    accepts = recipe.engine.accepts(new)
    problem = "" if accepts else f"it is for sglang {recipe.engine.sglang}, which leaves out {new}"
    return Effects(path, tuple(_changed(recipe, old, new)), tuple(_stale(recipe, new)), problem)


def _changed(recipe: Recipe, old: str, new: str) -> Iterator[Translation]:
    asked = dict.fromkeys(_all_flags(recipe))
    before = translate_all(tuple(asked), old, old)
    for was, now in zip(before, translate_all(tuple(asked), old, new), strict=True):
        if now.breaks or (now.fate is Fate.DEPRECATED and was.fate is not Fate.DEPRECATED):
            yield now


def _all_flags(recipe: Recipe) -> Iterator[flags.Flag]:
    """Yield every flag that the recipe may give the engine, on whatever device."""
    parts = [recipe.args, *(override.args for override in recipe.overrides)]
    parts += [recipe.spec.args] if recipe.spec else []
    parts += [override.spec.get("args") or {} for override in recipe.overrides]
    for args in parts:
        yield from flags.from_mapping(args)


def _stale(recipe: Recipe, new: str) -> Iterator[str]:
    for item in recipe.evidence:
        found = _VERSION.search(item.engine)
        if found and Version(found[0]) != Version(Version(new).public):
            yield f"{item.what} ({item.source}): measured with {item.engine}"
