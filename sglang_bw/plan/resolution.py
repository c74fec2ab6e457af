"""A command line as the engine will take it: what it changes, what it refuses, and the step that did it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Bookkeeping of the engine, or different on every start.
_NOISE = frozenset({"random_seed", "served_model_name", "tokenizer_path", "custom_weight_loader", "mm_process_config"})
_HOUSEKEEPING = ("_CACHE_DIR", "_CACHE_PATH", "WORKSPACE_BASE", "NVRTC")


@dataclass(frozen=True)
class Change:
    """One value that the engine will use and nobody asked for in this form.

    :ivar name: the engine's argument, ``cuda_graph_config.decode.max_bs`` for a part of one.
    :ivar asked: what the command line says; ``None`` when it leaves the choice to the engine.
    :ivar explicit: whether the command line says anything.
    :ivar rule: the resolution step (``handle_gpu_memory_settings``), with the function behind it where that differs.
    """

    name: str
    asked: Any
    effective: Any
    rule: str
    explicit: bool


@dataclass(frozen=True)
class Refusal:
    """The engine ends at this command line.

    :ivar rule: the resolution step that refused.
    """

    rule: str
    message: str


@dataclass(frozen=True)
class Resolution:
    """A command line as the engine will take it.

    :ivar asked: argument -> value, only what the command line says.
    :ivar effective: argument -> value, all of them; what is known without the engine when ``restated``.
    :ivar changes: values that differ from what was asked, explicit ones first.
    :ivar environment: variable -> value that the engine sets for itself, with the step.
    :ivar notes: warnings that the engine logged.
    :ivar refusal: why the engine does not start, ``None`` when it does.
    :ivar source: ``engine`` when its own rules ran, ``restated`` when only our copy of the formulas did.
    :ivar engine: version.
    """

    asked: Mapping[str, Any]
    effective: Mapping[str, Any]
    changes: tuple[Change, ...] = ()
    environment: Mapping[str, tuple[str | None, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    refusal: Refusal | None = None
    source: Literal["engine", "restated"] = "engine"
    engine: str = ""
    cached: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return everything, for programs."""
        return {
            "source": self.source,
            "engine": self.engine,
            "cached": self.cached,
            "asked": dict(self.asked),
            "effective": dict(self.effective),
            "changes": [vars(change) for change in self.changes],
            "environment": {name: {"value": value, "rule": rule} for name, (value, rule) in self.environment.items()},
            "notes": list(self.notes),
            "refusal": vars(self.refusal) if self.refusal else None,
        }


def of_answer(answer: dict[str, Any], *, fresh: bool) -> Resolution:
    """Return what the engine's child answered, each change with the step that made it."""
    asked, effective, rules = answer.get("asked", {}), answer.get("effective", {}), answer.get("rules", {})
    environment = {
        name: (value, rule)
        for name, (value, rule) in answer.get("environment", {}).items()
        if not name.endswith(_HOUSEKEEPING)
    }
    refused = answer["outcome"] == "refused"
    return Resolution(
        asked=asked,
        effective=effective,
        changes=tuple(sorted(_changes(asked, effective, rules), key=lambda change: not change.explicit)),
        environment=environment,
        notes=tuple(answer.get("notes", ())),
        refusal=Refusal(answer["rule"], answer["error"]) if refused else None,
        engine=answer.get("engine", ""),
        cached=not fresh,
    )


def _changes(asked: dict[str, Any], effective: dict[str, Any], rules: dict[str, str]) -> list[Change]:
    changes = []
    for name, rule in rules.items():
        if name.startswith("_") or name in _NOISE or name.partition(".")[0] not in effective:
            continue
        value = look_up(effective, name)
        wish = asked.get(name, asked.get(_flat(name)))
        if wish is None or not _equal(wish, value):
            changes.append(Change(name, wish, value, rule, explicit=wish is not None))
    return changes


def look_up(effective: Mapping[str, Any], name: str) -> Any:
    """Return an argument, or a part of one: ``cuda_graph_config.decode.max_bs``; ``None`` when it is not there."""
    value: Any = effective
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _flat(part: str) -> str:
    """Return the argument of a part's own flag: ``cuda_graph_max_bs_decode``."""
    pieces = part.split(".")
    return f"cuda_graph_{pieces[2]}_{pieces[1]}" if len(pieces) == 3 else part


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float | int):
        return abs(one - other) < 1e-9
    return bool(one == other)
