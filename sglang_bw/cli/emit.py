"""The part of `serve --emit` that writes deployment files."""

from __future__ import annotations

import getpass
import math
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sglang_bw.cli import planning, refusals
from sglang_bw.cli.console import err, print_json
from sglang_bw.cli.preparation import Options, Prepared, consent
from sglang_bw.cli.refusals import Launch
from sglang_bw.errors import OutputError
from sglang_bw.host.gpus import GIB
from sglang_bw.launch import remote_code, safety, weights
from sglang_bw.launch.command import Command
from sglang_bw.launch.deploy import compose, kubernetes, needs, systemd
from sglang_bw.launch.deploy.deployment import Deployment, File, anchored
from sglang_bw.launch.nodes import UNKNOWN_HEAD
from sglang_bw.recipes import flags, lookup

if TYPE_CHECKING:
    from sglang_bw.plan.plan import Plan

FORMS = ("compose", "systemd", "kubernetes")
_CACHE_GIB = 100


def run(prepared: Prepared, options: Options) -> int:
    """Check the launch as its plan does, and write its files, or print them.

    :raises EmitError: this kind of file cannot hold it.
    :raises PlanRefusedError: it will not run; ``--no-check`` writes it all the same.
    """
    prepared, planned = _check(prepared, options)
    made = _deployment(prepared, options, planned)
    if options.emit == "compose":
        files = compose.files(made)
    elif options.emit == "kubernetes":
        files = kubernetes.files(made)
    else:
        files = systemd.files(made, _service(prepared, options))
    if options.output:
        _write(files, options.output)
    if options.as_json:
        print_json({"form": options.emit, "files": {file.name: file.text for file in files}})
    elif not options.output:
        for number, file in enumerate(files):
            click.echo(("\n" if number else "") + file.text, nl=False)
    return 0


def _check(prepared: Prepared, options: Options) -> tuple[Prepared, Plan | None]:
    """Return the launch with the commits whose code may run, which a file carries; and its plan, if there is one."""
    trusted = remote_code.settle(prepared.command, prepared.environ, consent(options))
    for told in trusted.told:
        err.print(f"warning: {told}", style="yellow", markup=False)
    prepared = prepared.settled(trusted)
    if options.no_check:
        return prepared, None
    command = prepared.command
    seen = planning.meant(prepared.recipe, prepared.machine) if command.device == "cuda" else None
    there = prepared.engine.installation.version
    engine = planning.planned(prepared.engine) if there else planning.of_series()
    return prepared, refusals.check(
        Launch(prepared.recipe, command, engine, seen, typed=options.typed), force=options.force
    )


def _has_key(prepared: Prepared, options: Options) -> bool:
    """Whether the server has a key: where others can reach it, unless they may; and where one is named."""
    if options.api_key_file:
        return True
    reachable = options.emit == "kubernetes" or not safety.is_loopback(prepared.command.host)
    return reachable and not options.is_open


def _deployment(prepared: Prepared, options: Options, planned: Plan | None) -> Deployment:
    version = prepared.version
    ranks = math.ceil(_ranks(prepared) / prepared.nodes)
    gpus = ranks if prepared.command.device == "cuda" else 0
    known = _weights(prepared, planned)
    return Deployment(
        recipe=prepared.recipe.id,
        version=version,
        command=replace(prepared.command, flags=anchored(prepared.command.flags)),
        image=options.image or f"sglang-bw:{version.replace('+', '-')}",
        nodes=prepared.nodes,
        gpus=gpus,
        with_key=_has_key(prepared, options),
        startup_s=math.ceil(options.startup_timeout),
        cache_gib=_cache_gib(prepared.command, known),
        needs=needs.of(prepared.command, ranks, known),
        source=f"sglang-bw {shlex.join(_said())}",
    )


def _said() -> list[str]:
    """Return the arguments of this very command, as the user gave them."""
    return sys.argv[1:] if Path(sys.argv[0]).name in ("sglang-bw", "__main__.py") else ["serve", "--emit"]


def _ranks(prepared: Prepared) -> int:
    """Return the processes that compute, on all nodes; one a GPU."""
    command_line = prepared.command.flags
    # Attention that is divided by requests shares the GPUs of tensor parallelism; replicas have their own.
    shared = flags.has(command_line, "enable-dp-attention")
    return _divided(prepared) * (1 if shared else _size(prepared, "dp-size"))


def _divided(prepared: Prepared) -> int:
    """Return how many GPUs hold one copy of the weights together."""
    return _size(prepared, "tp-size") * _size(prepared, "pp-size")


