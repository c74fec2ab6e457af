"""What the added lines of a patch use of the engine: names that the new release may not have any more, or not yet.

Lines can be joined perfectly and still call what is not there. A bare name must be bound in the resulting file; an
attribute, a keyword or an imported name that the old release has somewhere must be somewhere in the new one, unless it
is looked up in a module of another project.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Container, Iterator

from sglang_bw.fork.rebase.units import parse

Known = Callable[[str], bool]


def lost(
    path: str, patched: bytes, added: Container[int], result: bytes, in_old: Known, in_new: Known
) -> list[tuple[str, int]]:
    """Return names that the added lines use and the result does not have, with their line in ``patched``.

    :param added: the lines of ``patched`` (from 1) that the patch adds.
    :param in_old: whether a word stands anywhere in the old release.
    :param in_new: whether it stands anywhere in the new one, with the patches so far.
    """
    module, final = parse(path, patched), parse(path, result)
    if module is None or final is None:
        return []
    bound = _bound(final)
    here = set(_words(final))
    found: dict[str, int] = {}
    for name, line, is_bare in _used(module, added):
        if is_bare:
            is_lost = bound is not None and name not in bound and not hasattr(builtins, name)
        else:
            is_lost = name not in here and not in_new(name) and in_old(name)
        if is_lost:
            found.setdefault(name, line)
    return list(found.items())


def _used(module: ast.Module, lines: Container[int]) -> Iterator[tuple[str, int, bool]]:
    """Yield name, line, and whether it is a bare one; what belongs to another project's module is not the engine's."""
    foreign = _foreign(module)
    for node in ast.walk(module):
        if getattr(node, "lineno", 0) not in lines:
            continue
        match node:
            case ast.Attribute() if _root(node) in foreign:
                pass
            case ast.Name(id=name, ctx=ast.Load()):
                yield name, node.lineno, True
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                yield name, node.lineno, False
            case ast.ImportFrom(module=str(source), names=names, level=0) if source.startswith("sglang"):
                for alias in names:
                    yield alias.name, node.lineno, False


def _foreign(module: ast.Module) -> set[str]:
    """Return the names under which a file imports modules that are not the engine's."""
    return {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(module)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.partition(".")[0] != "sglang"
    }


def _root(node: ast.expr) -> str:
    """Return the bare name that a chain of attributes begins with, an empty string when it begins otherwise."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _bound(module: ast.Module) -> set[str] | None:
    """Return every name that a file binds in any scope, ``None`` when a star import may bind more."""
    names = {"__file__", "__name__", "__doc__", "__spec__", "__package__", "__class__", "__path__"}
    for node in ast.walk(module):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                if any(alias.name == "*" for alias in aliases):
                    return None
                names |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
    return names


def _words(module: ast.Module) -> Iterator[str]:
    """Yield what a file defines as attributes and members."""
    for node in ast.walk(module):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
