"""Resolve a command line as another machine: a request in JSON on standard input, the answer on standard output."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
import os
import sys
from typing import Any

from sglang_bw.plan.engine_probe.machine import TooOldError, machine
from sglang_bw.plan.engine_probe.trace import Trace

_MOST_NOTES = 40


def main() -> None:
    """Answer one request: ``argv``, ``capability``, ``memory_mib``, ``count``, ``name``."""
    request = json.load(sys.stdin)
    answer_to = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the engine prints is no answer
    json.dump(_answer(request), answer_to, default=_plain)
    answer_to.close()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    # CUDA packages are not needed to resolve, and cannot be loaded where there is no driver.
    from sglang_bw.host.kernel_probe.board import put_stand_ins

    put_stand_ins()
    trace = Trace()
    try:
        with machine(tuple(request["capability"]), request["memory_mib"], request["count"], request["name"]):
            return _resolve(request["argv"], trace)
    except TooOldError as error:
        return {"outcome": "too old", "error": str(error)}


def _resolve(argv: list[str], trace: Trace) -> dict[str, Any]:
    from sglang.srt.server_args import ServerArgs
    from sglang.version import __version__

    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = parser.parse_args(argv)
            for action in parser._actions:
                action.default = argparse.SUPPRESS
            asked = vars(parser.parse_args(argv))
    except SystemExit:
        return {"outcome": "refused", "rule": "the command line", "error": said.getvalue().strip().split("error: ")[-1]}
    args = ServerArgs.from_cli_args(parsed)
    trace.install(importlib.import_module("sglang.srt.arg_groups.pipeline"))
    notes = _Notes()
    trace.compare(args)
    answer: dict[str, Any] = {"engine": __version__, "asked": asked, "outcome": "resolved"}
    with notes:
        try:
            args.resolve_once()
        except Exception as error:
            rule = trace.current or "the engine"
            return answer | {"outcome": "refused", "rule": rule, "error": _said(error), "notes": notes.lines}
    trace.compare(args)
    environment = {name: [os.environ.get(name), rule] for name, rule in trace.environment.items()}
    return answer | {
        "effective": args.resolved_dict(),
        "rules": trace.rules,
        "environment": environment,
        "notes": notes.lines,
    }


class _Notes(logging.Handler):
    """Warnings that the engine logs while it resolves."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def __enter__(self) -> None:
        logging.getLogger().addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        line = " ".join(record.getMessage().replace("\033[1;33m", "").replace("\033[0m", "").split())
        if line not in self.lines and len(self.lines) < _MOST_NOTES:
            self.lines.append(line)


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _plain(value: Any) -> Any:
    if hasattr(value, "value"):
        return value.value
    return [*value] if isinstance(value, set | frozenset) else str(value)
