"""What `serve` says: sentences for people, or one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from sglang_bw.cli.console import err, out
from sglang_bw.cli.startup_line import spent
from sglang_bw.launch import warmup
from sglang_bw.launch.command import Command
from sglang_bw.launch.engine import Engine
from sglang_bw.launch.process import shell_code
from sglang_bw.launch.server import Server
from sglang_bw.recipes import flags
from sglang_bw.recipes.schema import Recipe


class ServeConsole:
    """Says how a launch goes."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def begin(self, recipe: Recipe, command: Command, engine: Engine, log: Path, notes: tuple[str, ...]) -> None:
        """Say what will be started."""
        spec = "no speculation"
        if command.speculates:
            names = ("algorithm", "num-steps", "eagle-topk", "num-draft-tokens")
            algorithm, steps, topk, tokens = (flags.value(command.flags, f"speculative-{n}", "auto") for n in names)
            spec = f"{algorithm}, {steps} steps, topk {topk}, {tokens} draft tokens"
        err.print(f"{recipe.id}: sglang {engine.installation.version}, {command.device}, {spec}", markup=False)
        err.print(f"log: {log}", markup=False)
        for note in notes:
            self.warn(note)

    def ready(self, running: Server, *, detached: bool) -> None:
        """Say where it answers, and how long it took."""
        startup = running.startup
        if self.as_json:
            seconds = {phase.value: round(value, 2) for phase, value in startup.seconds.items()}
            self._line(
                event="ready",
                url=running.command.url,
                pid=running.process.pid,
                log=str(running.process.log),
                seconds=seconds,
            )
            return
        out.print(f"ready in {startup.elapsed():.1f} s ({spent(startup)})", markup=False)
        end = "" if detached else "; Ctrl-C stops it"
        out.print(f"{running.command.url}  (OpenAI API below /v1{end})", markup=False)

    def warmed_up(self, report: warmup.Report) -> None:
        """Say what the warm-up measured."""
        if self.as_json:
            self._line(
                event="warm-up",
                accept_length=report.accept_length,
                tokens_per_second=round(report.tokens_per_second, 2),
                broken=report.broken,
                warnings=list(report.warnings),
            )
            return
        length = f"accept length {report.accept_length:.2f}, " if report.accept_length is not None else ""
        out.print(f"warm-up: {length}{report.tokens_per_second:.1f} tok/s (one request at a time)", markup=False)
        for text in report.warnings:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Warn."""
        err.print(f"warning: {text}", style="yellow", markup=False)

    def end(self, running: Server, code: int) -> None:
        """Say how it ended."""
        if self.as_json:
            self._line(event="exit", code=shell_code(code))
        if code != 0 and not running.relay.received:
            err.print(f"error: the engine ended with exit code {shell_code(code)}: {running.death()}", markup=False)
            err.print(f"hint: Full log: {running.process.log}", markup=False)

    @staticmethod
    def _line(**fields: Any) -> None:
        click.echo(json.dumps(fields))
