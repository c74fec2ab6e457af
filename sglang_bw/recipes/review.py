"""What a recipe that follows the schema may still have wrong: flags of other releases, weights that are not pinned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from packaging.version import Version

from sglang_bw.recipes import configs, flags, releases
from sglang_bw.recipes.schema import Recipe, Weights
from sglang_bw.recipes.values import ArgValue


@dataclass(frozen=True)
class Review:
    """Findings about one recipe.

    :ivar errors: the launch would not start.
    :ivar warnings: it would start, and may not be what was meant.
    """

    errors: tuple[str, ...] = field(default_factory=tuple)
    warnings: tuple[str, ...] = field(default_factory=tuple)


def review(recipe: Recipe) -> Review:
    """Look at a recipe's flags in every engine release of its range, and at its weights."""
    errors: list[str] = []
    warnings: list[str] = []
    wanted = [release for release in releases.releases() if recipe.engine.accepts(release)]
    if not wanted:
        warnings.append(f"no release in {recipe.engine.sglang} is known here: its flags were not looked at")
    for place, args in _args(recipe):
        for finding, breaks in _flag_findings(place, args, wanted):
            (errors if breaks else warnings).append(finding)
    for role, weights in (("target", recipe.target), ("draft", recipe.draft)):
        if weights is not None:
            warnings += _pin_findings(role, weights)
            errors += _config_findings(role, weights)
    return Review(tuple(errors), tuple(warnings))


def _args(recipe: Recipe) -> Iterator[tuple[str, dict[str, ArgValue]]]:
    yield "args", recipe.args
    if recipe.spec:
        yield "spec.args", recipe.spec.args
    for index, override in enumerate(recipe.overrides):
        yield f"overrides[{index}].args", override.args
        yield f"overrides[{index}].spec.args", override.spec.get("args") or {}


def _flag_findings(place: str, args: dict[str, ArgValue], wanted: list[str]) -> Iterator[tuple[str, bool]]:
    """Yield what is wrong with a flag, once, and whether the newest release of the range refuses it."""
    for flag in flags.from_mapping(args):
        found = {release: releases.translate(flag, None, release) for release in wanted}
        told = {release: one for release, one in found.items() if one.fate is not releases.Fate.SAME}
        if not told:
            continue
        newest = max(told, key=Version)
        where = "" if len(told) == len(wanted) else f" (in {', '.join(sorted(told, key=Version))})"
        instead = " ".join(token for new in told[newest].flags for token in new.tokens())
        advice = f": write {instead.replace('--', '')}" if instead and told[newest].breaks else ""
        yield f"{place}.{flag.name}: {told[newest].reason}{advice}{where}", told[newest].breaks


def _pin_findings(role: str, weights: Weights) -> Iterator[str]:
    if weights.id and not weights.revision:
        yield f"{role} {weights.id} is not pinned: {weights.not_pinned or 'give revision, a commit'}"


def _config_findings(role: str, weights: Weights) -> Iterator[str]:
    if weights.config and weights.config not in configs.shipped_names():
        yield f"{role}.config: {weights.config!r} does not ship; known: {', '.join(configs.shipped_names())}"
