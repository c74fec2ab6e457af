"""The part of `serve` that looks at this host: GPUs, compilers, and weights that must be fetched first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from sglang_bw.cli.console import err
from sglang_bw.errors import BwError, GpuSelectionError, ModelFilesError
from sglang_bw.host import nvml
from sglang_bw.host.gpus import Gpus
from sglang_bw.host.system import System
from sglang_bw.launch import hub, preflight, weights
from sglang_bw.launch.command import Command
from sglang_bw.launch.engine import Engine
from sglang_bw.launch.hub import Remote, Wanted
from sglang_bw.launch.notify import going_on
from sglang_bw.recipes.hardware import Device

_REPORT_EVERY_S = 10.0
# A fetch under systemd from which no byte has come for so long is ended, and goes on with the next start.
_STANDSTILL_S = 300.0


def gpus(device: Device, wanted: str | None, *, look: bool) -> Gpus | None:
    """Return the GPUs of this machine; ``None`` on a CPU, and when the launch is only printed."""
    if device != "cuda":
        if wanted:
            raise click.UsageError(f"--gpus goes with --device cuda, and this launch is for {device}.")
        return None
    return nvml.read(nvml.load()) if look else None


def check(command: Command, here: Gpus | None, engine: Engine, environ: Mapping[str, str], *, force: bool) -> None:
    """Check the host, then fetch what is missing of the weights.

    :raises BwError: the first refusal, with all others in its message; none of them with ``force``.
    """
    environ = {**environ, **command.env}
    refusals: list[BwError] = []
    if here and here.problem and not here.boards:
        _note(f"the GPUs were not looked at: {here.problem}")
    elif here:
        refusals += _of_gpus(command, here, engine, environ)
    remotes: list[Remote] = []
    for model in hub.wanted(command, environ):
        if hub.is_offline(environ):
            problem = hub.offline_problem(model)
        else:
            remote = _asked(model, environ)
            problem = hub.problem(remote, beside=sum(other.missing_bytes for other in remotes))
            remotes.append(remote)
        refusals += [problem] if problem else []
    _refuse(refusals, force=force)
    for remote in remotes:
        if remote.missing:
            _fetch(remote, environ)


def _of_gpus(command: Command, here: Gpus, engine: Engine, environ: Mapping[str, str]) -> list[BwError]:
    try:
        boards = preflight.used(command, here, environ)
    except GpuSelectionError as error:
        return [error]
    if boards:
        err.print(preflight.summary(boards), markup=False)
    return list(preflight.problems(command, boards, here, System(environ=environ), engine.probed))


def _asked(model: Wanted, environ: Mapping[str, str]) -> Remote:
    """Ask the hub; when it does not answer, what is whole in the cache needs no hub."""
    with err.status(f"asking the hub for {model.name}") if err.is_terminal else nullcontext():
        remote = hub.look(model, environ)
    if remote.problem and hub.offline_problem(model) is None:
        _note(f"{remote.problem}; the {model.role} {model.name} is taken from the cache")
        return Remote(model)
    return remote


def _note(text: str) -> None:
    err.print(f"note: {text}", style="yellow", markup=False)


def _refuse(refusals: list[BwError], *, force: bool) -> None:
    if not refusals:
        return
    if force:
        for refusal in refusals:
            err.print(f"warning: {refusal.message} (--force)", style="yellow", markup=False)
        return
    first, *others = refusals
    first.message = "\n  also: ".join([first.message, *(other.message for other in others)])
    hints = dict.fromkeys(refusal.hint for refusal in refusals if refusal.hint)
    first.hint = "\n  ".join([*hints, "--force goes on all the same."])
    raise first


def _fetch(remote: Remote, environ: Mapping[str, str]) -> None:
    """Fetch with a bar on a terminal, else a line every ten seconds; then check that it is whole."""
    model = remote.wanted
    label = f"{model.role} {model.name}"
    err.print(
        f"{label}: {remote.missing_bytes / 1e9:.2f} of {remote.total / 1e9:.2f} GB to fetch into {model.cache}",
        markup=False,
    )
    with _shown(label, remote.missing_bytes) as tell:
        hub.fetch(remote, environ, _supervised(label, tell))
    folder = hub.cached(model, remote.commit)
    if folder is None:
        raise ModelFilesError(
            f"the {label} has no config.json", hint="is it a model, and not a LoRA adapter or a GGUF file?"
        )
    weights.check(folder, model.role, tokenizer=folder if model.role == "target" else None)


def _supervised(label: str, tell: Callable[[int], None]) -> Callable[[int], None]:
    """Tell the supervisor of bytes as they come: a unit's time is for the load, and a fetch may take hours."""
    most = -1

    def told(done: int) -> None:
        nonlocal most
        if done > most:
            most = done
            going_on(_STANDSTILL_S, f"fetching the {label}")
        tell(done)

    return told


@contextmanager
def _shown(label: str, total: int) -> Iterator[Callable[[int], None]]:
    if err.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as progress:
            task = progress.add_task(label, total=total)
            yield lambda done: progress.update(task, completed=min(done, total))
        return
    said = time.monotonic()

    def tell(done: int) -> None:
        nonlocal said
        if time.monotonic() - said >= _REPORT_EVERY_S:
            said = time.monotonic()
            err.print(f"{label}: {done / 1e9:.2f} of {total / 1e9:.2f} GB", markup=False)

    yield tell
