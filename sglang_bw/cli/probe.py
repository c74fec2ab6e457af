"""``probe``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from sglang_bw.cli import completion, host_checks, planning
from sglang_bw.cli.console import err, out, print_json, print_table
from sglang_bw.cli.journal import probing
from sglang_bw.cli.options import ALLOW_STOCK, DEVICE, ENGINE_PYTHON, ENGINE_TREE, STARTUP_TIMEOUT, api_key
from sglang_bw.cli.types import Real
from sglang_bw.errors import ProbeError
from sglang_bw.host import fingerprint, probes
from sglang_bw.launch import command as commands
from sglang_bw.launch import device as devices
from sglang_bw.launch import engine as engines
from sglang_bw.launch import selection
from sglang_bw.launch.journal import engine_record
from sglang_bw.launch.probe import allreduce as reductions
from sglang_bw.launch.probe import sizes, variants
from sglang_bw.launch.probe.journal import Probe
from sglang_bw.recipes.schema import Device

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_bw.launch.engine import Engine
    from sglang_bw.launch.probe.allreduce import Result
    from sglang_bw.launch.probe.sizes import Sizes
    from sglang_bw.launch.probe.variants import Variant
    from sglang_bw.recipes.hardware import Hardware
    from sglang_bw.recipes.schema import Recipe

_MOST = 1_000_000


def _numbers(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    parts = [part.strip() for part in (text or "").split(",")]
    if text is None:
        return None
    if not all(part.isascii() and part.isdigit() and int(part) <= _MOST for part in parts):
        raise click.BadParameter(f"{text!r} is no list of whole numbers such as 1,2,4.")
    return tuple(sorted({int(part) for part in parts}))


def _lengths(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of numbers such as 1,2.5,4.") from None


@click.group(short_help="Measure all-reduces and rounds of speculation on this host.")
def probe() -> None:
    """Measure on this host what decides whether speculation pays; `plan` uses the results."""


@probe.command("allreduce", short_help="Latency of all-reduces at a recipe's sizes.")
@click.argument("name", metavar="[RECIPE|FILE.yaml|MODEL]", required=False, shell_complete=completion.recipes)
@click.option("--hidden", type=click.IntRange(1, 1 << 20), help="Hidden size, in place of the model's.")
@click.option("--gpus", type=click.IntRange(2, 64), metavar="N", help="Ranks, in place of the recipe's --tp-size.")
@click.option("--rows", callback=_numbers, metavar="1,2,4", help="Rows of a message, in place of the recipe's.")
@click.option("--backend", "backends", multiple=True, metavar="NAME", help="Measure this one only; repeatable.")
@click.option(
    "--repetitions",
    type=click.IntRange(1, 1_000_000),
    default=20,
    show_default=True,
    help="Sums compared with NCCL's at every size.",
)
@click.option(
    "--timeout",
    type=Real(min=1),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="A way that says nothing for so long is killed; some compile kernels at first.",
)
@DEVICE
@ENGINE_PYTHON
@ENGINE_TREE
@click.option("--out", "path", type=click.Path(dir_okay=False, path_type=Path), help="Where the result goes.")
@click.option("--dry-run", is_flag=True, help="Say what would be measured, start nothing.")
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")
def allreduce(
    name: str | None,
    hidden: int | None,
    gpus: int | None,
    rows: tuple[int, ...] | None,
    backends: tuple[str, ...],
    repetitions: int,
    timeout: float,
    device: str,
    python: Path | None,
    engine_tree: Path | None,
    path: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Measure all-reduces at exactly the sizes of a recipe, in every way the engine has.

    A message is hidden x 2 bytes x rows: a decode step has as many rows as requests, a verify pass draft tokens times
    as many. Each way runs under torchrun in processes of its own; it is timed only where its sums equal NCCL's, inside
    and outside of CUDA graphs, and killed when it hangs. Exit code 67: a sum was wrong, or a way hung or died.
    """
    if rows and min(rows) < 1:
        raise click.UsageError("a message has at least one row.")
    engine = engines.find(python, engine_tree)
    chosen = device_of(device, engine)
    wanted = _sizes(name, hidden, gpus, device, engine)
    job = reductions.Job(chosen, wanted.gpus, wanted.hidden, rows or wanted.rows, repetitions, timeout)
    ways = variants.choose(chosen, backends)
    host = fingerprint.take()
    place = path or probes.place("allreduce", host.key, f"{job.gpus}x{job.hidden}", chosen)
    if dry_run:
        _say(job, ways, place, wanted, as_json=as_json)
        return
    _check(job)
    result = reductions.Result(job, host, recipe=name or "")
    if not as_json:
        err.print(f"{host.title}; ways to measure: {len(ways)}, about {_minutes(len(ways))}", markup=False)
    environ = reductions.environ_for(engine.environment())
    recipe = selection.select(name).id if name else None
    with probing(Probe(result, recipe, fingerprint.look(), engine_record(engine.installation), place)):
        with progress() as tell:
            reductions.measure(
                result, ways, engine.python, environ, tell=tell, keep=lambda found: probes.write(place, found.as_json())
            )
        if as_json:
            print_json(result.as_json())
        else:
            _show(result, wanted)
            err.print(f"stored: {place}", markup=False)
        if error := result.error():
            raise error


