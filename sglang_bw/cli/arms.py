"""What the two arms of ``ab`` are, from what the user types."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, cast

import click
import httpx
import yaml

from sglang_bw.cli import planning
from sglang_bw.cli.refusals import Launch
from sglang_bw.cli.typed import Typed
from sglang_bw.experiment.arm import ArmPlan, Name
from sglang_bw.host import nvml
from sglang_bw.launch import command as commands
from sglang_bw.launch import device as devices
from sglang_bw.launch import remote_code, secret, selection
from sglang_bw.launch.command import Command
from sglang_bw.launch.engine import Engine
from sglang_bw.recipes import chain, flags
from sglang_bw.recipes.flags import Flag, Flags
from sglang_bw.recipes.schema import Device, Recipe

_ENV_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


@dataclass(frozen=True)
class Asked:
    """An arm that will be started, and its launch as the plan looks at it."""

    plan: ArmPlan
    launch: Launch


def servers(urls: tuple[str, ...], api_key: str | None) -> tuple[ArmPlan, ArmPlan]:
    """Return two servers that run already."""
    for url in urls:
        if not _is_address(url):
            said = secret.without_userinfo(url)
            raise click.UsageError(f"{said!r} is no address such as http://127.0.0.1:30000.")
    a, b = (url.rstrip("/") for url in urls)
    says_a, says_b = (f"server {secret.without_userinfo(url)}" for url in (a, b))
    return ArmPlan("A", says_a, a, api_key=api_key), ArmPlan("B", says_b, b, api_key=api_key)


def _is_address(url: str) -> bool:
    try:
        found = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return found.scheme in ("http", "https") and bool(found.host) and 0 < (found.port or 80) < 65536


def started(
    engine: Engine,
    name: str,
    vs: str | None,
    sets: tuple[str, ...],
    engine_flags: tuple[str, ...],
    options: dict[str, Any],
) -> tuple[Asked, Asked]:
    """Return two arms that will be started.

    :param vs: baseline; or
    :param sets: KEY=VALUE of the treatment; without both, the baseline is the recipe without speculation.
    :param engine_flags: of both arms.
    """
    recipe = selection.select(name, draft=options["draft"])
    try:
        both = flags.parse(engine_flags)
    except flags.NotAFlagError as error:
        raise click.UsageError(f"{error.token!r} is no engine flag.") from error
    there = {"python": options["python"], "tree": options["engine_tree"]}
    typed = Typed(name, draft=options["draft"], **there)
    build = _Builder(engine, options["device"], options["port"], both)
    if vs is not None:
        base = selection.select(vs)
        return build.arm("A", base, base.id, Typed(vs, **there)), build.arm("B", recipe, recipe.id, typed)
    if sets:
        changes = dict(map(_change, sets))
        said = f"{recipe.id} with {', '.join(map(_shown, sets))}"
        return build.arm("A", recipe, recipe.id, typed), build.arm("B", recipe, said, typed, changes=changes)
    if recipe.spec is None:
        raise click.UsageError(f"{recipe.id} has no speculation to leave out: give a --draft, or use --set.")
    return (
        build.arm("A", recipe, f"{recipe.id} without speculation", typed, speculate=False),
        build.arm("B", recipe, recipe.id, typed),
    )


def _change(text: str) -> tuple[str, Any]:
    key, value = _split(text)
    return key, value if _ENV_NAME.fullmatch(key) else yaml.safe_load(value)


def _shown(text: str) -> str:
    """Return a change as a record may have it."""
    key, value = _split(text)
    if _ENV_NAME.fullmatch(key):
        return f"{key}={secret.shown_variable(key, value)}"
    return f"{key}={secret.shown(Flag(key, (value,))).values[0]}"


def _split(text: str) -> tuple[str, str]:
    key, equals, value = text.removeprefix("--").partition("=")
    if not (key and equals):
        raise click.UsageError(f"{text!r} is no KEY=VALUE such as cuda-graph-max-bs-decode=64.")
    return key, value


class _Builder:
    """Makes the commands of both arms, on ports side by side."""

    def __init__(self, engine: Engine, device: str, port: int, both: Flags) -> None:
        self.engine = engine
        found = devices.detect(engine_has_gpu_kernels=engine.has_gpu_kernels) if device == "auto" else device
        self.device = cast(Device, found)
        self.port = port
        self.both = both
        self.here = nvml.read(nvml.load()) if self.device == "cuda" else None

    def arm(
        self,
        name: Name,
        recipe: Recipe,
        says: str,
        typed: Typed,
        *,
        speculate: bool = True,
        changes: dict[str, Any] | None = None,
    ) -> Asked:
        port = self.port + (name == "B")
        changed = {key: value for key, value in (changes or {}).items() if not _ENV_NAME.fullmatch(key)}
        extra = flags.merge(self.both, flags.from_mapping(changed))
        environ = self.engine.environment()
        command = commands.build(
            recipe,
            planning.machine(recipe, self.device, self.here),
            environ,
            port=port,
            speculate=speculate,
            extra=extra,
            version=self.engine.installation.version,
        )
        command = replace(command, flags=flags.merge(command.flags, chain.follow(command.flags, extra)))
        command = _without(command, [key for key, value in changed.items() if value in (False, None)])
        env = {key: value for key, value in (changes or {}).items() if _ENV_NAME.fullmatch(key)}
        command = remote_code.with_records(replace(command, env={**command.env, **env}))
        asked = {key: str(value) for key, value in changed.items() if not secret.is_secret(Flag(key, (str(value),)))}
        plan = ArmPlan(name, says, command.url, command, asked, command.api_key, recipe.id)
        typed = replace(typed, speculate=speculate, engine_flags=flags.tokens(extra))
        return Asked(
            plan, Launch(recipe, command, planning.planned(self.engine), planning.seen(self.here), environ, typed)
        )


def _without(command: Command, keys: list[str]) -> Command:
    dropped = {Flag(key).key for key in keys}
    return replace(command, flags=tuple(flag for flag in command.flags if flag.key not in dropped))
