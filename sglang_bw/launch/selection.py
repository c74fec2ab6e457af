"""What the user wants to serve: a recipe id, a recipe file, or a model of their own."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_bw.errors import ModelFilesError, RecipeError
from sglang_bw.launch import weights
from sglang_bw.recipes import lookup
from sglang_bw.recipes.schema import Draft, Recipe, Speculation, Weights

# owner/name on the hub. A name without owner is refused: it is more often a mistyped recipe.
_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def select(name: str, *, model: str | None = None, draft: str | None = None) -> Recipe:
    """Return the recipe to serve.

    A known id is a recipe, a name ending in .yaml or .yml a recipe file, an existing directory or an owner/name a
    model; a model becomes a recipe of its own, with `draft` and SGLang's usual EAGLE-3 chain (3 steps, 4 tokens).

    :param model: target weights to use instead of the recipe's, an id or a path.
    :param draft: draft weights to use instead of the recipe's, or the model's draft.
    :raises UnknownRecipeError: the name is none of these; names the nearest recipes.
    :raises RecipeError: the recipe breaks the schema, or has no speculation that a draft could serve.
    :raises ModelFilesError: a path that does not exist, or below the home directory of nobody.
    """
    if is_recipe(name):
        recipe = lookup.find(name)
        if draft and recipe.spec is None:
            raise RecipeError(
                f"the recipe {recipe.id} has no spec, so it cannot use a draft",
                hint="Add one to a copy of the recipe: 'spec: {steps: 3, topk: 1, draft_tokens: 4}'.",
            )
        changes = {"target": _weights(model), "draft": _draft(draft)}
        changed = {part: value for part, value in changes.items() if value is not None}
        # What was measured is of the recipe's own models; a path may be a copy of one.
        others = [part for part, value in changed.items() if value.id not in (None, _id_of(recipe, part))]
        return recipe.model_copy(update={**changed, "evidence": ()} if others else changed)
    target = _weights(model or name) if is_model(name) else None
    if target is None:
        raise lookup.unknown(name)
    return Recipe(
        id=_slug(name),
        target=target,
        draft=_draft(draft),
        spec=Speculation() if draft else None,
    )


def _id_of(recipe: Recipe, part: str) -> str | None:
    known = recipe.target if part == "target" else recipe.draft
    return known.id if known else None


def is_recipe(name: str) -> bool:
    """Tell whether a name is a known recipe id or the name of a recipe file."""
    return name in lookup.catalogue() or name.endswith(lookup.SUFFIXES)


def is_model(name: str) -> bool:
    """Tell whether a name is a path or a hub id rather than a recipe."""
    if is_recipe(name):
        return False
    return name.startswith(("/", "./", "../", "~")) or weights.is_directory(name) or bool(_MODEL_ID.fullmatch(name))


def _weights(name: str | None) -> Weights | None:
    if name is None:
        return None
    if path := weights.local(name):
        return Weights(path=path.absolute())
    if not _MODEL_ID.fullmatch(name) or weights.is_directory(Path(name).parent):
        # A first part that is a directory here means a path, and loading would go looking for it on the hub.
        raise ModelFilesError(f"there is no directory {name}", hint="Check the path; a model id is owner/name.")
    return Weights(id=name)


def _draft(name: str | None) -> Draft | None:
    weights = _weights(name)
    return Draft(**weights.model_dump(exclude_unset=True)) if weights else None


def _slug(name: str) -> str:
    slug = re.sub(r"[^a-z0-9._-]+", "-", Path(name.rstrip("/")).name.lower()).strip("-._")
    return slug or "model"
