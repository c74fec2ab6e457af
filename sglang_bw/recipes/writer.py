"""Write a recipe as YAML, in the order in which people read one."""

from __future__ import annotations

from typing import Any

import yaml

from sglang_bw.recipes.schema import Recipe

_HEAD = """\
# Written by `sglang-bw recipes new` from the models' config.json and the machine; nothing of it was run.
# `sglang-bw plan` says what the engine makes of it. Add what you measure to `evidence`.
"""


def text(recipe: Recipe, head: str = _HEAD) -> str:
    """Return a recipe file with a comment above it; keys that say nothing are left out."""
    data: dict[str, Any] = recipe.model_dump(mode="json", exclude_defaults=True)
    if recipe.spec:
        data["spec"] = recipe.spec.model_dump(mode="json", exclude=None if recipe.spec.args else {"args"})
    hardware = data.get("hardware", {})
    data["hardware"] = {key: value[0] if len(value) == 1 else value for key, value in hardware.items()}
    return head + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
