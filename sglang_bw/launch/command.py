"""From a recipe to the engine's command line and environment."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_bw.errors import RecipeError
from sglang_bw.launch import device as devices
from sglang_bw.launch import secret
from sglang_bw.launch.nodes import UNKNOWN_HEAD, Nodes
from sglang_bw.models import BUNDLED
from sglang_bw.recipes import flags, releases
from sglang_bw.recipes.flags import Flag, Flags
from sglang_bw.recipes.schema import Device, Draft, Hardware, Recipe, Speculation, Weights

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 30000
PASTED_CONFIG = "API-KEY.yaml"
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

    def argv(self, python: Path, config: Path | None = None) -> list[str]:
        """Return the command that `serve` runs: what `sglang serve` runs after it has looked at the model's kind.

        ``-P`` keeps a folder named ``sglang`` in the working directory from being taken for the engine.

        :param config: the file that holds the secrets, which a command line must not; see :mod:`.secret`.
        """
        return [str(python), "-P", "-m", "sglang.launch_server", *flags.tokens(self._with(config))]

    def pasteable(self) -> str:
        """Return the line for a shell: environment, then ``sglang serve`` and the flags; no secret is in it.

        Keys stand in the file ``API-KEY.yaml``, which the user writes; a secret variable is taken from their shell.
        """
        setting = [
            f'{name}="${name}"' if secret.is_secret_variable(name) else f"{name}={shlex.quote(value)}"
            for name, value in sorted(self.env.items())
        ]
        return " ".join([*setting, "sglang", "serve", *map(shlex.quote, self.pasteable_flags)])

    @property
    def pasteable_flags(self) -> list[str]:
        """The flags of that line."""
        return flags.tokens(self._with(Path(PASTED_CONFIG) if self.has_secrets else None))

    @property
    def has_secrets(self) -> bool:
        """Whether something must go to the engine by a file."""
        return bool(secret.of(self.flags))

    def _with(self, config: Path | None) -> Flags:
        public = secret.public(self.flags)
        return flags.merge(public, (Flag("config", (str(config),)),)) if config else public

    @property
    def shown_flags(self) -> Flags:
        """The flags as a log or a record may have them: without secrets."""
        return tuple(map(secret.shown, self.flags))

    @property
    def shown_env(self) -> dict[str, str]:
        """The environment as a log or a record may have it: without secrets."""
        return {name: secret.shown_variable(name, value) for name, value in self.env.items()}

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
    def node_rank(self) -> int:
        """The place among several nodes; 0 on one machine, and for the node that answers requests."""
        rank = flags.value(self.flags, "node-rank") or "0"
        return int(rank) if rank.isascii() and rank.isdigit() else 0

    @property
    def url(self) -> str:
        """Where this machine reaches the engine."""
        host = _ANY_HOST.get(self.host, self.host)
        scheme = "https" if flags.has(self.flags, "ssl-certfile") else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def api_key(self) -> str | None:
        """The key that requests need."""
        return secret.of(self.flags).get("api-key")


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
    nodes: Nodes | None = None,
) -> Command:
    """Put a recipe and the user's wishes together.

    :param machine: where it will run; overrides of the recipe go by it.
    :param environ: the user's environment: a variable set there wins over the recipe's.
    :param speculate: false for the baseline: the same recipe without draft and speculation.
    :param extra: the user's own engine flags; they win over everything.
    :param version: of the engine; graphs and memory take the flag names of that release.
    :param nodes: which of several machines this command is for; ``None``: the first of those that the recipe wants.
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
        *_nodes(recipe, nodes),
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
        return str(BUNDLED / weights.bundled)
    return str(weights.path)


def _revision(name: str, weights: Weights) -> Flags:
    return (Flag(name, (weights.revision,)),) if weights.revision else ()


def _nodes(recipe: Recipe, chosen: Nodes | None) -> Flags:
    if chosen is None and recipe.nodes > 1:
        chosen = Nodes(recipe.nodes, 0, UNKNOWN_HEAD)
    return chosen.flags() if chosen else ()


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
