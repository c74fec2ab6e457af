"""``probe``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from sglang_bw.cli import completion, host_checks, planning
from sglang_bw.cli.console import err
from sglang_bw.cli.options import ALLOW_STOCK, DEVICE, ENGINE_PYTHON, ENGINE_TREE, STARTUP_TIMEOUT, api_key
from sglang_bw.cli.types import Real
from sglang_bw.launch import device as devices
from sglang_bw.recipes.schema import Device

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_bw.launch.engine import Engine
    from sglang_bw.recipes.hardware import Hardware
    from sglang_bw.recipes.schema import Recipe

_MOST = 1_000_000
_SHOWN = 60


def _numbers(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    parts = [part.strip() for part in (text or "").split(",")]
    if text is None:
        return None
    if not all(map(_is_number, parts)):
        raise click.BadParameter(f"{text[:_SHOWN]!r} is no list of whole numbers such as 1,2,4.")
    return tuple(sorted({int(part) for part in parts}))


def _is_number(part: str) -> bool:
    """Tell whether it is a whole number of a usual size; Python refuses to read one of thousands of digits."""
    return part.isascii() and part.isdigit() and len(part) <= len(str(_MOST)) and int(part) <= _MOST


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
def allreduce(**options: Any) -> None:
    """Measure all-reduces at exactly the sizes of a recipe, in every way the engine has.

    A message is hidden x 2 bytes x rows: a decode step has as many rows as requests, a verify pass draft tokens times
    as many. Each way runs under torchrun in processes of its own; it is timed only where its sums equal NCCL's, inside
    and outside of CUDA graphs, and killed when it hangs. Exit code 67: a sum was wrong, or a way hung or died; 66: no
    rank came up.
    """
    from sglang_bw.cli import probe_allreduce

    probe_allreduce.run(probe_allreduce.Options(**options))


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
