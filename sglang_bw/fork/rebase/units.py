"""A source file as named units: imports, assignments, functions, and classes down to their members.

Git joins lines and knows nothing of names. Units let the rebase see in which function an edit lies, and what a file
defines. A file that is no Python, or does not parse, is one unit without a name.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_bw.fork.rebase.walk import first_line, text_of

Lines = tuple[bytes, ...]

# Four versions of a file are read several times each while one patch moves.
_KEPT = 64


@dataclass(frozen=True)
class Unit:
    """A statement with the comments above it. ``start`` is its first line, from 0; ``code`` the statement's own."""

    key: str
    start: int
    code: int
    lines: Lines

    @property
    def text(self) -> Lines:
        """The lines without blank ones at either end."""
        lines = list(self.lines)
        while lines and not lines[0].strip():
            lines.pop(0)
        while lines and not lines[-1].strip():
            lines.pop()
        return tuple(lines)


@dataclass(frozen=True)
class Thing:
    """Something a file defines: a member, an attribute, a function, a table's key, an item of a list, an import.

    ``branch`` names the arm of an ``if`` or ``try`` that it lies in: two arms may define the same name.
    """

    name: str
    line: int
    kind: str
    node: ast.AST
    branch: str = ""

    @property
    def interface(self) -> str:
        """What a caller sees: the kind, and a function's decorators and parameters."""
        node = self.node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return self.kind
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        names = [argument.arg for argument in every if argument]
        decorators = [ast.unparse(item) for item in node.decorator_list]
        return f"{type(node).__name__} {decorators} ({', '.join(names)})"

    @property
    def content(self) -> str:
        """All that it does: its tree without places and docstrings."""
        copied = ast.parse(ast.unparse(self.node))
        for inner in ast.walk(copied):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and len(inner.body) > 1:
                first = inner.body[0]
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    inner.body.pop(0)
        return ast.dump(copied)


def split_lines(data: bytes) -> Lines:
    """Split at LF only, as git does."""
    parts = data.split(b"\n")
    return (*(part + b"\n" for part in parts[:-1]), *([parts[-1]] if parts[-1] else []))


@functools.lru_cache(maxsize=_KEPT)
def parse(path: str, data: bytes) -> ast.Module | None:
    """Return the syntax tree of a Python file, ``None`` for anything else."""
    if not path.endswith((".py", ".pyi")):
        return None
    try:
        return ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def forget() -> None:
    """Let go of the trees that were kept: while they are there, Python's collector walks through all of them."""
    for kept in (parse, units, every_thing):
        kept.cache_clear()


def is_divisible(path: str, data: bytes) -> bool:
    """Whether a file has units: Python that parses, with line ends that Python and git count alike."""
    return b"\x0c" not in data and b"\r" not in data.replace(b"\r\n", b"") and parse(path, data) is not None


@functools.lru_cache(maxsize=_KEPT)
def units(path: str, data: bytes) -> tuple[Unit, ...]:
    """Return the units of a file, in order; together they hold every line once."""
    lines = split_lines(data)
    module = parse(path, data)
    if module is None or not is_divisible(path, data):
        return (Unit("", 0, 0, lines),)
    marks = _merge(list(_marks(module.body, "")))
    found: list[Unit] = []
    begin, seen = 0, Counter[str]()
    for key, first, last in [*marks, ("<end>", len(lines) + 1, len(lines))]:
        if key == "<end>" and begin >= len(lines):
            break
        seen[key] += 1
        name = key if seen[key] == 1 else f"{key}#{seen[key]}"
        found.append(Unit(name, begin, first - 1, lines[begin:last]))
        begin = last
    return tuple(found)


def _merge(marks: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Join statements that share a line with the one before."""
    result: list[tuple[str, int, int]] = []
    for key, first, last in marks:
        if result and first <= result[-1][2]:
            result[-1] = (result[-1][0], result[-1][1], max(last, result[-1][2]))
        else:
            result.append((key, first, last))
    return result


def _marks(body: list[ast.stmt], scope: str) -> Iterator[tuple[str, int, int]]:
    """Yield key, first and last line (from 1) of each statement."""
    for node in body:
        first = first_line(node)
        last = node.end_lineno or node.lineno
        key = scope + _key(node)
        if isinstance(node, ast.ClassDef):
            head = min(node.body[0].lineno, *(first_line(item) for item in node.body)) - 1
            yield key, first, max(head, node.lineno)
            yield from _marks(node.body, key + ".")
        else:
            yield key, first, last


def _key(node: ast.stmt) -> str:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Assign(targets=targets):
            return ", ".join(map(text_of, targets))
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            return text_of(target)
        case ast.ImportFrom(module=module, level=level):
            return f"from {'.' * level}{module or ''}"
        case ast.Import():
            return ast.unparse(node)
        case ast.Expr(value=ast.Constant(value=str())):
            return "<text>"
    return "<" + ast.unparse(node).splitlines()[0] + ">"


def things(path: str, data: bytes) -> dict[str, Thing]:
    """Return what a file defines, by qualified name; the first definition of a name wins."""
    found: dict[str, Thing] = {}
    for thing in every_thing(path, data):
        found.setdefault(thing.name, thing)
    return found


@functools.lru_cache(maxsize=_KEPT)
def every_thing(path: str, data: bytes) -> tuple[Thing, ...]:
    """Return what a file defines, a name that comes twice twice."""
    module = parse(path, data)
    return tuple(_things(module.body, "", "")) if module is not None else ()


def _things(body: list[ast.stmt], scope: str, branch: str) -> Iterator[Thing]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                name = scope + node.name
                yield Thing(name, node.lineno, "function", node, branch)
                inner = _things(node.body, name + ".", branch)
                yield from (thing for thing in inner if "[" in thing.name or thing.name.startswith(name + ".self."))
            case ast.ClassDef():
                yield Thing(scope + node.name, node.lineno, "class", node, branch)
                yield from _things(node.body, scope + node.name + ".", branch)
            case ast.Assign() | ast.AnnAssign():
                yield from _values(node, scope, branch)
            case ast.ImportFrom(names=names) | ast.Import(names=names):
                for alias in names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    yield Thing(scope + bound, node.lineno, "import", node, branch)
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                for number, arm in enumerate(_arms(node)):
                    yield from _things(arm, scope, f"{branch}{node.lineno}.{number}/")


def _values(node: ast.Assign | ast.AnnAssign, scope: str, branch: str) -> Iterator[Thing]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    if len(targets) == 1:
        name = scope + text_of(targets[0])
        yield Thing(name, node.lineno, "value", node, branch)
        if node.value is not None:
            yield from _entries(name, node.value, branch)


def _arms(node: ast.stmt) -> list[list[ast.stmt]]:
    blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    return [*blocks, *(handler.body for handler in getattr(node, "handlers", []))]


def _entries(name: str, value: ast.expr, branch: str) -> Iterator[Thing]:
    """Yield the keys of a table, and what a list of constants holds."""
    match value:
        case ast.Dict():
            for key, entry in zip(value.keys, value.values, strict=True):
                if key is not None:
                    inner = f"{name}[{text_of(key)}]"
                    yield Thing(inner, key.lineno, "entry", entry, branch)
                    yield from _entries(inner, entry, branch)
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            for item in items:
                if isinstance(item, ast.Constant):
                    yield Thing(f"{name}[has {item.value!r}]", item.lineno, "item", item, branch)
        case ast.Call(args=arguments):
            for argument in arguments:
                yield from _entries(name, argument, branch)
