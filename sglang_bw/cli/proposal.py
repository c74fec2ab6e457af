"""A recipe proposed for a model and a machine: the first division and fraction with which it fits."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from packaging.version import Version

from sglang_bw.cli import planning
from sglang_bw.cli.planning import Wish
from sglang_bw.errors import CheckpointError, PlanDoesNotFitError, PlanInputError
from sglang_bw.launch import command as commands
from sglang_bw.plan import models
from sglang_bw.plan import plan as plans
from sglang_bw.plan.models import Models
from sglang_bw.plan.plan import Plan
from sglang_bw.recipes.evidence import Composition, Workload
from sglang_bw.recipes.hardware import Graphs, Memory, Target
from sglang_bw.recipes.schema import Draft, Engine, Recipe, Speculation

# Generous first: what the fraction leaves is for graphs and activations, and the plan says when it is too little.
_FRACTIONS = (0.90, 0.85, 0.80, 0.75)
_ALL = (True, sys.maxsize)
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


def propose(wish: Wish, name: str | None, *, force: bool = False) -> tuple[Recipe, tuple[str, ...]]:
    """Return a recipe and what to know about it.

    :raises PlanDoesNotFitError: it fits in no division of these GPUs; not with ``force``.
    :raises PlanInputError: the GPUs are not known, or nothing is known of the model.
    """
    first = planning.question(wish)
    tried: Plan | None = None
    for count in _counts(first.machine.count):
        for fraction in _FRACTIONS:
            made = _try(wish, name, count, fraction)
            if made is None:
                break
            tried = made if tried is None or _worth(made) > _worth(tried) else tried
        if tried and _worth(tried) == _ALL:
            break
    if tried is None:
        raise PlanInputError(
            f"{wish.name} cannot be divided over {first.machine.count} GPUs",
            hint="Attention heads and experts must divide by the number; try another with --gpus.",
        )
    if tried.ledger.verdict == "does not fit" and not force:
        raise PlanDoesNotFitError(
            "\n".join([f"{wish.name} does not fit:", *(f"  {line}" for line in tried.ledger.reasons)]),
            hint="A smaller --context, more GPUs with --gpus, or a quantized checkpoint; --force writes it anyway.",
        )
    return _finished(tried, wish), (*tried.notes, *tried.ledger.reasons)


def _worth(made: Plan) -> tuple[bool, int]:
    """Compare plans: does it fit with room, and how many of the requests does it hold at once."""
    demand = made.demands[0]
    held = demand.resident if demand.resident < demand.concurrency else sys.maxsize
    return made.ledger.verdict == "fits", held if made.ledger.verdict != "does not fit" else -1


def _counts(most: int) -> Iterator[int]:
    """Yield numbers of GPUs that models can be divided by: the powers of two, and all of them."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size <= most]
    yield from sizes if most in sizes else [*sizes, most]


def _try(wish: Wish, name: str | None, count: int, fraction: float) -> Plan | None:
    """Plan one division; ``None`` when the model cannot be divided so."""
    question = planning.question(wish)
    known = models.read(question)
    recipe = _recipe(question.recipe, known, name, count, fraction, wish, question.engine.version)
    machine = replace(question.machine, count=count, fabric=question.machine.fabric if count > 1 else "")
    command = commands.build(recipe, machine, {}, version=question.engine.version)
    asked = replace(question, recipe=recipe, machine=machine, flags=command.flags, env=command.env)
    try:
        return plans.make(asked, ask="no")
    except CheckpointError:
        return None


def _recipe(
    base: Recipe, known: Models, name: str | None, count: int, fraction: float, wish: Wish, version: str
) -> Recipe:
    draft, spec = _draft(base, known)
    release = Version(version).release
    return Recipe(
        id=name or base.id,
        title=f"{wish.name}, written by `recipes new`",
        engine=Engine(sglang=f">={_joined(release)},<{_joined((*release[:2], release[2] + 1))}"),
        target=base.target,
        draft=draft,
        spec=spec,
        args=_args(known.target.config, count, wish),
        graphs=Graphs(decode_max_bs=max(wish.concurrency or 1, 1)),
        memory=Memory(fraction=fraction),
    )


def _draft(base: Recipe, known: Models) -> tuple[Draft | None, Speculation | None]:
    if base.draft and known.draft:
        latent = all(known.draft.config.get(key) for key in ("kv_lora_rank", "qk_rope_head_dim"))
        return base.draft.model_copy(update={"kind": "mla" if latent else "mha"}), Speculation()
    text: Mapping[str, Any] = known.target.config.get("text_config") or known.target.config
    if any(text.get(key) for key in _MTP_KEYS):
        return Draft(kind="mtp"), Speculation(algorithm="NEXTN")
    return None, None


def _args(config: Mapping[str, Any], count: int, wish: Wish) -> dict[str, Any]:
    args: dict[str, Any] = {"tp-size": count} if count > 1 else {}
    if "auto_map" in config:
        args["trust-remote-code"] = True
    return {**args, "max-running-requests": max(wish.concurrency or 1, 1)}


def _finished(made: Plan, wish: Wish) -> Recipe:
    machine, recipe = made.question.machine, made.question.recipe
    hardware: dict[str, Any] = {"arch": machine.arch, "gpus": machine.count, "board": machine.board}
    if machine.fabric:
        hardware["fabric"] = machine.fabric
    load = Workload(name="asked for", context=wish.context or 1, concurrency=wish.concurrency or 1)
    return recipe.model_copy(
        update={
            "hardware": Target.model_validate(hardware),
            "workloads": (load,),
            "composition": Composition(untested="Everything: nobody has run this recipe yet."),
        }
    )


def _joined(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
