"""``doctor``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource
from rich.markup import escape

from sglang_bw.cli import findings
from sglang_bw.cli.console import err, out, print_json
from sglang_bw.cli.options import ENGINE_PYTHON
from sglang_bw.host import nvml
from sglang_bw.host.arch import ARCHS
from sglang_bw.host.doctor import examine
from sglang_bw.host.kernels import PARTS, check
from sglang_bw.host.system import System

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_bw.host.kernels import Checked, Kernel, Report

_HEADER = ("", "kernel", "tile", "warps", "stages", "shared", "registers", "local", "launched by")
_NUMBERS = range(3, 8)


@click.group(invoke_without_command=True, short_help="Find out what will not run, before anything is loaded.")
@ENGINE_PYTHON
@click.option("--gpus", default="", metavar="0-3", help="Look at these only: numbers, ranges, UUIDs.")
@click.option("--no-load", is_flag=True, help="Copy nothing to idle GPUs: their PCIe links are then seen asleep.")
@click.option("--strict", is_flag=True, help="Exit code 61 when there are warnings.")
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output, with the facts behind the findings.")
@click.pass_context
def doctor(ctx: click.Context, python: Path | None, gpus: str, no_load: bool, strict: bool, as_json: bool) -> None:
    """Examine engine, driver, GPUs, bus and host for what a server needs.

    Each finding is ok, warn, fail or not seen, with what it costs and how to fix it. Changes nothing; needs neither
    a GPU nor root, and says what it could not see. Exit code 60 when a finding fails.
    """
    if ctx.invoked_subcommand:
        given = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            what = ctx.invoked_subcommand
            raise click.UsageError(f"options of `doctor` do not go with `{what}`: its own stand behind it.", ctx=ctx)
        return
    with _progress("looking at this host") as tell:
        diagnosis = examine(System(), nvml.load(), python=python, gpus=gpus, load=not no_load, tell=tell)
    if as_json:
        print_json(diagnosis.as_json())
    else:
        findings.show(diagnosis)
    if error := diagnosis.error(strict=strict):
        raise error


@doctor.command(short_help="Compile the engine's Triton kernels for a GPU that need not be there.")
@click.option("--arch", type=click.Choice(list(ARCHS)), default="sm120", show_default=True)
@ENGINE_PYTHON
@click.option(
    "--tree",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="An unpacked engine (a folder with sglang/) in place of the installed one.",
)
@click.option("--board", default="", help="Board as torch names it: use the MoE configurations tuned for it.")
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, help="Check this part only; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")
def kernels(
    arch: str, python: Path | None, tree: Path | None, board: str, parts: tuple[str, ...], as_json: bool
) -> None:
    """Compile the Triton kernels of the EAGLE path for a GPU that need not be there.

    The engine's own functions choose tiles, warps and stages as they would on that GPU. Shared memory is compared
    with what a block may use there. Ends with exit code 36 when a kernel needs more, does not compile, or could not
    be checked.
    """
    with _progress("starting the engine's interpreter") as tell:
        report = check(ARCHS[arch], python, tree, board=board, parts=parts or PARTS, tell=tell)
    if as_json:
        print_json(report.as_json())
    else:
        _print(report)
    if error := report.error():
        raise error


@contextmanager
def _progress(first: str) -> Iterator[Callable[[str], None]]:
    if not err.is_terminal:
        yield lambda _line: None
        return
    with err.status(first) as status:
        yield lambda line: status.update(f"[dim]{escape(line)}[/dim]")


def _print(report: Report) -> None:
    limit = report.arch.shared_memory
    out.print(
        f"sglang {report.engine}, triton {report.triton}, torch {report.torch}; {report.arch.name}: "
        f"{limit:,} bytes of shared memory a block",
        markup=False,
    )
    rows = [_HEADER, *(_row(report, kernel, launched) for kernel, launched in _groups(report))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    for row in rows:
        cells = [
            cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        out.print("  ".join(cells).rstrip(), markup=False)
    for kernel, launched in _groups(report):
        if kernel.error:
            out.print(f"{kernel.kernel} ({_launched_by(launched)}): {kernel.error}", markup=False)
    for part in report.checked:
        if part.problem:
            out.print(f"not checked: {part.name} ({part.shape}): {part.problem}", markup=False)
    absent = sorted({row.name for row in report.checked if row.absent})
    if absent:
        out.print(f"not in this release: {', '.join(absent)}", markup=False)


def _row(report: Report, kernel: Kernel, launched: list[Checked]) -> tuple[str, ...]:
    verdict = "ok" if kernel.fits(report.arch) else "broken" if kernel.error else "OVER"
    numbers = (kernel.num_warps, kernel.num_stages, kernel.shared_bytes, kernel.registers, kernel.local_bytes)
    return (verdict, kernel.kernel, _tile(kernel), *(f"{number:,}" for number in numbers), _launched_by(launched))


def _groups(report: Report) -> Iterator[tuple[Kernel, list[Checked]]]:
    """Yield kernels that look the same in the table, the one that spills most, with everything that launches them."""
    groups: dict[tuple[object, ...], tuple[Kernel, list[Checked]]] = {}
    for row in report.checked:
        for kernel in row.kernels:
            key = (kernel.kernel, _tile(kernel), kernel.num_warps, kernel.num_stages, kernel.shared_bytes, kernel.error)
            known, rows = groups.setdefault(key, (kernel, []))
            rows.append(row)
            if (kernel.local_bytes, kernel.registers) > (known.local_bytes, known.registers):
                groups[key] = (kernel, rows)
    yield from groups.values()


def _launched_by(rows: list[Checked]) -> str:
    names = list(dict.fromkeys(f"{row.name} ({row.shape})" for row in rows))
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _tile(kernel: Kernel) -> str:
    sizes = {
        name.removeprefix("BLOCK_SIZE_").removeprefix("BLOCK_"): value
        for name, value in kernel.constants.items()
        if name.startswith("BLOCK") and not isinstance(value, bool)
    }
    return " ".join(f"{name}={value}" for name, value in sizes.items())
