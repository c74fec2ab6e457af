"""The values that a recipe's keys may have: engine flags, environment variables, paths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from sglang_bw.recipes import flags

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
    "mem-fraction-static": "memory.fraction",
    "kv-cache-dtype": "memory.kv_dtype",
    "cuda-graph-max-bs": "graphs.decode_max_bs",
    "cuda-graph-max-bs-decode": "graphs.decode_max_bs",
    "cuda-graph-bs": "graphs.decode_bs",
    "cuda-graph-bs-decode": "graphs.decode_bs",
    "device": "`serve --device`",
    "host": "`serve --host`",
    "port": "`serve --port`",
}
ID = re.compile(r"[a-z0-9][a-z0-9._-]*")
_FLAG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

ArgValue = bool | int | float | str | list[int | float | str] | None
EnvValue = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value)]


class Part(BaseModel):
    """A mapping of a recipe: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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
