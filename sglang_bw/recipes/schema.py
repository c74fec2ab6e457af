"""What a recipe may say: one model with its draft, tied to engine versions, with overrides per device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from sglang_bw.recipes import flags

Device = Literal["cpu", "cuda"]
DEVICES: tuple[Device, ...] = ("cpu", "cuda")

# Flags that a structured field of the recipe, or an option of `serve`, already sets.
_OWNED = {
    "model-path": "target",
    "revision": "target.revision",
    "speculative-draft-model-path": "draft",
    "speculative-draft-model-revision": "draft.revision",
    "speculative-algorithm": "spec.algorithm",
    "speculative-num-steps": "spec.steps",
    "speculative-eagle-topk": "spec.topk",
    "speculative-num-draft-tokens": "spec.draft_tokens",
    "device": "devices.cpu or devices.cuda, and `serve --device`",
    "host": "`serve --host`",
    "port": "`serve --port`",
}
_FLAG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

ArgValue = bool | int | float | str | list[int | float | str] | None
EnvValue = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value)]


def _flag_findings(args: dict[str, ArgValue]) -> list[str]:
    findings = []
    for name in args:
        if not _FLAG_NAME.fullmatch(name):
            findings.append(f"{name!r} is not a flag name: write it without leading dashes, words joined by '-'")
        elif owner := _OWNED.get(flags.Flag(name).key):
            findings.append(f"{name!r} is set by {owner}")
    return findings


def _spec_args(args: dict[str, ArgValue]) -> dict[str, ArgValue]:
    return _all_or_raise(args, _flag_findings(args))


def _plain_args(args: dict[str, ArgValue]) -> dict[str, ArgValue]:
    findings = _flag_findings(args)
    findings += [
        f"{name!r} belongs into spec.args, which the baseline leaves out"
        for name in args
        if name.startswith("speculative-") and flags.Flag(name).key not in _OWNED
    ]
    return _all_or_raise(args, findings)


def _all_or_raise(args: dict[str, ArgValue], findings: list[str]) -> dict[str, ArgValue]:
    if findings:
        raise ValueError("\n".join(findings))
    return args


def _env_names(env: dict[str, str]) -> dict[str, str]:
    for name in env:
        if not _ENV_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of an environment variable")
    return env


def expand(path: Path) -> Path:
    """Return a path with ``~`` and ``~user`` replaced.

    :raises ValueError: there is no such user, or no home directory.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"there is no home directory {path.parts[0]}") from error


Args = Annotated[dict[str, ArgValue], AfterValidator(_plain_args)]
SpecArgs = Annotated[dict[str, ArgValue], AfterValidator(_spec_args)]
Env = Annotated[dict[str, EnvValue], AfterValidator(_env_names)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Engine(_Part):
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


class Weights(_Part):
    """Where a model comes from: exactly one of the three.

    In YAML a plain string is short for ``path`` when it begins with ``/``, ``./``, ``../`` or ``~``, else for ``id``.
    """

    id: str | None = Field(default=None, min_length=1, description="Model id on the hub: owner/name.")
    path: Annotated[Path, AfterValidator(expand)] | None = Field(
        default=None, description="Local directory; relative ones start at the recipe's file."
    )
    bundled: str | None = Field(default=None, description="Directory below sglang_bw/models.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of `id`.")

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"path" if data.startswith(("/", "./", "../", "~")) else "id": data}
        return data

    @model_validator(mode="after")
    def _exactly_one(self) -> Weights:
        given = [name for name in ("id", "path", "bundled") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"needs exactly one of id, path and bundled, has {' and '.join(given) or 'none'}")
        if self.revision is not None and self.id is None:
            raise ValueError("revision goes with id only")
        return self


class Speculation(_Part):
    """How many tokens are drafted and verified in a round."""

    algorithm: Literal["EAGLE3", "EAGLE", "STANDALONE"] = "EAGLE3"
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


class DeviceOverride(_Part):
    """What is different on one kind of device; ``null`` takes away what the recipe sets for all."""

    args: Args = Field(default_factory=dict)
    env: Env = Field(default_factory=dict)


class Warmup(_Part):
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


class Recipe(_Part):
    """One way to serve one model.

    :ivar args: engine flags without dashes; ``true`` is a switch, a list several values.
    :ivar env: environment of the engine; a variable that the user has set wins.
    """

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    title: str = ""
    engine: Engine = Field(default_factory=Engine)
    target: Weights
    draft: Weights | None = None
    spec: Speculation | None = None
    args: Args = Field(default_factory=dict)
    env: Env = Field(default_factory=dict)
    devices: dict[Device, DeviceOverride] = Field(default_factory=dict)
    warmup: Warmup = Field(default_factory=Warmup)

    @model_validator(mode="after")
    def _draft_with_spec(self) -> Recipe:
        if self.spec is not None and self.draft is None:
            raise ValueError("spec needs a draft")
        if self.draft is not None and self.spec is None:
            raise ValueError("draft needs a spec, for example 'spec: {steps: 3, topk: 1, draft_tokens: 4}'")
        return self

    def for_device(self, device: Device) -> tuple[dict[str, ArgValue], dict[str, str]]:
        """Return ``args`` and ``env`` with the overrides of a device."""
        override = self.devices.get(device, DeviceOverride())
        return {**self.args, **override.args}, {**self.env, **override.env}
