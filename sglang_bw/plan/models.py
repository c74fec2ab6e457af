"""The target and the draft of a launch, as far as they are known without loading them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglang_bw.errors import CheckpointError, PlanInputError, UnknownModelError
from sglang_bw.plan import checkpoint
from sglang_bw.plan.checkpoint import Checkpoint
from sglang_bw.plan.config import read_shape
from sglang_bw.plan.question import Question
from sglang_bw.plan.shapes import ModelShape
from sglang_bw.recipes import configs, flags
from sglang_bw.recipes.schema import Weights


@dataclass(frozen=True)
class Models:
    """What is known of both models.

    :ivar draft: of a checkpoint of its own; ``None`` with MTP layers or without speculation.
    :ivar folders: name on the command line -> folder with its configuration, for the engine's resolution.
    :ivar notes: how well the sizes are known.
    """

    target: Checkpoint
    draft: Checkpoint | None
    folders: dict[str, Path]
    notes: tuple[str, ...]


def read(question: Question, progress: Callable[[int, int], None] | None = None) -> Models:
    """Read configuration and headers of the models of a launch.

    :raises UnknownModelError: nothing at hand describes a model.
    :raises PlanInputError: a path that does not exist.
    :raises CheckpointError: what is there is damaged, or lacks fields.
    """
    recipe = question.recipe
    folders: dict[str, Path] = {}
    notes: list[str] = []

    def one(role: str, name: str, weights: Weights | None) -> Checkpoint:
        place = _place(name, weights)
        if place is None or (question.fetch and place.origin == "shipped"):
            found = _from_hub(role, name, weights, question.fetch, progress)
        else:
            found = checkpoint.read_directory(place.path, name=name)
            folders[name] = place.path
            if place.origin == "shipped":
                notes.append(f"{role} {name}: {_shipped_note(place)}")
        notes.extend(f"{role} {name}: {note}" for note in found.notes if place is None or place.origin != "shipped")
        return found

    target_name = flags.value(question.flags, "model-path") or ""
    target = one("target", target_name, recipe.target)
    draft_name = flags.value(question.flags, "speculative-draft-model-path")
    speculates = flags.has(question.flags, "speculative-algorithm")
    draft = one("draft", draft_name, recipe.draft) if speculates and draft_name else None
    return Models(target, draft, folders, tuple(notes))


def shape(name: str, weights: Weights | None) -> ModelShape:
    """Return the shape of a model from its configuration alone: on the disk, or the facts that ship with a recipe.

    :raises PlanInputError: a path that does not exist.
    :raises CheckpointError: nothing at hand describes it, or what is there is damaged.
    """
    place = _place(name, weights)
    if place is None:
        return checkpoint.read(name, revision=weights.revision if weights else None).shape
    file = place.path / "config.json"
    return read_shape(checkpoint.read_config(file), origin=str(file))


def _place(name: str, weights: Weights | None) -> configs.ModelFolder | None:
    """Return where the model that the command line names is described; the recipe's facts count for its own model."""
    if weights and (weights.id == name or weights.id is None):
        place = configs.find(weights)
        if place and (weights.id or str(place.path) == name):
            return place
    path = Path(name).expanduser() if name.startswith("~") else Path(name)
    if path.is_dir():
        return configs.ModelFolder(path, "local")
    if name.startswith(("/", ".", "~")):
        raise PlanInputError(f"there is no directory {name}", hint="Check the path; a model id is owner/name.")
    return configs.by_id(name)


def _from_hub(
    role: str, name: str, weights: Weights | None, fetch: bool, progress: Callable[[int, int], None] | None
) -> Checkpoint:
    revision = weights.revision if weights else None
    try:
        return checkpoint.read(name, revision=revision, fetch=fetch, progress=progress)
    except CheckpointError as error:
        if fetch:
            raise
        raise UnknownModelError(
            f"no configuration of the {role} {name} is at hand: it is neither on this disk nor in a recipe",
            hint="--fetch-headers reads its configuration and headers from the hub, a few MB; "
            "or give a directory with its config.json in place of the id.",
        ) from error


def _shipped_note(place: configs.ModelFolder) -> str:
    assumed = f"; assumed: {place.assumed}" if place.assumed else ""
    return f"not on this disk, so its sizes are facts that ship with the recipe ({place.source}{assumed})"
