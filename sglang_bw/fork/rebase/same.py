"""Whether upstream made the same edit as a hunk: compared as code, function by function.

Comments, layout and the text of an assertion do not count. An edit was made where its lines stand next to a neighbour
that they have in the patch, and the old lines do not stand next to theirs any more.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator, Sequence
from difflib import SequenceMatcher

from sglang_bw.fork.rebase.search import TELLING
from sglang_bw.fork.rebase.units import Thing, parse, things, units
from sglang_bw.fork.rebase.walk import every_node, nodes_at

Code = tuple[str, ...]
_START, _END = "<start>", "<end>"


def made(path: str, old: bytes, patched: bytes, there: str, new: bytes) -> int:
    """Return the line (from 1) in ``new`` where upstream has all edits between ``old`` and ``patched``, else 0.

    Edits outside of functions that both releases have are not judged: 0.
    """
    before, after, theirs = things(path, old), things(path, patched), things(there, new)
    line = 0
    for key in _changed(path, old, patched):
        name = key.partition("#")[0]
        three = before.get(name), after.get(name), theirs.get(name)
        if "#" in key or any(thing is None or thing.kind != "function" for thing in three):
            return 0
        codes = tuple(code(thing) for thing in three if thing)
        if codes[0] == codes[1]:
            continue
        told = _made(*codes)
        if not told or not three[2]:
            return 0
        line = line or _line(three[2], told)
    return line


def _changed(path: str, old: bytes, patched: bytes) -> list[str]:
    """Return the units in which two versions differ, without imports."""
    one, two = ({unit.key: unit.text for unit in units(path, data)} for data in (old, patched))
    return [
        key for key in dict.fromkeys((*one, *two))
        if one.get(key) != two.get(key) and not key.startswith(("from ", "import "))
    ]  # fmt: skip


def used(path: str, data: bytes, lines: Collection[int]) -> Iterator[tuple[int, bytes]]:
    """Yield line (from 1) and name of what a file's code uses in some lines; messages of assertions are no code."""
    module = parse(path, data)
    messages: set[ast.AST] = set()
    for node in nodes_at(module, lines) if module else ():
        match node:
            case ast.Name(id=name, lineno=line) | ast.Attribute(attr=name, lineno=line):
                if line in lines and node not in messages:
                    yield line, name.encode()
            case ast.Assert(msg=ast.expr() as message):
                messages |= set(every_node(message))


@functools.lru_cache(maxsize=256)
def _text(source: str) -> Code:
    module = ast.parse(source)
    for node in every_node(module):
        if isinstance(node, ast.Assert):
            node.msg = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and len(node.body) > 1:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body.pop(0)
    return tuple(ast.unparse(module).splitlines())


def code(thing: Thing) -> Code:
    """Return a definition as lines of plain code, one for each simple statement."""
    return _text(ast.unparse(thing.node))


def _made(old: Code, patched: Code, new: Code) -> str:
    """Return the first line of the edits that says something, when all of them were made; else an empty string."""
    old, patched, new = ((_START, *lines, _END) for lines in (old, patched, new))
    told = ""
    for kind, first, last, begin, end in SequenceMatcher(None, old, patched, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        if begin == end:
            windows: list[Code] = []
        else:
            windows = [patched[begin - 1 : end], patched[begin : end + 1]]
        there = [window for window in windows if _has(new, window) and not _has(old, window)]
        if (windows and not there) or _remains(old, first, last, new):
            return ""
        telling = [line for window in there[:1] for line in window if len(line.strip()) >= TELLING]
        if len(telling) > 1:
            told = told or next((line for line in patched[begin:end] if len(line.strip()) >= TELLING), "")
    return told


def _remains(old: Code, first: int, last: int, new: Code) -> bool:
    """Whether the lines that an edit replaces, or the seam that it opens, are still there."""
    if first == last:
        return _has(new, old[first - 1 : first + 1])
    return _has(new, old[first - 1 : last]) or _has(new, old[first : last + 1])


def _has(lines: Code, window: Code) -> bool:
    size = len(window)
    return any(lines[at : at + size] == window for at in range(len(lines) - size + 1))


def _line(thing: Thing, told: str) -> int:
    """Return where a line of plain code stands in the file."""
    statements: Sequence[ast.stmt] = [node for node in every_node(thing.node) if isinstance(node, ast.stmt)]
    found = [node.lineno for node in statements if _text(ast.unparse(node))[0] == told.strip()]
    return min(found, default=thing.line)
