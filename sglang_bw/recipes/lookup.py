"""Recipes by id or file: find, check, and say in plain words what is wrong with one."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sglang_bw.errors import RecipeError, UnknownRecipeError
from sglang_bw.recipes.schema import Recipe, Weights
from sglang_bw.recipes.source import EXAMPLE, KeyPath, Source, dotted, load

SUFFIXES = (".yaml", ".yml")


def catalogue() -> dict[str, Path]:
    """Return the bundled recipes: id -> file."""
    directory = Path(str(resources.files("sglang_bw.recipes"))) / "catalogue"
    return {path.stem: path for path in sorted(directory.glob("*.yaml"))}


def find(name: str) -> Recipe:
    """Return the recipe of an id, or the one in a YAML file.

    :raises UnknownRecipeError: no such id or file; names the nearest.
    :raises RecipeError: the recipe breaks the schema; lists every finding.
    """
    if name.endswith(SUFFIXES):
        return read(Path(name))
    known = catalogue()
    if name in known:
        return read(known[name])
    raise unknown(name)


def unknown(name: str) -> UnknownRecipeError:
    """Return the error for a name that is nothing we know, with the nearest names."""
    known = list(catalogue())
    near = [recipe for recipe in known if name and name.lower() in recipe] or nearest(name, known) or known
    return UnknownRecipeError(
        f"there is no recipe {name!r}",
        hint=f"did you mean {' or '.join(near)}? A model needs its owner (owner/name) or a path (./name); "
        "`sglang-bw recipes list` shows every recipe.",
    )


def nearest(name: str, known: list[str]) -> list[str]:
    """Return up to three known names that look like ``name``, the closest first."""
    lowered = {candidate.lower(): candidate for candidate in known}
    return [lowered[match] for match in difflib.get_close_matches(name.lower(), list(lowered), n=3, cutoff=0.5)]


def read(path: Path) -> Recipe:
    """Read and check one recipe file; relative weight paths become absolute.

    :raises UnknownRecipeError: the file cannot be read.
    :raises RecipeError: it is not YAML or breaks the schema; lists every finding.
    """
    source = load(path)
    if not isinstance(source.data, dict):
        keys = ", ".join(Recipe.model_fields)
        raise RecipeError(f"{path.name}: a recipe is a mapping with the keys {keys}", hint=EXAMPLE)
    try:
        recipe = Recipe.model_validate(source.data)
    except ValidationError as error:
        findings = list(dict.fromkeys(_findings(error, source)))
        count = f"{len(findings)} finding" + ("s" if len(findings) != 1 else "")
        raise RecipeError(
            "\n".join([f"the recipe {path} has {count}:", *(f"  {finding}" for finding in findings)]),
            hint=EXAMPLE,
        ) from error
    return recipe.model_copy(
        update={part: _anchored(getattr(recipe, part), path.parent) for part in ("target", "draft")}
    )


def _anchored(weights: Weights | None, directory: Path) -> Weights | None:
    if weights is None or weights.path is None:
        return weights
    return weights.model_copy(update={"path": (directory / weights.path).absolute()})


@dataclass(frozen=True)
class _Finding:
    line: int
    at: KeyPath
    text: str


def _findings(error: ValidationError, source: Source) -> list[str]:
    found: list[_Finding] = []
    for detail in error.errors(include_url=False):
        at = _in_file(detail["loc"], source.data)
        place = source.where(at)
        line = int(place.rpartition(":")[2]) if ":" in place else 0
        found += [_Finding(line, at, f"{place}: {text}") for text in _texts(detail, at)]
    # A list with one bad item is also "too short after validation": only the item's own finding helps.
    deeper = {item.at[:length] for item in found for length in range(len(item.at))}
    return [item.text for item in sorted(found, key=lambda item: item.line) if item.at not in deeper or not item.at]


def _texts(detail: ErrorDetails, at: KeyPath) -> list[str]:
    key = dotted(at)
    match detail["type"]:
        case "extra_forbidden":
            return [f"unknown key {key!r}; {_guess(at)}"]
        case "literal_error" if detail["loc"][-1] == "[key]":
            return [f"unknown key {key!r}; {_guess(at)}"]
        case "missing":
            return [f"the key {key!r} is missing"]
        case "value_error":
            return [f"{key + ': ' if key else ''}{text}" for text in str(detail["ctx"]["error"]).splitlines()]
        case _:
            return [f"{key}: {detail['msg'][:1].lower()}{detail['msg'][1:]}, not {detail['input']!r}"]


def _guess(at: KeyPath) -> str:
    known = _keys(at[:-1])
    near = nearest(str(at[-1]), known)
    return f"did you mean {dotted((*at[:-1], near[0]))!r}?" if near else f"known here: {', '.join(known)}"


def _in_file(location: tuple[str | int, ...], data: Any) -> KeyPath:
    """Return the part of an error's location that is in the file: pydantic adds union members and '[key]'."""
    path: list[str | int] = []
    for position, part in enumerate(location):
        in_mapping = isinstance(data, dict) and part in data
        in_list = isinstance(data, list) and isinstance(part, int) and part < len(data)
        is_missing_key = position == len(location) - 1 and part in _keys(tuple(path))
        if not (in_mapping or in_list or is_missing_key):
            break
        path.append(part)
        data = data[part] if in_mapping or in_list else None
    return tuple(path)


def _keys(at: KeyPath) -> list[str]:
    """Return the keys that the schema knows at a place."""
    annotation: Any = Recipe
    for part in at:
        model = _model(annotation)
        if isinstance(part, int) and get_origin(annotation) is tuple:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        elif model and part in model.model_fields:
            annotation = model.model_fields[str(part)].annotation
        else:
            return []
    if get_origin(annotation) is dict:
        return [str(key) for key in get_args(get_args(annotation)[0])]
    model = _model(annotation)
    return list(model.model_fields) if model else []


def _model(annotation: Any) -> type[BaseModel] | None:
    """Return the model in ``Model`` or ``Model | None``."""
    kinds = get_args(annotation) or (annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