@probe.command("round", short_help="What a round of speculation costs against a plain decode step.")
@click.argument("name", metavar="[RECIPE|FILE.yaml|MODEL]", required=False, shell_complete=completion.recipes)
@click.argument("engine_flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- ENGINE FLAGS]")
@click.option("--url", "urls", multiple=True, metavar="URL", help="A running server, in place of a recipe; repeatable.")
@api_key
@click.option("--draft", metavar="PATH|ID", help="Draft of a model, or in place of the recipe's.")
@click.option("--steps", callback=_numbers, metavar="0,3", help="Draft steps; the recipe's and 0 when left out.")
@click.option("--accept", "lengths", callback=_lengths, metavar="1,2.5,4", help="Accept lengths to simulate.")
@click.option("--batches", callback=_numbers, metavar="1,4,16", help="Requests side by side.")
@click.option("--rounds", type=click.IntRange(8, 4096), default=64, show_default=True, help="Rounds that are timed.")
@click.option("--repeats", type=click.IntRange(1, 100), default=3, show_default=True, help="Times that they are.")
@click.option("--context", type=click.IntRange(0, 1 << 20), default=0, help="Tokens of each prompt, about.")
@DEVICE
@ALLOW_STOCK
@STARTUP_TIMEOUT
@ENGINE_PYTHON
@ENGINE_TREE
@click.option("--log", type=click.Path(dir_okay=False, path_type=Path), help="Where the engines' log goes.")
@click.option("--out", "path", type=click.Path(dir_okay=False, path_type=Path), help="Where the result goes.")
@click.option("--dry-run", is_flag=True, help="Say which servers would be started, start none.")
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")
def rounds(**options: Any) -> None:
    """Measure T_dec(batch) and T_round(k, batch), and with them R = T_round / T_dec, the break-even accept length.

    With a recipe, servers are started one after the other: one without speculation, one with speculation switched off
    (k = 0), and for each k one an accept length, which the engine simulates. Tokens per second must then be a straight
    line through the origin in the accept length; exit code 68 when they are not. With --url running servers are
    measured as they are: one without speculation and one with it give R. Simulated rows are marked so, and hide what
    a cold draft costs.
    """
    from sglang_bw.cli import probe_round

    probe_round.run(probe_round.Options(**options))


def device_of(wish: str, engine: Engine) -> Device:
    """Return the device that a user wants, or the one that is here."""
    if wish == "auto":
        return devices.detect(engine_has_gpu_kernels=engine.has_gpu_kernels)
    return "cpu" if wish == "cpu" else "cuda"


