"""The recipe that a search ends with: the winner's settings, how they were measured, and what failed on the way."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from sglang_bw.experiment import space as spaces
from sglang_bw.experiment.space import AS_IS, OFF, STEPS, Choice
from sglang_bw.experiment.tune import Tried
from sglang_bw.ledger.record import Host, RunRecord
from sglang_bw.recipes import chain, writer
from sglang_bw.recipes.hardware import Device
from sglang_bw.recipes.schema import Recipe

_SPEC = {chain.STEPS: "steps", chain.TOPK: "topk", chain.DRAFT_TOKENS: "draft_tokens"}
_HEAD = """\
# Written by `sglang-bw tune`: the settings under `overrides` were faster on one machine, with one set of prompts.
# What was tried is in the ledger: `sglang-bw ledger list --study {study}`.
"""
_MOST_FAILURES = 10


def recipe(base: Recipe, winner: Tried, tried: Iterable[Tried], run: RunRecord, device: Device) -> Recipe:
    """Return the recipe with the winner's settings and their evidence.

    :param run: the winner's comparison with the recipe as it is.
    """
    data = base.model_dump(mode="python", exclude_defaults=True)
    data["id"] = f"{base.id}-tuned"
    data["title"] = f"{base.title or base.id}; {spaces.says(winner.choice)}"
    if winner.choice.get(STEPS) == OFF:
        data = _without_speculation(data)
    if override := _override(winner.choice, base):
        data["overrides"] = [*data.get("overrides", ()), {"when": {"device": device}, **override}]
    data["evidence"] = [*data.get("evidence", ()), _evidence(winner, run)]
    failures = [one for one in tried if one.result == "failed"][:_MOST_FAILURES]
    data["known_failures"] = [*data.get("known_failures", ()), *map(_failure, failures)]
    return Recipe.model_validate(data)


def text(found: Recipe, study: str) -> str:
    """Return the recipe as a file."""
    return writer.text(found, _HEAD.format(study=shlex.quote(study)))


def _override(choice: Choice, base: Recipe) -> dict[str, Any]:
    """Return the winner's settings as an override of a recipe."""
    parts: dict[str, dict[str, Any]] = {"args": {}, "spec": {}, "graphs": {}, "memory": {}}
    for name, value in choice.items():
        if value in (AS_IS, OFF):
            continue
        if name == STEPS:
            parts["spec"] |= {"steps": int(value), "draft_tokens": chain.draft_tokens(int(value))}
        elif name in _SPEC:
            parts["spec"][_SPEC[name]] = int(value)
        elif name == "cuda-graph-max-bs-decode":
            parts["graphs"]["decode_max_bs"] = int(value)
        elif name == "mem-fraction-static":
            parts["memory"]["fraction"] = float(value)
        elif name == "kv-cache-dtype":
            parts["memory"]["kv_dtype"] = value
        elif name.startswith("speculative-"):
            parts["spec"].setdefault("args", {})[name] = value
        else:
            parts["args"][name] = {"true": True, "false": False}.get(value, int(value) if value.isdigit() else value)
    spec = parts["spec"]
    if base.spec and {"topk", "steps"} & set(spec) and spec.get("topk", base.spec.topk) == 1:
        spec["draft_tokens"] = chain.draft_tokens(spec.get("steps", base.spec.steps))
    return {name: part for name, part in parts.items() if part}


def _without_speculation(data: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in data.items() if name not in ("spec", "draft")}
    overrides = [{name: value for name, value in one.items() if name != "spec"} for one in data.get("overrides", ())]
    return kept | {"overrides": overrides}


def _evidence(winner: Tried, run: RunRecord) -> dict[str, Any]:
    assert winner.score is not None
    numbers = {"ratio": winner.score.value, "ratio_low": winner.score.low, "ratio_high": winner.score.high}
    for one in run.outcome.ratios if run.outcome else ():
        numbers |= {f"tok_s_at_{one.concurrency}": one.b.tok_s, f"tok_s_before_at_{one.concurrency}": one.a.tok_s}
        if one.b.accept_length is not None:
            numbers[f"accept_length_at_{one.concurrency}"] = one.b.accept_length
    simulated = " (acceptance simulated: no real speed)" if run.simulated else ""
    return {
        "what": f"{run.arms[1].says} against {run.arms[0].says}, prompts {run.settings.get('prompts')}{simulated}",
        "source": f"sglang-bw tune, entry {winner.entry} of the ledger",
        "date": datetime.now(UTC).date(),
        "engine": f"sglang {run.arms[1].engine.version}",
        "hardware": _machine(run.host),
        "numbers": {name: round(value, 4) for name, value in numbers.items()},
    }


def _failure(one: Tried) -> dict[str, Any]:
    return {"symptom": f"{spaces.says(one.choice)}: {one.why}"[:400], "source": f"entry {one.entry} of the ledger"}


def _machine(host: Host) -> str:
    return f"{', '.join(host.gpus) or host.cpu}, {host.cores} cores"
