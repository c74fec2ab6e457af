"""Options and helpers that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sglang_bw.cli import completion
from sglang_bw.cli.types import Real
from sglang_bw.recipes.hardware import DEVICES

if TYPE_CHECKING:
    from sglang_bw.fork.local import LocalSeries
    from sglang_bw.fork.series import Series

PATCHES = click.option(
    "--patches",
    "root",
    type=click.Path(path_type=Path),
    help="Directory with one folder per base (default: the checkout's).",
)
BASE = click.option(
    "--base", help="SGLang release (default: the newest with a series).", shell_complete=completion.bases
)
LOCAL = click.option(
    "--local", type=click.Path(path_type=Path), metavar="DIR", help="Your own patches, which come after ours."
)
PYTHON = click.option(
    "--python",
    type=click.Path(path_type=Path),
    help="Interpreter or folder of the environment (default: the tool's own).",
)
JSON = click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")
ENGINE_PYTHON = click.option(
    "--python", type=click.Path(path_type=Path), help="Interpreter of the environment with the engine."
)
ENGINE_TREE = click.option(
    "--engine-tree",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="An unpacked engine (sglang/ and its .dist-info) in place of the installed one.",
)
DEVICE = click.option("--device", type=click.Choice(["auto", *DEVICES]), default="auto", show_default=True)
ALLOW_STOCK = click.option("--allow-stock", is_flag=True, help="Take an engine that is stock or edited.")
STARTUP_TIMEOUT = click.option(
    "--startup-timeout", type=Real(min=1), default=1800.0, show_default=True, metavar="SECONDS"
)

_Command = TypeVar("_Command", bound=Callable[..., Any])


def api_key(command: _Command) -> _Command:
    """Add the key of servers that run already; the command gets it as ``api_key``."""
    decorate = click.option(
        "--api-key-file",
        type=click.Path(dir_okay=False, path_type=Path),
        expose_value=False,
        is_eager=True,  # read before the option below looks for it
        callback=_remember_key,
        help="File with the servers' key.",
    )
    also = click.option(
        "--api-key",
        metavar="KEY",
        envvar=["SGLANG_BW_API_KEY", "SGLANG_API_KEY"],
        show_envvar=True,
        callback=lambda ctx, _param, value: ctx.meta.get(_KEY) or value,
        help="Their key; others see it on a command line.",
    )
    return decorate(also(command))


_KEY = "sglang_bw.api_key"


def _remember_key(ctx: click.Context, _param: click.Parameter, file: Path | None) -> None:
    from sglang_bw.launch import secret

    if file:
        ctx.meta[_KEY] = secret.api_key(file, {})


def series_of(root: Path | None, base: str | None) -> Series:
    """Return the series that is asked for, the newest by default."""
    from sglang_bw.fork.series import Series, newest_base, patches_root

    found = patches_root(root)
    return Series.load(found, base or newest_base(found))


def local_of(folder: Path | None) -> LocalSeries | None:
    """Return the local series that is asked for."""
    from sglang_bw.fork.local import LocalSeries

    return LocalSeries.load(folder) if folder else None
