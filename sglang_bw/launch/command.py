"""From a recipe to the engine's command line and environment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from sglang_bw.errors import RecipeError
from sglang_bw.launch import device as devices
from sglang_bw.recipes import flags, releases
from sglang_bw.recipes.flags import Flag, Flags
from sglang_bw.recipes.schema import Device, Draft, Hardware, Recipe, Speculation, Weights

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 30000
_SECRETS = ("api-key", "admin-api-key", "ssl-keyfile-password")
_SECRET_VARIABLE = re.compile(r"TOKEN$|SECRET|PASSWORD|API_KEY")
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@dataclass(frozen=True)
class Command:
    """What will be started.

    :ivar flags: engine flags, final: recipe, options of `serve` and the user's own.
    :ivar env: variables that differ from the user's environment, as the engine gets them.
    :ivar device: ``cpu`` or ``cuda``, already among the flags.
    """

    flags: Flags
    env: Mapping[str, str]
    device: Device

    def argv(self, python: Path) -> list[str]:
        """Return the command that `serve` runs: what `sglang serve` runs after it has looked at the model's kind.

        ``-P`` keeps a folder named ``sglang`` in the working directory from being taken for the engine.
        """
        return [str(python), "-P", "-m", "sglang.launch_server", *flags.tokens(self.flags)]

    def pasteable(self, *, show_secrets: bool = True) -> str:
        """Return the line for a shell: environment, then ``sglang serve`` and the flags."""
        env, shown = (self.env, self.flags) if show_secrets else (self.shown_env, self.shown_flags)
        setting = [f"{name}={shlex.quote(value)}" for name, value in sorted(env.items())]
        return " ".join([*setting, "sglang", "serve", *map(shlex.quote, flags.tokens(shown))])

    @property
    def shown_flags(self) -> Flags:
        """The flags as a log or a record may have them: without secrets."""
        return tuple(map(_without_secret, self.flags))

    @property
    def shown_env(self) -> dict[str, str]:
        """The environment as a log or a record may have it: without secrets."""
        return {name: "***" if _SECRET_VARIABLE.search(name) else value for name, value in self.env.items()}

    @property
    def target(self) -> str:
        """Model id or path that the engine loads."""
        return flags.value(self.flags, "model-path") or ""

    @property
    def draft(self) -> str | None:
        """Model id or path of the draft, ``None`` without one."""
        return flags.value(self.flags, "speculative-draft-model-path")

    @property
    def speculates(self) -> bool:
        """Whether the engine drafts."""
        return flags.has(self.flags, "speculative-algorithm")

    @property
    def host(self) -> str:
        """The address that the engine listens on."""
        return flags.value(self.flags, "host") or DEFAULT_HOST

    @property
    def port(self) -> int:
        """The port that the engine listens on."""
        return int(flags.value(self.flags, "port") or DEFAULT_PORT)

    @property
    def url(self) -> str:
        """Where this machine reaches the engine."""
        host = _ANY_HOST.get(self.host, self.host)
        scheme = "https" if flags.has(self.flags, "ssl-certfile") else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def api_key(self) -> str | None:
        """The key that requests need."""
        return flags.value(self.flags, "api-key")


def build(
    recipe: Recipe,
    machine: Hardware,
    environ: Mapping[str, str],
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    speculate: bool = True,
    extra: Flags = (),
    version: str = "",
) -> Command:
    """Put a recipe and the user's wishes together.

    :param machine: where it will run; overrides of the recipe go by it.
    :param environ: the user's environment: a variable set there wins over the recipe's.
    :param speculate: false for the baseline: the same recipe without draft and speculation.
    :param extra: the user's own engine flags; they win over everything.
    :param version: of the engine; graphs and memory take the flag names of that release.
    :raises RecipeError: ``extra`` sets a port that is no number.
    """
    device = machine.device
    launch = recipe.on(machine)
    spec = _speculation(launch.spec, recipe.draft) if speculate and launch.spec and recipe.draft else ()
    base = (
        Flag("model-path", (location(recipe.target),)),
        *_revision("revision", recipe.target),
        *spec,
        Flag("device", (device,)),
        Flag("host", (host,)),
        Flag("port", (str(port),)),
        *_spelled(flags.from_mapping(launch.args), version),
    )
    merged = flags.merge(base, extra)
    number = flags.value(merged, "port") or ""
    if not (number.isascii() and number.isdigit()):
        raise RecipeError(f"--port needs a number, not {number!r}", hint="Behind '--' as before it: --port 30000.")
    chosen = {name: environ.get(name, value) for name, value in launch.env.items()}
    return Command(merged, devices.environment(device, chosen), device)


def location(weights: Weights) -> str:
    """Return the model id, or the absolute path of local weights."""
    if weights.id is not None:
        return weights.id
    if weights.bundled is not None:
        return str(Path(str(resources.files("sglang_bw"))) / "models" / weights.bundled)
    return str(weights.path)


def _without_secret(flag: Flag) -> Flag:
    return Flag(flag.name, ("***",)) if flag.name in _SECRETS and flag.values else flag


def _revision(name: str, weights: Weights) -> Flags:
    return (Flag(name, (weights.revision,)),) if weights.revision else ()


def _spelled(args: Flags, version: str) -> Flags:
    """Give the sizes of the graphs the names that the release has; all else stays as the recipe says it."""
    if not version:
        return args
    spelled: list[Flag] = []
    for flag in args:
        is_graph = flag.name.startswith("cuda-graph-")
        spelled += releases.translate(flag, None, version).flags or (flag,) if is_graph else (flag,)
    return tuple(spelled)


def _speculation(spec: Speculation, draft: Draft) -> Flags:
    place = (Flag("speculative-draft-model-path", (location(draft),)),) if draft.separate else ()
    return (
        Flag("speculative-algorithm", (spec.algorithm,)),
        *place,
        *_revision("speculative-draft-model-revision", draft),
        Flag("speculative-num-steps", (str(spec.steps),)),
        Flag("speculative-eagle-topk", (str(spec.topk),)),
        Flag("speculative-num-draft-tokens", (str(spec.draft_tokens),)),
        *flags.from_mapping(spec.args),
    )
