"""What the added lines of a patch use of the engine: names that the new release may not have any more, or not yet.

Lines can be joined perfectly and still call what is not there. A bare name must be bound in the resulting file; an
attribute, a keyword or an imported name that the old release has somewhere must be somewhere in the new one, unless it
is looked up in a module of another project.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from sglang_bw.fork.rebase.units import parse
from sglang_bw.fork.rebase.walk import every_node, nodes_at

Known = Callable[[str], bool]

# What every module and class has without saying so.
_GIVEN = ("__file__", "__name__", "__doc__", "__spec__", "__package__", "__class__", "__path__")


def lost(
    path: str, patched: bytes, added: Collection[int], result: bytes, in_old: Known, in_new: Known
) -> list[tuple[str, int]]:
    """Return names that the added lines use and the result does not have, with their line in ``patched``.

    :param added: the lines of ``patched`` (from 1) that the patch adds.
    :param in_old: whether a word stands anywhere in the old release.
    :param in_new: whether it stands anywhere in the new one, with the patches so far.
    """
    module, final = parse(path, patched), parse(path, result)
    if module is None or final is None:
        return []
    here = _Names.of(final)
    # Git's result is mostly the patched file itself.
    foreign = here.foreign if final is module else _Names.of(module).foreign
    found: dict[str, int] = {}
    for name, line, is_bare in _used(module, added, foreign):
        if is_bare:
            is_lost = not here.has_star and name not in here.bound and not hasattr(builtins, name)
        else:
            is_lost = name not in here.defined and not in_new(name) and in_old(name)
        if is_lost:
            found.setdefault(name, line)
    return list(found.items())


def _used(module: ast.Module, lines: Collection[int], foreign: set[str]) -> Iterator[tuple[str, int, bool]]:
    """Yield name, line, and whether it is a bare one; what belongs to another project's module is not the engine's."""
    for node in nodes_at(module, lines):
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


def _root(node: ast.expr) -> str:
    """Return the bare name that a chain of attributes begins with, an empty string when it begins otherwise."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@dataclass
class _Names:
    """The names of a file, found in one pass.

    ``bound`` in any scope, ``defined`` as attributes and members, ``foreign`` for modules that are not the engine's;
    ``has_star``: a star import may bind more.
    """

    bound: set[str] = field(default_factory=lambda: set(_GIVEN))
    defined: set[str] = field(default_factory=set)
    foreign: set[str] = field(default_factory=set)
    has_star: bool = False

    @classmethod
    def of(cls, module: ast.Module) -> _Names:
        names = cls()
        for node in every_node(module):
            # Most nodes are none of these, and a class is compared faster than a pattern.
            if isinstance(node, _TELLING):
                names._take(node)
        return names

    def _take(self, node: ast.AST) -> None:
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store()):
                self.defined.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                self.bound.add(name)
                self.defined.add(name)
            case ast.Name(id=name, ctx=ast.Del()):
                self.bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                self.bound.add(name)
                self.defined.add(name)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                self.bound.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                self._import(aliases, is_module=isinstance(node, ast.Import))

    def _import(self, aliases: list[ast.alias], *, is_module: bool) -> None:
        for alias in aliases:
            outermost = alias.name.partition(".")[0]
            self.bound.add(alias.asname or outermost)
            self.has_star |= alias.name == "*"
            if is_module and outermost != "sglang":
                self.foreign.add(alias.asname or outermost)


_TELLING = (
    ast.Attribute,
    ast.Name,
    ast.arg,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.ExceptHandler,
    ast.MatchAs,
    ast.MatchStar,
    ast.Import,
    ast.ImportFrom,
)
