"""The part of `serve --detach` that leaves a launch to a process of its own and waits until it serves.

Everything is checked, and weights are fetched, before the process is split off: what goes wrong until then is told as
without `--detach`. The new process has a session of its own, so that no terminal takes it along; what it prints goes to
two files beside its record, and from there to whoever waits.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TextIO

import click

from sglang_bw.cli import foreground
from sglang_bw.cli.console import err, out
from sglang_bw.cli.foreground import Checked
from sglang_bw.cli.preparation import Options
from sglang_bw.launch import instances
from sglang_bw.launch.instances import Instance, Process
from sglang_bw.launch.process import shell_code

_POLL_S = 0.1
_STOP_S = 15.0


def run(launch: Checked, options: Options) -> int:
    """Start, wait until it serves or has failed, and return the exit code: 0, or that of the failed start.

    Returns twice, as ``fork`` does: in the server's process when the server has ended.

    :raises OutputError: there is no place for its record.
    """
    instance = foreground.register(launch, detached=True)
    for path in instance.console:
        path.touch(mode=0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    instance.update(process=Process.of(child or os.getpid()))
    if child == 0:
        _leave(instance)
        return foreground.run(launch, options, instance)
    if options.no_wait:
        _say_started(instance, options, is_ready=False)
        return 0
    return _wait(child, instance, options)


def _leave(instance: Instance) -> None:
    """Let go of the terminal."""
    os.setsid()
    streams = (Path(os.devnull), "rb"), *((path, "ab") for path in instance.console)
    for number, (path, mode) in enumerate(streams):
        with path.open(mode) as file:
            os.dup2(file.fileno(), number)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)


def _wait(child: int, instance: Instance, options: Options) -> int:
    """Pass on what the server's process prints until it serves or is gone."""
    shown = [path.open(encoding="utf-8", errors="replace") for path in instance.console]
    began = time.monotonic()
    with err.status("starting") if err.is_terminal else _Silent() as status:
        try:
            while True:
                code = _exit_code(child)
                record = _record(instance)
                _pass_on(*shown)
                status.update(f"{record.phase if record else 'starting'} ({time.monotonic() - began:.0f} s)")
                if code is not None:
                    _pass_on(*shown)
                    return code
                if record and record.settled:
                    break
                time.sleep(_POLL_S)
        except KeyboardInterrupt:  # as without --detach: an interrupted start is none
            os.kill(child, signal.SIGTERM)
            return _interrupted(child)
    _say_started(instance, options, is_ready=True)
    return 0


def _interrupted(child: int) -> int:
    deadline = time.monotonic() + _STOP_S
    while _exit_code(child) is None:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)  # its keeper ends the engine
        time.sleep(_POLL_S)
    return 130


def _exit_code(child: int) -> int | None:
    """Return the exit code of a child that has ended; it is not reaped twice."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return shell_code(os.waitstatus_to_exitcode(status)) if pid else None


def _record(instance: Instance) -> instances.Record | None:
    return next((one.record for one in instances.everything() if one.folder == instance.folder), None)


def _pass_on(output: TextIO, errors: TextIO) -> None:
    for stream, text in ((sys.stderr, errors.read()), (sys.stdout, output.read())):
        if text:
            stream.write(text)
            stream.flush()


def _say_started(instance: Instance, options: Options, *, is_ready: bool) -> None:
    name = instance.name
    if options.as_json:
        click.echo(json.dumps({"event": "detached", "name": name, "ready": is_ready}))
        return
    out.print(f"{name} {'serves' if is_ready else 'starts'} by itself now", markup=False)
    out.print(f"`sglang-bw status`, `sglang-bw logs -f {name}`, `sglang-bw stop {name}`", markup=False)


class _Silent:
    """Stands where a terminal has a status line."""

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def update(self, _text: str) -> None:
        return
