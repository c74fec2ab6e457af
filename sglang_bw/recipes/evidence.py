"""What is known of a recipe: what was measured and by whom, what was run together, what went wrong."""

from __future__ import annotations

import datetime

from pydantic import Field

from sglang_bw.recipes.values import Part


class Evidence(Part):
    """Something that was measured, once, by somebody.

    ``numbers`` are named with their unit: ``tok_s``, ``accept_length`` (tokens a verify pass emits, the bonus token
    included), ``kv_tokens``, ``weights_gib_per_gpu``, ``concurrency``, ``context_tokens``, ``draft_steps``.
    """

    what: str = Field(min_length=1, description="What was run, in one line.")
    source: str = Field(min_length=1, description="Where it is published, or who measured it.")
    date: datetime.date | None = Field(default=None, description="When it was measured or published.")
    engine: str = Field(default="", description="Engine and version.")
    hardware: str = ""
    numbers: dict[str, float] = Field(default_factory=dict)
    ours: bool = Field(default=False, description="Measured by this project, with this recipe.")


class Failure(Part):
    """A way in which this launch is known to fail."""

    symptom: str = Field(min_length=1)
    cause: str = ""
    fix: str = ""
    source: str = Field(min_length=1)


class Composition(Part):
    """Which parts of the recipe were ever run together, and which are put together here for the first time."""

    run_together: str = ""
    untested: str = ""


class Workload(Part):
    """Traffic that the recipe is meant for, in the plan's terms."""

    name: str = Field(min_length=1)
    context: int = Field(ge=1, description="Tokens of one request, prompt and answer.")
    concurrency: int = Field(ge=1, description="Requests at the same time.")
    note: str = ""
