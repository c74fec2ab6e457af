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

_SWITCH = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("", "null", "~"), None),
}
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
    if wrong := [word for word in engine_flags if not _is_text(word)]:
        raise click.UsageError(f"{wrong[0]!r} is no UTF-8.")
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
        changes = _changes(sets)
        said = f"{recipe.id} with {', '.join(map(_shown, sets))}"
        return build.arm("A", recipe, recipe.id, typed), build.arm("B", recipe, said, typed, changes=changes)
    if recipe.spec is None:
        raise click.UsageError(f"{recipe.id} has no speculation to leave out: give a --draft, or use --set.")
    return (
        build.arm("A", recipe, f"{recipe.id} without speculation", typed, speculate=False),
        build.arm("B", recipe, recipe.id, typed),
    )


def _changes(sets: tuple[str, ...]) -> dict[str, Any]:
    """Return what ``--set`` changes: the name of a flag or variable -> its value, ``None`` to leave the flag out."""
    found: dict[str, Any] = {}
    for text in sets:
        key, value = _split(text)
        is_variable = bool(_ENV_NAME.fullmatch(key))
        key = key if is_variable else Flag(key).key
        if key in found:
            raise click.UsageError(f"{key} is set twice.")
        found[key] = value if is_variable else _value(value)
    return found


def _value(text: str) -> Any:
    """Return the value of a flag: what a switch may be, several values as ``[1,2]``, or the text as it is.

    Numbers stay text: YAML would make 8 of 010 and 750 of 12:30.
    """
    if text.lower() in _SWITCH:
        return _SWITCH[text.lower()]
    if not text.startswith("["):
        return text
    try:
        values = yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise click.UsageError(f"{text!r} is no list of values such as [1,2].") from error
    return values if all(isinstance(value, str) for value in values) else text


def _shown(text: str) -> str:
    """Return a change as a record may have it."""
    key, value = _split(text)
    if _ENV_NAME.fullmatch(key):
        return f"{key}={secret.shown_variable(key, value)}"
    return f"{key}={secret.shown(Flag(key, (value,))).values[0]}"


def _split(text: str) -> tuple[str, str]:
    key, equals, value = text.removeprefix("--").partition("=")
    if not (key and equals and _is_text(text)):
        raise click.UsageError(f"{text!r} is no KEY=VALUE such as cuda-graph-max-bs-decode=64.")
    return key, value


def _is_text(word: str) -> bool:
    """Tell whether a word can be written down: what is no UTF-8 cannot."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


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
        asked = {
            key: _shown_value(value)
            for key, value in changed.items()
            if value is not None and not secret.is_secret(Flag(key, (str(value),)))
        }
        plan = ArmPlan(name, says, command.url, command, asked, command.api_key, recipe.id)
        typed = replace(typed, speculate=speculate, engine_flags=flags.tokens(extra))
        return Asked(
            plan, Launch(recipe, command, planning.planned(self.engine), planning.seen(self.here), environ, typed)
        )


def _without(command: Command, keys: list[str]) -> Command:
    dropped = {Flag(key).key for key in keys}
    if absent := dropped - {flag.key for flag in command.flags}:
        raise click.UsageError(f"the launch has no {', '.join(sorted(absent))} to leave out: --set changes nothing.")
    return replace(command, flags=tuple(flag for flag in command.flags if flag.key not in dropped))


def _shown_value(value: Any) -> str:
    """Return a value as a server says it of itself."""
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)