def _size(prepared: Prepared, name: str) -> int:
    text = flags.value(prepared.command.flags, name) or "1"
    return int(text) if text.isascii() and text.isdigit() else 1


def _weights(prepared: Prepared, planned: Plan | None) -> int | None:
    """Return bytes of target and draft: the plan's, else what the recipe has measured, else those of this disk."""
    if planned:
        models = (planned.models.target, planned.models.draft)
        return sum(model.inventory.total() for model in models if model)
    memory = prepared.recipe.on(prepared.machine).memory
    if memory.weights_gib:
        return math.ceil((memory.weights_gib + (memory.draft_gib or 0)) * _divided(prepared) * GIB)
    command = prepared.command
    folders = [weights.local(name) for name in (command.target, command.draft) if name]
    if not all(folders):
        return None
    return sum(path.stat().st_size for folder in folders if folder for path in folder.glob("*.safetensors"))


def _cache_gib(command: Command, known: int | None) -> int:
    """Return disk for what comes from the hub and for compiled kernels: the weights and a quarter more, or a guess."""
    is_fetched = any(name and not weights.local(name) for name in (command.target, command.draft))
    return max(_CACHE_GIB, math.ceil((known or 0) / GIB * 1.25) if is_fetched else 0)


def _service(prepared: Prepared, options: Options) -> systemd.Service:
    ranks = [options.node_rank] if options.node_rank is not None or prepared.nodes == 1 else range(prepared.nodes)
    key = None
    if _has_key(prepared, options):
        key = (options.api_key_file or Path(f"/etc/sglang-bw/{prepared.recipe.id}.key")).absolute()
    places = [_node(prepared, options, rank) for rank in ranks]
    return systemd.Service(
        python=Path(sys.executable),
        serve=[[*_arguments(prepared, options, with_key=key is not None), *place] for place in places],
        key_file=key,
        user="" if os.geteuid() == 0 else getpass.getuser(),
    )


def _node(prepared: Prepared, options: Options, rank: int | None) -> list[str]:
    engine_flags = flags.tokens((*anchored(flags.parse(options.engine_flags)), *prepared.pins))
    tail = ["--", *engine_flags] if engine_flags else []
    if prepared.nodes == 1 or rank is None:
        return tail
    if options.head is None:
        raise click.UsageError(f"a unit needs --head ADDR:PORT of node 0, for example {UNKNOWN_HEAD}.")
    return ["--nodes", str(prepared.nodes), "--node-rank", str(rank), "--head", options.head, *tail]


def _arguments(prepared: Prepared, options: Options, *, with_key: bool) -> list[str]:
    """Return what the unit tells `serve`: the options of this command, with paths that hold anywhere."""
    given: list[tuple[str, str | None]] = [
        ("--draft", _absolute(options.draft)),
        ("--model-path", _absolute(options.model_path)),
        ("--device", prepared.command.device),
        ("--host", options.host),
        ("--port", str(options.port)),
        ("--gpus", options.gpus),
        ("--startup-timeout", f"{options.startup_timeout:g}"),
        ("--python", _absolute(str(options.python)) if options.python else None),
        ("--engine-tree", str(options.engine_tree.absolute()) if options.engine_tree else None),
        ("--log", str(options.log.absolute()) if options.log else None),
        ("--api-key-file", systemd.CREDENTIAL_PATH if with_key else None),
    ]
    switches = [
        ("--no-spec", options.no_spec),
        ("--open", options.is_open),
        ("--force", options.force),
        ("--allow-stock", options.allow_stock),
        ("--no-warmup", options.no_warmup),
        ("--strict", options.strict),
    ]
    return [
        _absolute(options.name) or "",
        *(word for name, value in given if value is not None for word in (name, value)),
        *(name for name, is_on in switches if is_on),
    ]


def _absolute(name: str | None) -> str | None:
    """Return a path as an absolute one; a recipe's or a model's id as it is."""
    if name is None or name in lookup.catalogue():
        return name
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def _write(files: list[File], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            scratch = folder / f".{file.name}.{os.getpid()}"
            try:
                scratch.write_text(file.text, encoding="utf-8")
                scratch.replace(folder / file.name)
            finally:
                scratch.unlink(missing_ok=True)
            err.print(str(folder / file.name), markup=False)
    except OSError as error:
        raise OutputError(f"cannot write into {folder}: {error.strerror}", hint="-o DIR names another.") from error