def machine_of(recipe: Recipe, wish: str, engine: Engine) -> Hardware:
    """Return the machine that a recipe is started on."""
    device = device_of(wish, engine)
    return planning.machine(recipe, device, host_checks.gpus(device, None, look=True))


def _sizes(name: str | None, hidden: int | None, gpus: int | None, device: str, engine: Engine) -> Sizes:
    if name is not None:
        recipe = selection.select(name)
        command = commands.build(recipe, machine_of(recipe, device, engine), {})
        return sizes.of_command(command, hidden=hidden, gpus=gpus)
    if hidden is None or gpus is None:
        raise click.UsageError("name a recipe or a model, or both --hidden N and --gpus N.")
    return sizes.Sizes(gpus, hidden, (1, 2, 4, 8, 16, 32, 64), 4)


def _check(job: reductions.Job) -> None:
    if job.gpus < 2:
        raise ProbeError(
            "one GPU reduces nothing: the recipe has no --tp-size", hint="--gpus N measures N of them all the same."
        )
    here = devices.gpu_count()
    if job.device == "cuda" and here < job.gpus:
        raise ProbeError(
            f"{job.gpus} GPUs are needed, {here} can be seen",
            hint="CUDA_VISIBLE_DEVICES may hide some; --gpus N measures fewer; --device cpu tries it with gloo.",
        )


def _minutes(ways: int) -> str:
    """Say how long it takes: importing torch and connecting is most of it."""
    return f"{max(1, round(ways * 20 / 60))} min"


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Show lines while something goes on: one that changes on a terminal, else one for each new beginning."""
    if not err.is_terminal:
        last = ""

        def line(text: str) -> None:
            nonlocal last
            if (head := text.partition(": ")[0]) != last:
                last = head
                err.print(text, markup=False)

        yield line
        return
    with err.status("starting the engine's interpreter") as status:
        yield lambda text: status.update(f"[dim]{escape(text)}[/dim]")


def _say(job: reductions.Job, ways: tuple[Variant, ...], place: Path, wanted: Sizes, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "device": job.device,
                "gpus": job.gpus,
                "hidden": job.hidden,
                "rows": job.rows,
                "repetitions": job.repetitions,
                "backends": {way.name: dict(way.env) for way in ways},
                "out": str(place),
            }
        )
        return
    out.print(f"{job.gpus} ranks on {job.device}, hidden {job.hidden}, about {_minutes(len(ways))}", markup=False)
    for rows in job.rows:
        out.print(f"  {rows:5} rows  {rows * job.hidden * 2:10,} bytes  {wanted.of(rows)}", markup=False)
    for way in ways:
        out.print(f"  {way.name:24} {way.says}", markup=False)
    out.print(f"the result would be stored in {place}", markup=False)


def _show(result: Result, wanted: Sizes) -> None:
    """Print a table: a line a size, a column a way; microseconds, in a CUDA graph where there are graphs."""
    names = list(dict.fromkeys(row.backend for row in result.latencies))
    graphs = result.job.device == "cuda"
    best = {(row.rows, row.backend): row.microseconds for row in result.latencies if row.graph is graphs}
    table = [["rows", "bytes", "in", *names, "fastest"]]
    for rows in result.job.rows:
        cells = [f"{best[rows, name]:.1f}" if (rows, name) in best else "-" for name in names]
        fastest = min((name for name in names if (rows, name) in best), key=lambda name: best[rows, name], default="-")
        table.append([str(rows), f"{rows * result.job.hidden * 2:,}", wanted.of(rows), *cells, fastest])
    print_table(table, left=(2, len(table[0]) - 1))
    out.print(
        f"microseconds, median of the slowest rank, {'replayed from a CUDA graph' if graphs else 'no CUDA graphs'}; "
        f"{result.job.repetitions} sums compared at each size",
        markup=False,
    )
    for failure in result.failures:
        style = None if failure.kind == "absent" else "red"
        out.print(f"{failure.backend}: {failure.kind}: {failure.reason}", style=style, markup=False)
