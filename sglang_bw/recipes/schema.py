"""What a recipe may say: one model with its draft, tied to engine versions, with overrides per hardware."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from sglang_bw.recipes.evidence import Composition, Evidence, Failure, Workload
from sglang_bw.recipes.hardware import DEVICES, Device, Graphs, Hardware, Memory, Override, Target
from sglang_bw.recipes.values import ID, Args, ArgValue, Env, Part, SpecArgs, expand

AnyPart = TypeVar("AnyPart", bound=Part)

__all__ = ["DEVICES", "Device", "Draft", "Engine", "Hardware", "Launch", "Recipe", "Speculation", "Weights", "expand"]


class Engine(Part):
    """The engine releases that the recipe was written for."""

    sglang: str = Field(default="", description="PEP 440 specifier, for example '>=0.5.23,<0.5.24'; empty: any.")

    @field_validator("sglang")
    @classmethod
    def _is_specifier(cls, text: str) -> str:
        try:
            SpecifierSet(text)
        except InvalidSpecifier as error:
            raise ValueError(f"{text!r} is not a version range such as '>=0.5.23,<0.5.24'") from error
        return text

    def accepts(self, version: str) -> bool:
        """Tell whether an engine of this version is in the range; a local version counts as its base."""
        return SpecifierSet(self.sglang).contains(version, prereleases=True)


class Weights(Part):
    """Where a model comes from: exactly one of id, path and bundled.

    In YAML a plain string is short for ``path`` when it begins with ``/``, ``./``, ``../`` or ``~``, else for ``id``.
    """

    id: str | None = Field(default=None, min_length=1, description="Model id on the hub: owner/name.")
    path: Annotated[Path, AfterValidator(expand)] | None = Field(
        default=None, description="Local directory; relative ones start at the recipe's file."
    )
    bundled: str | None = Field(default=None, description="Directory below sglang_bw/models.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of `id`.")
    not_pinned: str = Field(default="", description="Why `revision` is empty.")
    config: str | None = Field(
        default=None, description="Configuration facts below sglang_bw/recipes/models, used where config.json is not."
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"path" if data.startswith(("/", "./", "../", "~")) else "id": data}
        return data

    @model_validator(mode="after")
    def _exactly_one(self) -> Weights:
        given = [name for name in ("id", "path", "bundled") if getattr(self, name) is not None]
        if len(given) != 1 and not (self._inside_target() and not given):
            raise ValueError(f"needs exactly one of id, path and bundled, has {' and '.join(given) or 'none'}")
        if self.revision is not None and self.id is None:
            raise ValueError("revision goes with id only")
        return self

    def _inside_target(self) -> bool:
        return False


class Draft(Weights):
    """The draft. ``mtp``: the layers that the target's own checkpoint brings, so there is no place to give."""

    kind: Literal["mla", "mha", "mtp"] | None = Field(default=None, description="Its attention, or mtp.")

    def _inside_target(self) -> bool:
        return self.kind == "mtp"

    @property
    def separate(self) -> bool:
        """Whether it is a checkpoint of its own."""
        return any(getattr(self, name) is not None for name in ("id", "path", "bundled"))


class Speculation(Part):
    """How many tokens are drafted and verified in a round."""

    algorithm: Literal["EAGLE3", "EAGLE", "NEXTN", "STANDALONE"] = "EAGLE3"
    steps: int = Field(default=3, ge=1, description="Draft steps in a round: the depth of the tree.")
    topk: int = Field(default=1, ge=1, description="Branches of a draft step; 1 is a chain.")
    draft_tokens: int = Field(default=4, ge=2, description="Tokens that one verify pass sees, the root included.")
    args: SpecArgs = Field(default_factory=dict, description="More engine flags of the speculation.")

    @model_validator(mode="after")
    def _fits(self) -> Speculation:
        if self.topk == 1 and self.draft_tokens != self.steps + 1:
            raise ValueError(f"a chain (topk 1) of {self.steps} steps verifies {self.steps + 1} draft_tokens")
        most = 1 + self.topk + (self.steps - 1) * self.topk**2
        if self.draft_tokens > most:
            raise ValueError(f"{self.steps} steps with topk {self.topk} draft at most {most} draft_tokens")
        return self


