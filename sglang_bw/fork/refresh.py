"""Recording what a series makes: its tree id and the sha256 of every patched file go into ``upstream.toml``."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from sglang_bw.errors import OutputError
from sglang_bw.fork import mail, upstream
from sglang_bw.fork.apply import Applied, Bench, Progress, apply_series, check_pins
from sglang_bw.fork.local import apply_after, load_for, local_version
from sglang_bw.fork.series import PINS_FILE, Pins, Release, Series, is_packaged
from sglang_bw.fork.wheel import Wheel, read_wheel

READ_ONLY = "the series inside an installed tool is read-only: work in a checkout, or use --patches DIR"


def refresh(series: Series, *, wheel: Path | None, release: bool, progress: Progress) -> tuple[Pins, Applied]:
    """Apply a series and write its pins.

    :param wheel: any upstream wheel of the base, else one is fetched: all give the same tree.
    :param release: also make this tree the next released one (``+bw.N``); nothing happens if it is released already.
    :raises BwError: the series does not apply, or the file cannot be written.
    """
    if is_packaged(series.folder.parent):
        raise OutputError(f"{series.folder} is the copy inside the installed tool", hint=READ_ONLY)
    source = _release(series, wheel)
    with tempfile.TemporaryDirectory(prefix="sglang-bw-refresh-") as folder:
        applied = apply_series(series, source, Path(folder), progress)
    pins = replace(series.pins, tree=applied.tree, patched=applied.digests, removed=applied.removed)
    if release and pins.release.tree != applied.tree:
        pins = replace(pins, release=Release(pins.release.number + 1, applied.tree))
    write_pins(series.folder / PINS_FILE, pins)
    return pins, applied


def try_local(series: Series, folder: Path, *, wheel: Path | None, progress: Progress) -> tuple[str, Applied]:
    """Apply a local series after ours and return the version that this makes; nothing is written.

    :raises BwError: either series does not apply, or breaks the format.
    """
    local = load_for(folder, series)
    source = _release(series, wheel)
    ours = [mail.read_patch(path) for path in series.files]
    with tempfile.TemporaryDirectory(prefix="sglang-bw-refresh-") as scratch:
        bench = Bench.new(source, Path(scratch), [*ours, *local.patches], progress)
        check_pins(bench.put(ours), series.pins)
        applied = apply_after(bench, local, series).applied
    return f"{series.base}+{local_version(series.pins, applied.tree)}", applied


def _release(series: Series, wheel: Path | None) -> Wheel:
    name = wheel.name if wheel else upstream.pick_wheel(series.pins, upstream.this_python(), upstream.this_machine())
    path = wheel or upstream.fetch(series.pins, name)
    return read_wheel(path, sha256=upstream.pinned_digest(series.pins, path), version=series.base)


def write_pins(path: Path, pins: Pins) -> None:
    """Write ``upstream.toml`` in one step.

    :raises OutputError: the directory cannot be written to.
    """
    data: dict[str, Any] = {"version": pins.version, "tree": pins.tree}
    if pins.removed:
        data["removed"] = list(pins.removed)
    if pins.release.number:
        data["release"] = {"number": pins.release.number, "tree": pins.release.tree}
    data |= {"wheels": dict(sorted(pins.wheels.items())), "patched": dict(sorted(pins.patched.items()))}
    try:
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=".", delete=False) as file:
            tomli_w.dump(data, file)
        Path(file.name).chmod(0o644)
        os.replace(file.name, path)  # noqa: PTH105
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror}",
            hint=READ_ONLY,
        ) from None
