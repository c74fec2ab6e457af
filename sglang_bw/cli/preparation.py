"""The part of `serve` that turns its options into a launch; nothing is started."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import click

from sglang_bw.cli import host_checks, planning
from sglang_bw.cli.console import err
from sglang_bw.cli.typed import Typed, check_place
from sglang_bw.host import fingerprint
from sglang_bw.host.gpus import Gpus, parts
from sglang_bw.launch import command as commands
from sglang_bw.launch import device as devices
from sglang_bw.launch import engine as engines
from sglang_bw.launch import nodes as clusters
from sglang_bw.launch import preflight, remote_code, secret, selection
from sglang_bw.launch.command import Command
from sglang_bw.launch.engine import Engine
from sglang_bw.launch.nodes import Nodes
from sglang_bw.launch.probe import seed
from sglang_bw.launch.remote_code import Consent, Settled
from sglang_bw.recipes import flags
from sglang_bw.recipes.flags import Flag, Flags
from sglang_bw.recipes.origin import Origin
from sglang_bw.recipes.schema import DEVICES, Device, Hardware, Recipe


@dataclass(frozen=True)
class Options:
    """The options of `serve`, by their names there."""

    name: str
    engine_flags: tuple[str, ...]
    draft: str | None
    model_path: str | None
    no_spec: bool
    device: str
    host: str
    port: int
    gpus: str | None
    api_key_file: Path | None
    is_open: bool
    nodes: int | None
    node_rank: int | None
    head: str | None
    pin: bool
    force: bool
    dry_run: bool
    allow_stock: bool
    log: Path | None
    as_json: bool
    no_warmup: bool
    strict: bool
    detach: bool
    no_wait: bool
    emit: str | None
    output: Path | None
    image: str | None
    no_check: bool
    startup_timeout: float
    python: Path | None
    engine_tree: Path | None

    @property
    def only_describes(self) -> bool:
        """Whether nothing will be started, so that this machine need not be the one."""
        return self.dry_run or self.emit is not None

    @property
    def typed(self) -> Typed:
        """What of it `plan` takes, too."""
        return Typed(
            self.name,
            model=self.model_path,
            draft=self.draft,
            speculate=not self.no_spec,
            divides=self.gpus is not None,
            python=self.python,
            tree=self.engine_tree,
            engine_flags=self.engine_flags,
        )

    def check(self) -> None:
        """Refuse what makes no sense together."""
        if self.detach and self.only_describes:
            raise click.UsageError("--detach starts a server, --dry-run and --emit start none.")
        if self.no_wait and not self.detach:
            raise click.UsageError("--no-wait goes with --detach.")
        if self.dry_run and self.emit:
            raise click.UsageError("--emit starts nothing either: leave --dry-run out.")
        for name, given in (("--output", self.output), ("--image", self.image), ("--no-check", self.no_check)):
            if given and not self.emit:
                raise click.UsageError(f"{name} goes with --emit.")
        if self.log and self.emit in ("compose", "kubernetes"):
            raise click.UsageError("--log: a container's log is its output, which Docker or Kubernetes keeps.")


@dataclass(frozen=True)
class Prepared:
    """A launch, ready to be checked.

    :ivar here: the GPUs of this machine; ``None`` on a CPU, and when nobody looked.
    :ivar visible: which of them, as in ``0-3``.
    :ivar environ: the engine's environment before anything that the launch adds.
    :ivar version: of the engine that the flags are for.
    :ivar nodes: how many machines; 1 for this one alone.
    :ivar pins: revisions that nobody typed: commits that the user has trusted here.
    """

    recipe: Recipe
    command: Command
    engine: Engine
    machine: Hardware
    here: Gpus | None
    visible: str | None
    environ: Mapping[str, str]
    extra: Flags
    version: str
    nodes: int
    pins: Flags = ()

    def baseline(self) -> Command:
        """Return the same launch without speculation."""
        plain = commands.build(
            self.recipe,
            self.machine,
            self.environ,
            host=self.command.host,
            port=self.command.port,
            speculate=False,
            extra=self.extra,
            version=self.version,
        )
        return remote_code.with_records(replace(plain, env={**plain.env, **self.command.env}))

    def settled(self, found: Settled) -> Prepared:
        """Return the launch with commits that have just been found."""
        return replace(self, command=found.applied(self.command), pins=(*self.pins, *found.flags))

    def on_node(self, rank: int) -> Command:
        """Return the command of another node."""
        place = Nodes(self.nodes, rank, flags.value(self.command.flags, "dist-init-addr") or clusters.UNKNOWN_HEAD)
        return replace(self.command, flags=flags.merge(self.command.flags, place.flags()))


def prepare(options: Options) -> Prepared:
    """Put the launch together.

    :raises click.UsageError: options contradict each other.
    :raises UnknownRecipeError: no such recipe or model.
    :raises ApiKeyError: the key cannot be read.
    """
    check_place("serve", options.engine_flags)
    extra = _parse(options.engine_flags)
    recipe = selection.select(options.name, model=options.model_path, draft=options.draft)
    speculates = recipe.spec or options.no_spec or flags.has(extra, "speculative-algorithm")
    if not speculates and selection.is_model(options.name):
        raise click.UsageError("a model needs its draft: --draft PATH|ID; or --no-spec for plain decoding.")
    engine = engines.find(options.python, options.engine_tree)
    chosen = _device(options, recipe, extra, engine)
    environ = engine.environment()
    here = host_checks.gpus(chosen, options.gpus, look=not options.only_describes)
    visible = options.gpus or (None if options.emit else environ.get("CUDA_VISIBLE_DEVICES"))
    machine = planning.machine(recipe, chosen, here, visible)
    version = engine.installation.version or (planning.of_series().version if options.emit else "")
    place = _place(options, recipe, extra)
    count = (len(parts(options.gpus)) if options.gpus else 1) * (place.count if place else 1)
    extra, told = planning.divided(options.name, extra, count)
    if told:
        err.print(f"note: {told}", markup=False)
    extra = (*_with_key(options, extra), *(place.flags() if place else ()))
    command = commands.build(
        recipe,
        machine,
        {} if options.emit else environ,  # what is set here says nothing of where a file will be used
        host=options.host,
        port=options.port,
        speculate=not options.no_spec,
        extra=extra,
        version=version,
    )
    if options.gpus:
        command = replace(command, env={**command.env, **preflight.visible(options.gpus, here)})
    if not options.emit:  # what was measured here says nothing of where a file will be used
        command = _seeded(command, Origin(fingerprint.take().key, recipe.id, version))
    pins = remote_code.recorded(command)
    command = Settled(pins).applied(command)
    nodes = place.count if place else 1
    return Prepared(recipe, command, engine, machine, here, visible, environ, extra, version, nodes, pins)


def consent(options: Options) -> Consent:
    """Return what the user said about code of models, and the command that says yes."""
    given = sys.argv[1:] if Path(sys.argv[0]).name in ("sglang-bw", "__main__.py") else []
    words = given[: given.index("--")] if "--" in given else given
    words = [word for word in words if word not in ("--dry-run", "--pin")]
    engine_flags = _parse(options.engine_flags)
    if not words or secret.of(engine_flags):  # a key is not said again
        words, engine_flags = ["serve", options.name], ()
    tail = ["--", *options.engine_flags] if engine_flags else []
    again = shlex.join(["sglang-bw", *words, "--pin", *tail])
    asks = options.pin or not options.dry_run
    return Consent(given=options.pin, kept=not options.dry_run, asks=asks, again=again)


def _seeded(command: Command, wanted: Origin) -> Command:
    """Return the launch with what `probe round` measured on this host, if there is anything to use."""
    found, why = seed.find(command, wanted)
    if why:
        err.print(f"note: {why}; `sglang-bw probe round` measures again", markup=False)
    if found is None:
        return command
    err.print(f"note: the policy begins with the cost of rounds of {found.taken}: {found.probe}", markup=False)
    return found.give(command)


def _parse(tokens: tuple[str, ...]) -> Flags:
    try:
        return flags.parse(tokens)
    except flags.NotAFlagError as error:
        raise click.UsageError(
            f"{error.token!r} is no engine flag; one recipe or model, then options, then engine flags behind '--'."
        ) from error


def _device(options: Options, recipe: Recipe, extra: Flags, engine: Engine) -> Device:
    wish = flags.value(extra, "device") or options.device
    if wish == "auto" and options.emit and (recipe.hardware.board or recipe.hardware.arch or recipe.hardware.gpus):
        return "cuda"
    if wish == "auto":
        return devices.detect(engine_has_gpu_kernels=engine.has_gpu_kernels)
    if wish not in DEVICES:
        raise click.UsageError(f"the device {wish!r} is not known here: {' or '.join(DEVICES)}.")
    return wish


def _with_key(options: Options, extra: Flags) -> Flags:
    """Add the key from the file or the environment; a key behind `--`, or in a file that is named there, wins."""
    if options.emit:
        if secret.of(extra) or flags.has(extra, "config"):
            raise click.UsageError("an emitted file holds no key and no --config of yours: it says where the key goes.")
        return extra
    theirs = secret.given_by_config(flags.value(extra, "config")) | secret.of(extra)
    own = secret.api_key(options.api_key_file, {} if "api-key" in theirs else os.environ)
    if options.api_key_file and "api-key" in theirs:
        raise click.UsageError("one key only: --api-key-file, or --api-key behind '--'.")
    if options.api_key_file and secret.is_open_to_others(options.api_key_file):
        err.print(
            f"warning: others may read {options.api_key_file}: chmod 600 {options.api_key_file}",
            style="yellow",
            markup=False,
        )
    if own:
        theirs["api-key"] = own
    return (*secret.public(extra), *(Flag(name, (value,)) for name, value in theirs.items()))


def _place(options: Options, recipe: Recipe, extra: Flags) -> Nodes | None:
    """Return this machine's place among several; ``None`` for one machine, or when flags behind `--` say it."""
    if any(flags.has(extra, name) for name in ("nnodes", "node-rank", "dist-init-addr")):
        if options.nodes or options.node_rank is not None or options.head:
            raise click.UsageError("--nodes, --node-rank and --head, or the engine's own flags behind '--'; not both.")
        return None
    count = options.nodes or recipe.nodes
    if count == 1:
        if options.node_rank or options.head:
            raise click.UsageError("--node-rank and --head go with --nodes.")
        return None
    if not options.only_describes and (options.node_rank is None or options.head is None):
        raise click.UsageError(
            f"{count} nodes: the same command on each, with --node-rank 0 to {count - 1}, and --head ADDR:PORT."
        )
    rank = options.node_rank or 0
    if rank >= count:
        raise click.UsageError(f"--node-rank {rank}: {count} nodes have the ranks 0 to {count - 1}.")
    try:
        address = clusters.head(options.head) if options.head else clusters.UNKNOWN_HEAD
    except ValueError as error:
        raise click.UsageError(f"--head: {error}") from error
    return Nodes(count, rank, address)
