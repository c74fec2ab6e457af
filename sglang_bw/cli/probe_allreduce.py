"""``probe allreduce``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sglang_bw.cli.console import err, out, print_json, print_table
from sglang_bw.cli.journal import probing
from sglang_bw.cli.probe import device_of, machine_of, progress
from sglang_bw.errors import OutputError, ProbeError
from sglang_bw.host import fingerprint, probes
from sglang_bw.launch import command as commands
from sglang_bw.launch import device as devices
from sglang_bw.launch import engine as engines
from sglang_bw.launch import selection
from sglang_bw.launch.journal import engine_record
from sglang_bw.launch.probe import allreduce as reductions
from sglang_bw.launch.probe import sizes, torchrun, variants
from sglang_bw.launch.probe.journal import Probe

if TYPE_CHECKING:
    from sglang_bw.host.fingerprint import Fingerprint
    from sglang_bw.launch.engine import Engine
    from sglang_bw.launch.probe.allreduce import Result
    from sglang_bw.launch.probe.sizes import Sizes
    from sglang_bw.launch.probe.torchrun import Job
    from sglang_bw.launch.probe.variants import Variant

_SECONDS_A_WAY = 20
_SIZES = (1, 2, 4, 8, 16, 32, 64)
_DRAFT_TOKENS = 4


@dataclass(frozen=True)
class Options:
    """The options of the command, by their names there."""

    name: str | None
    hidden: int | None
    gpus: int | None
    rows: tuple[int, ...] | None
    backends: tuple[str, ...]
    repetitions: int
    timeout: float
    device: str
    python: Path | None
    engine_tree: Path | None
    path: Path | None
    dry_run: bool
    as_json: bool

    def place(self, host: Fingerprint, job: Job) -> Path:
        """Return where the result goes; one of some rows or ways only leaves the whole one, which plans read."""
        part = ("part",) if self.rows or self.backends else ()
        return self.path or probes.place("allreduce", host.key, f"{job.gpus}x{job.hidden}", job.device, *part)


@dataclass(frozen=True)
class _Launch:
    """What the all-reduces belong to.

    :ivar recipe: id, ``None`` for sizes that were named.
    :ivar env: what the launch sets; a variable of the shell wins over the recipe's, as in `serve`.
    """

    sizes: Sizes
    recipe: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


def run(options: Options) -> None:
    """Measure, store and show."""
    if options.rows and min(options.rows) < 1:
        raise click.UsageError("a message has at least one row.")
    engine = engines.find(options.python, options.engine_tree)
    launch = _launch(options, engine)
    wanted, device = launch.sizes, device_of(options.device, engine)
    rows = options.rows or wanted.rows
    job = torchrun.Job(device, wanted.gpus, wanted.hidden, rows, options.repetitions, options.timeout)
    ways = variants.choose(device, options.backends)
    _check_ranks(job)
    host = fingerprint.take()
    result = reductions.Result(job, host, options.name or "", wanted)
    environ = {**torchrun.environ_for(engine.environment()), **launch.env}
    place = options.place(host, job)
    if options.dry_run:
        _say(result, ways, environ, place, as_json=options.as_json)
        return
    _check_gpus(job)
    probes.try_out(place)
    if not options.as_json:
        err.print(f"{host.title}; ways to measure: {len(ways)}, about {_minutes(len(ways))}", markup=False)
    probe = Probe(result, launch.recipe, fingerprint.look(), engine_record(engine.installation), place)
    with probing(probe):
        with _shown_at_least(result, as_json=options.as_json), progress() as tell:
            reductions.measure(
                result, ways, engine.python, environ, tell=tell, keep=lambda found: probes.store(place, found.as_json())
            )
        _show(result, as_json=options.as_json)
        if result.complete and not options.as_json:
            err.print(f"stored: {place}", markup=False)
        if error := result.error():
            raise error


def _launch(options: Options, engine: Engine) -> _Launch:
    if options.name is not None:
        recipe = selection.select(options.name)
        command = commands.build(recipe, machine_of(recipe, options.device, engine), os.environ)
        found = sizes.of_command(command, recipe.target, hidden=options.hidden, gpus=options.gpus)
        return _Launch(found, recipe.id, command.env)
    if options.hidden is None or options.gpus is None:
        raise click.UsageError("name a recipe or a model, or both --hidden N and --gpus N.")
    return _Launch(sizes.Sizes(options.gpus, options.hidden, _SIZES, _DRAFT_TOKENS))


def _check_ranks(job: Job) -> None:
    if job.gpus < 2:
        raise ProbeError(
            "one GPU reduces nothing: the recipe has no --tp-size", hint="--gpus N measures N of them all the same."
        )


def _check_gpus(job: Job) -> None:
    here = devices.gpu_count()
    if job.device == "cuda" and here < job.gpus:
        raise ProbeError(
            f"{job.gpus} GPUs are needed, {here} can be seen",
            hint="CUDA_VISIBLE_DEVICES may hide some; --gpus N measures fewer; --device cpu tries it with gloo.",
        )


@contextmanager
def _shown_at_least(result: Result, *, as_json: bool) -> Iterator[None]:
    """Show what was measured where it cannot be written."""
    try:
        yield
    except OutputError:
        _show(result, as_json=as_json)
        raise


def _minutes(ways: int) -> str:
    """Say how long it takes: importing torch and connecting is most of it."""
    return f"{max(1, round(ways * _SECONDS_A_WAY / 60))} min"


def _say(result: Result, ways: tuple[Variant, ...], environ: Mapping[str, str], place: Path, *, as_json: bool) -> None:
    job = result.job
    if as_json:
        print_json(
            {
                "device": job.device,
                "gpus": job.gpus,
                "hidden": job.hidden,
                "rows": job.rows,
                "in": [result.passes(rows) for rows in job.rows],
                "repetitions": job.repetitions,
                "backends": {way.name: way.shown(environ) for way in ways},
                "out": str(place),
            }
        )
        return
    out.print(f"{job.gpus} ranks on {job.device}, hidden {job.hidden}, about {_minutes(len(ways))}", markup=False)
    for rows in job.rows:
        out.print(f"  {rows:5} rows  {rows * job.hidden * 2:10,} bytes  {result.passes(rows)}", markup=False)
    for way in ways:
        out.print(f"  {way.name:24} {way.says}", markup=False)
    out.print(f"the result would be stored in {place}", markup=False)


def _show(result: Result, *, as_json: bool) -> None:
    """Print all, or a table: a line a size, a column a way; microseconds, in a CUDA graph where there are graphs."""
    if as_json:
        print_json(result.as_json())
        return
    names = list(dict.fromkeys(row.backend for row in result.latencies))
    table = [["rows", "bytes", "in", *names, "fastest"]]
    for rows in result.job.rows:
        found, fastest = result.at(rows), result.fastest(rows)
        cells = [f"{found[name].microseconds:.1f}" if name in found else "-" for name in names]
        size = [str(rows), f"{rows * result.job.hidden * 2:,}", result.passes(rows)]
        table.append([*size, *cells, fastest.backend if fastest else "-"])
    print_table(table, left=(2, len(table[0]) - 1))
    graphs = "replayed from a CUDA graph" if result.job.graphs else "no CUDA graphs"
    out.print(
        f"microseconds, median of the slowest rank, {graphs}; {result.job.repetitions} sums compared at each size",
        markup=False,
    )
    for failure in result.failures:
        style = None if failure.kind == "absent" else "red"
        out.print(f"{failure.backend}: {failure.kind}: {failure.reason}", style=style, markup=False)
