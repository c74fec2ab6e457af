"""Which step of the engine's resolution changed which argument.

Steps declare what they decide, each with the name of its function; what a step changes without declaring is found by
comparing the arguments before and after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any


class Trace:
    """The arguments of one resolution, watched step by step.

    :ivar rules: field -> the step that wrote its last value.
    :ivar environment: variable -> the step that set it.
    :ivar current: the step that runs, or failed.
    """

    def __init__(self) -> None:
        self.rules: dict[str, str] = {}
        self.environment: dict[str, str] = {}
        self.current = ""
        self._before: dict[str, Any] = {}
        self._environ = dict(os.environ)

    def install(self, pipeline: Any) -> None:
        """Watch the steps that ``pipeline`` runs."""
        run_hook, run_pass = pipeline.run_hook, pipeline.run_post_process_pass
        pipeline.run_hook = lambda step, args: self._step(step.__name__, args, lambda: run_hook(step, args))
        pipeline.run_post_process_pass = lambda args, step: self._step(
            step.__name__.lstrip("_"), args, lambda: run_pass(args, step)
        )

    def _step(self, name: str, args: Any, run: Callable[[], Any]) -> None:
        self.compare(args)  # what the steps between hooks did
        outer, self.current = self.current, name
        known = len(_declared(args))
        run()
        self.current = outer
        changed = self.compare(args, name)
        for source, fields in _declared(args)[known:]:
            detail = source.rpartition(".")[2].lstrip("_")
            for field in {part for part in changed if part.partition(".")[0] in fields}:
                self.rules[field] = name if detail in name or name in detail else f"{name}: {detail}"

    def compare(self, args: Any, name: str = "the engine") -> set[str]:
        """Note what changed since the last call as the doing of ``name``; return the fields."""
        now = values(args)
        changed = {field for field, value in now.items() if self._before and not _same(value, self._before.get(field))}
        self.rules.update(dict.fromkeys(changed, name))
        self._before = now
        environ = dict(os.environ)
        self.environment.update({key: name for key, value in environ.items() if self._environ.get(key) != value})
        self._environ = environ
        return changed


def values(args: Any) -> dict[str, Any]:
    """Return every argument as the next step would read it."""
    from sglang.srt.arg_groups.arg_utils import record_fields

    declared: dict[str, Any] = {}
    for _, fields in _declared(args):
        declared.update(fields)
    found: dict[str, Any] = {}
    for field in record_fields(type(args)):
        value = declared[field.name] if field.name in declared else getattr(args, field.name, None)
        found |= dict(_parts(field.name, value))
    return found


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value; of the graphs' configuration what each phase has, since each has flags of its own."""
    phases = [(phase, getattr(value, phase, None)) for phase in ("decode", "prefill")]
    if name != "cuda_graph_config" or not all(part for _, part in phases):
        yield name, value
        return
    for phase, part in phases:
        for key in ("backend", "max_bs", "bs"):
            entry = getattr(part, key, None)
            yield f"{name}.{phase}.{key}", list(entry) if isinstance(entry, list | tuple) else entry


def _declared(args: Any) -> list[tuple[str, dict[str, Any]]]:
    return list(getattr(args, "_resolved_overrides", None) or ())


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other)
