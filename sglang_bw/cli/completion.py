"""What the shell completes beside options: names that a listing of a few files tells.

Each function has the form of click's ``shell_complete``. They must stay quick: a shell waits for them at each Tab.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from click import Context, Parameter
from click.shell_completion import CompletionItem

from sglang_bw.errors import BwError


def recipes(_ctx: Context, _param: Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the bundled recipes that begin like this, else let the shell look for files."""
    from sglang_bw.recipes.lookup import catalogue

    return _starting(catalogue(), incomplete) or [CompletionItem(incomplete, type="file")]


def machines(_ctx: Context, _param: Parameter, incomplete: str) -> list[CompletionItem]:
    """Return machines such as ``8xRTX-PRO-6000`` for the count that was typed; spaces would break into words."""
    from sglang_bw.host.boards import BOARDS

    count = incomplete.partition("x")[0]
    count = count if count.isdigit() else "1"
    return _starting((f"{count}x{board.name.replace(' ', '-')}" for board in BOARDS), incomplete)


def bases(ctx: Context, _param: Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the SGLang releases that have a series."""
    from sglang_bw.fork import series

    try:
        return _starting(series.bases(_root(ctx)), incomplete)
    except BwError:
        return []


def patches(ctx: Context, _param: Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the patches of the base that was named, the newest by default, by file name or by topic."""
    from sglang_bw.fork import series

    try:
        root = _root(ctx)
        names = series.read_order(root / (ctx.params.get("base") or series.newest_base(root)) / series.ORDER_FILE)
    except BwError:
        return []
    stems = [name.removesuffix(".patch") for name in names]
    return _starting(stems, incomplete) or _starting((stem.partition("-")[2] for stem in stems), incomplete)


def prompts(_ctx: Context, _param: Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the prompt sets that begin like this, else let the shell look for files."""
    from sglang_bw.experiment.prompts import names

    return _starting(names(), incomplete) or [CompletionItem(incomplete, type="file")]


def _root(ctx: Context) -> Path:
    from sglang_bw.fork.series import patches_root

    return patches_root(ctx.params.get("root"))


def _starting(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.lower().startswith(incomplete.lower())]
