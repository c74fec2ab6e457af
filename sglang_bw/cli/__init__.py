"""The command line: parses, prints and exits; everything else is done by the package it calls."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from sglang_bw.errors import BwError, OutputError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# A full disk below what was written is no fault of this tool.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

# Section -> command -> ("module:attribute", short help). A command is imported on use only, so that `--version` and
# `--help` stay quick.
COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "Fork": {
        "build": (
            "sglang_bw.cli.fork:build",
            "Build the patched SGLang wheel into dist/, and a simple index beside it.",
        ),
        "patches": ("sglang_bw.cli.patches:patches", "List, show, check and record the patches of a series."),
        "install": (
            "sglang_bw.cli.engine:install",
            "Install the patched engine and its locked dependencies, or go back to stock.",
        ),
        "verify": (
            "sglang_bw.cli.engine:verify",
            "Say which engine is installed, and whether its files are the recorded ones.",
        ),
        "upgrade": (
            "sglang_bw.cli.upgrade:upgrade",
            "Take an environment to another base, saying first what changes and how to return.",
        ),
        "bundle": (
            "sglang_bw.cli.bundle:bundle",
            "Pack engine, dependencies and tool for a host without a network, or check such a bundle.",
        ),
        "rebase": ("sglang_bw.cli.rebase:rebase", "Move the series to another SGLang release, forwards or back."),
    },
    "Launch": {
        "serve": (
            "sglang_bw.cli.launch:serve",
            "Start the patched engine with EAGLE-3 and show its URL when it answers.",
        ),
        "recipes": ("sglang_bw.cli.recipes:recipes", "List, show, check and write recipes."),
        "plan": ("sglang_bw.cli.plan:plan", "What will not fit, not run or not pay, before anything is loaded."),
        "doctor": ("sglang_bw.cli.host:doctor", "Find out what will not run, before anything is loaded."),
        "probe": (
            "sglang_bw.cli.probe:probe",
            "Measure all-reduces and rounds of speculation on this host.",
        ),
        "status": ("sglang_bw.cli.instances:status", "The servers that were started here."),
        "logs": ("sglang_bw.cli.instances:logs", "The log of a server that was started here."),
        "stop": ("sglang_bw.cli.instances:stop", "Stop servers that were started here."),
        "watch": ("sglang_bw.cli.watch:watch", "Watch a running server: tok/s, accept length, queue, KV cache."),
    },
    "Experiment": {
        "ab": (
            "sglang_bw.cli.experiment:ab",
            "Measure a baseline and a treatment, and say what is faster, and how sure.",
        ),
        "tune": ("sglang_bw.cli.tune:tune", "Search for the settings of a recipe that serve fastest here."),
        "ledger": ("sglang_bw.cli.ledger:ledger", "What was tried, what came of it, and the report."),
    },
}


class LazyGroup(click.Group):
    """A group that imports a command only when it is called or its help is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return command names in the order of the help."""
        return [name for section in COMMANDS.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command, or ``None``."""
        for section in COMMANDS.values():
            if entry := section.get(cmd_name):
                module, _, attribute = entry[0].partition(":")
                command: click.Command = getattr(importlib.import_module(module), attribute)
                return command
        return None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin like this, none of them imported, and then the options."""
        from click.shell_completion import CompletionItem

        rows = [(name, short) for section in COMMANDS.values() for name, (_, short) in section.items()]
        found = [CompletionItem(name, help=short) for name, short in rows if name.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in their sections."""
        for title, section in COMMANDS.items():
            rows = [(name, short) for name, (_, short) in section.items()]
            with formatter.section(title):
                formatter.write_dl(rows)


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from sglang_bw.fork.series import version_line

    click.echo(version_line())
    ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Tool, base and series."
)
@click.option("--traceback", is_flag=True, help="Show the Python traceback of an error.")
def cli(traceback: bool) -> None:
    """SGLang for Blackwell, with speculative decoding that pays."""


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the tool and exit: the only place that turns an error into a message and an exit code."""
    arguments: list[str] = sys.argv[1:] if argv is None else argv
    try:
        code: Any = cli.main(args=arguments, prog_name="sglang-bw", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BwError as error:
        if "--traceback" in arguments:
            raise
        from sglang_bw.cli.console import clean

        click.echo(f"error: {clean(error.message)}", err=True)
        if error.hint:
            click.echo(f"hint: {clean(error.hint)}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        click.echo(f"error: cannot write: {error.strerror}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it would be tried once more at the end
        sys.exit(OutputError.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
