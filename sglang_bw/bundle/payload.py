"""Recipes and model folders that travel in a bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_bw.bundle.archive import Member
from sglang_bw.bundle.members import check_name
from sglang_bw.errors import BundleError
from sglang_bw.recipes import lookup, writer
from sglang_bw.recipes.schema import Recipe, Weights

_HEAD = "# Travelled in a bundle: model folders that came along lie in ../models.\n"


@dataclass(frozen=True)
class Extras:
    """Recipes and models by name, their files, and what the user should know about them."""

    recipes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    members: tuple[Member, ...] = ()
    notes: tuple[str, ...] = ()


def gather(recipes: tuple[str, ...], models: tuple[Path, ...]) -> Extras:
    """Find the recipes and the files of the models.

    :raises UnknownRecipeError: no such recipe.
    :raises RecipeError: it breaks the schema.
    :raises BundleError: a model folder or a file behind a link in it is not there, or it has the name of another one.
    :raises BundleUnsafeError: a file of a model has a name that cannot travel.
    """
    folders: dict[str, Path] = {}
    for model in models:
        if folders.setdefault(model.resolve().name, model.resolve()) != model.resolve():
            raise BundleError(f"two model folders are named {model.resolve().name}", hint="rename one of them")
    members, notes = [member for name, folder in folders.items() for member in _files(name, folder)], []
    found = {name: lookup.find(name) for name in recipes}
    for name, recipe in found.items():
        members.append(Member(f"recipes/{recipe.id}.yaml", _text(name, recipe, folders)))
        notes += [f"{recipe.id}: {where}" for where in _elsewhere(recipe, folders)]
    ids = tuple(recipe.id for recipe in found.values())
    if len(set(ids)) != len(ids):
        raise BundleError(f"two recipes have the id {max(ids, key=ids.count)}", hint="rename one of them")
    return Extras(ids, tuple(folders), tuple(members), tuple(notes))


def _files(name: str, folder: Path) -> list[Member]:
    if not (folder / "config.json").is_file():
        raise BundleError(f"{folder} is no model folder: it has no config.json")
    # A hub cache keeps links to its blobs: the files behind them travel.
    paths = sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    if lost := [path for path in paths if not path.exists()]:
        raise BundleError(f"{lost[0]} is a link to a file that is not there", hint="fetch or copy the model again")
    paths = [path for path in paths if path.is_file()]
    return [Member(check_name(name, f"models/{name}/{p.relative_to(folder).as_posix()}"), p) for p in paths]


def _text(name: str, recipe: Recipe, folders: dict[str, Path]) -> bytes:
    moved = {part: _moved(getattr(recipe, part), folders) for part in ("target", "draft")}
    if all(moved[part] == getattr(recipe, part) for part in moved):
        path = Path(name) if name.endswith(lookup.SUFFIXES) else lookup.catalogue()[name]
        return path.read_bytes()
    return writer.text(recipe.model_copy(update=moved), _HEAD).encode()


def _moved(weights: Weights | None, folders: dict[str, Path]) -> Weights | None:
    if weights is None or weights.path is None or weights.path.resolve() not in folders.values():
        return weights
    return weights.model_copy(update={"path": Path("../models") / weights.path.resolve().name})


def _elsewhere(recipe: Recipe, folders: dict[str, Path]) -> list[str]:
    """Return where the target host must have the weights that are not in the bundle."""
    found = []
    for weights in (recipe.target, recipe.draft):
        if weights and weights.id:
            found.append(f"{weights.id} is not in the bundle: the host needs it in its hub cache, or as a folder")
        elif weights and weights.path and weights.path.resolve() not in folders.values():
            found.append(f"the host needs {weights.path}, or take it along with --model")
    return found
