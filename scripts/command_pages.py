"""docs/commands/: one page a command, from the command line itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

from sglang_bw.cli import COMMANDS, cli

CHECKOUT = Path(__file__).resolve().parent.parent
FOLDER = CHECKOUT / "docs" / "commands"
_MADE = "<!-- generated from the command line by scripts/pages.py -->"


def pages() -> dict[Path, str]:
    """Return what each page of the folder must hold."""
    top = click.Context(cli, info_name="sglang-bw")
    found = {FOLDER / "index.md": _index(top)}
    for name in cli.list_commands(top):
        found[FOLDER / f"{name}.md"] = _page(top, name)
    return found


def write() -> None:
    wanted = pages()
    FOLDER.mkdir(exist_ok=True)
    for path in set(FOLDER.glob("*.md")) - set(wanted):
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")


def _index(top: click.Context) -> str:
    lines = ["# Commands", "", _MADE, ""]
    for section, commands in COMMANDS.items():
        lines += [f"## {section}", "", "| command | |", "|---|---|"]
        lines += [f"| [`sglang-bw {name}`]({name}.md) | {short} |" for name, (_, short) in commands.items()]
        lines.append("")
    lines += ["Options of `sglang-bw` itself, before the command:", "", *_options(top)]
    lines.append("Every command has `--help`. [Exit codes](../exit-codes.md), [shell completion](../completion.md).")
    return "\n".join(lines) + "\n"


def _page(top: click.Context, name: str) -> str:
    command = cli.get_command(top, name)
    assert command is not None
    lines = [f"# `sglang-bw {name}`", "", _MADE, "", *_body(click.Context(command, info_name=name, parent=top))]
    more = [page for page in (f"{name}.md", f"{name}-kernels.md") if (CHECKOUT / "docs" / page).is_file()]
    if more:
        lines += ["More: " + ", ".join(f"[{page}](../{page})" for page in more) + "."]
    return "\n".join(lines).rstrip() + "\n"


def _body(ctx: click.Context) -> Iterator[str]:
    """Yield usage, text and options of a command, then those of its subcommands below headings of their own."""
    command = ctx.command
    yield from ["```text", " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)]), "```", ""]
    yield from [inspect.cleandoc(command.help or ""), ""]
    yield from _options(ctx)
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            child = command.get_command(ctx, name)
            assert child is not None
            inner = click.Context(child, info_name=name, parent=ctx)
            yield from [f"## `{inner.command_path}`", "", *_body(inner)]


def _options(ctx: click.Context) -> Iterator[str]:
    options = [param for param in ctx.command.params if isinstance(param, click.Option) and not param.hidden]
    if options:
        yield from ["| option | |", "|---|---|"]
        yield from (f"| {_code(_names(option, ctx))} | {_says(option)} |" for option in options)
        yield ""


def _names(option: click.Option, ctx: click.Context) -> str:
    names = " / ".join(", ".join(names) for names in (option.opts, option.secondary_opts) if names)
    if option.is_flag:
        return names
    if option.metavar or not isinstance(option.type, click.Choice):
        value = option.metavar or option.type.name.replace(" range", "").upper()
        return f"{names} {value}"
    return f"{names} CHOICE"


def _default(option: click.Option) -> str:
    if option.required:
        return "Required."
    if not option.show_default or option.default is None:
        return ""
    default = f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
    return f"Default: {_code(default)}."


def _says(option: click.Option) -> str:
    parts = [(option.help or "").replace("|", "&#124;")]
    if isinstance(option.type, click.Choice) and not option.is_flag:
        parts.append("One of " + ", ".join(f"`{choice}`" for choice in option.type.choices) + ".")
    if isinstance(option.type, click.IntRange | click.FloatRange):
        parts.append(_range(option.type))
    parts.append(_default(option))
    if option.envvar:
        parts.append(f"Also from `{option.envvar}`.")
    return " ".join(filter(None, parts))


def _range(kind: click.IntRange | click.FloatRange) -> str:
    if kind.min is not None and kind.max is not None:
        return f"From {kind.min} to {kind.max}."
    return f"At least {kind.min}." if kind.min is not None else f"At most {kind.max}."


def _code(text: str) -> str:
    """Return code for a table: a bar inside of backticks would end the cell on some readers."""
    return f"`{text}`" if "|" not in text else f"<code>{text.replace('|', '&#124;')}</code>"
