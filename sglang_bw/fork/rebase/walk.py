"""Syntax trees as text and as a stream of nodes, in a fraction of the time that ``ast`` takes for either."""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections.abc import Collection, Iterator


def every_node(module: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it in the order of :func:`ast.walk`, without the marks for load and store."""
    found = [module]
    # Grows while it is read.
    for node in found:
        yield node
        found += _children(node)


def nodes_at(module: ast.AST, lines: Collection[int]) -> Iterator[ast.AST]:
    """Yield the nodes of those statements that touch some lines (from 1), in the order of :func:`ast.walk`."""
    wanted = sorted(lines)
    found = [module]
    for node in found:
        if isinstance(node, ast.stmt) and not _touches(node, wanted):
            continue
        yield node
        found += _children(node)


def first_line(node: ast.stmt) -> int:
    """Return the line (from 1) where a statement begins, its decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(item.lineno for item in decorators)])


def text_of(node: ast.AST) -> str:
    """Return what :func:`ast.unparse` does; names and plain constants, which are most of what is asked, at once."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
        return f"{text_of(node.value)}.{node.attr}"
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int):
        return repr(node.value)
    return ast.unparse(node)


def _children(node: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            found += [item for item in value if isinstance(item, ast.AST)]
        elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
            found.append(value)
    return found


def _touches(node: ast.stmt, lines: list[int]) -> bool:
    at = bisect_left(lines, first_line(node))
    return at < len(lines) and lines[at] <= (node.end_lineno or node.lineno)