class Warmup(Part):
    """What `serve` asks right after the start."""

    format: Literal["chat", "text"] = Field(default="chat", description="Chat template, or the bare prompt.")
    prompts: tuple[str, ...] = Field(
        default=(
            "Explain in a few sentences why the sky is blue.",
            "Write a Python function that returns the n-th Fibonacci number.",
            "A train leaves at 9:40 and arrives at 12:05. How long is the journey? Think step by step.",
        ),
        min_length=1,
    )
    max_new_tokens: int = Field(default=64, ge=16, le=1024)


@dataclass(frozen=True)
class Launch:
    """A recipe on one machine, its overrides applied.

    :ivar args: engine flags without dashes, graphs and memory included, in the spelling of the newest release.
    """

    args: dict[str, ArgValue]
    env: dict[str, str]
    spec: Speculation | None
    graphs: Graphs
    memory: Memory


class Recipe(Part):
    """One way to serve one model.

    :ivar args: engine flags without dashes; ``true`` is a switch, a list several values.
    :ivar env: environment of the engine; a variable that the user has set wins.
    """

    id: str = Field(pattern=rf"^{ID.pattern}$")
    title: str = ""
    engine: Engine = Field(default_factory=Engine)
    hardware: Target = Field(default_factory=Target)
    target: Weights
    draft: Draft | None = None
    spec: Speculation | None = None
    args: Args = Field(default_factory=dict)
    env: Env = Field(default_factory=dict)
    graphs: Graphs = Field(default_factory=Graphs)
    memory: Memory = Field(default_factory=Memory)
    nodes: int = Field(default=1, ge=1, le=256, description="Machines that serve it together, each of `hardware`.")
    overrides: tuple[Override, ...] = ()
    workloads: tuple[Workload, ...] = ()
    composition: Composition = Field(default_factory=Composition)
    evidence: tuple[Evidence, ...] = ()
    known_failures: tuple[Failure, ...] = ()
    baseline_where_it_loses: bool = Field(
        default=False, description="`serve` leaves speculation off where the plan says that it loses."
    )
    warmup: Warmup = Field(default_factory=Warmup)

    @model_validator(mode="after")
    def _draft_with_spec(self) -> Recipe:
        if self.spec is not None and self.draft is None:
            raise ValueError("spec needs a draft, or 'draft: {kind: mtp}' for the target's own MTP layers")
        if self.draft is not None and self.spec is None:
            raise ValueError("draft needs a spec, for example 'spec: {steps: 3, topk: 1, draft_tokens: 4}'")
        if self.draft and not self.draft.separate and self.spec and self.spec.algorithm not in ("EAGLE", "NEXTN"):
            raise ValueError("a draft of kind mtp needs spec.algorithm NEXTN or EAGLE")
        for index, override in enumerate(self.overrides):
            self._check_spec(index, override)
        return self

    def _check_spec(self, index: int, override: Override) -> None:
        if override.spec and self.spec is None:
            raise ValueError(f"overrides[{index}].spec needs a spec to change")
        try:
            _changed(self.spec, override)
        except ValidationError as error:
            told = [f"overrides[{index}].spec: {detail['msg']}" for detail in error.errors(include_url=False)]
            raise ValueError("\n".join(told)) from None

    def on(self, hardware: Hardware) -> Launch:
        """Return what the recipe says for one machine; of overrides that meet, the last one wins."""
        args, env, spec, graphs, memory = dict(self.args), dict(self.env), self.spec, self.graphs, self.memory
        for override in self.overrides:
            if override.when.holds(hardware):
                args |= override.args
                env |= override.env
                spec = _changed(spec, override)
                graphs = _over(graphs, override.graphs)
                memory = _over(memory, override.memory)
        structured: dict[str, ArgValue] = {
            "mem-fraction-static": memory.fraction,
            "kv-cache-dtype": memory.kv_dtype,
            "cuda-graph-max-bs-decode": graphs.decode_max_bs,
            "cuda-graph-bs-decode": list(graphs.decode_bs) or None,
        }
        given = {name: value for name, value in structured.items() if value is not None}
        return Launch({**args, **given}, env, spec, graphs, memory)


def _changed(spec: Speculation | None, override: Override) -> Speculation | None:
    if spec is None or not override.spec:
        return spec
    changes: dict[str, Any] = {str(key): value for key, value in override.spec.items()}
    if "args" in changes:
        changes["args"] = {**spec.args, **(changes["args"] or {})}
    return Speculation.model_validate({**spec.model_dump(), **changes})


def _over(base: AnyPart, winning: AnyPart) -> AnyPart:
    return base.model_copy(update={name: getattr(winning, name) for name in winning.model_fields_set})
