"""A YAML file together with the line of every key, so that an error can say where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sglang_bw.errors import RecipeError, UnknownRecipeError

KeyPath = tuple[str | int, ...]

EXAMPLE = "`sglang-bw recipes show tiny` prints a recipe that is right."


@dataclass(frozen=True)
class Source:
    """Parsed YAML.

    :ivar data: what the file says, as plain Python.
    :ivar lines: path of a key or list item -> line number, from 1.
    """

    path: Path
    data: Any
    lines: dict[KeyPath, int]

    def where(self, key_path: KeyPath) -> str:
        """Return ``file:line`` of a key, or of the closest key above it that is in the file."""
        for length in range(len(key_path), 0, -1):
            if line := self.lines.get(key_path[:length]):
                return f"{self.path.name}:{line}"
        return self.path.name


def load(path: Path) -> Source:
    """Read a YAML file; keys given twice are refused, since YAML would silently keep the last.

    :raises UnknownRecipeError: there is no such file, or it cannot be read.
    :raises RecipeError: the file is not YAML, has a key twice, contains itself by an alias, or is nested too deep.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UnknownRecipeError(
            f"cannot read the recipe {path}: {error.strerror}", hint="`sglang-bw recipes list` shows the bundled ones."
        ) from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not a text file in UTF-8", hint=EXAMPLE) from error
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        if node is not None:
            _walk(node, (), lines, path)
        return Source(path, loader.construct_document(node) if node is not None else None, lines)
    except yaml.MarkedYAMLError as error:
        place = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise RecipeError(f"{path.name}{place}: not valid YAML: {error.problem}", hint=EXAMPLE) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: what only looks like a date or a number
        raise RecipeError(f"{path.name}: not valid YAML: {error}", hint=EXAMPLE) from error
    except RecursionError as error:
        raise RecipeError(f"{path.name}: nested too deep", hint=EXAMPLE) from error


def _walk(
    node: yaml.Node, at: KeyPath, lines: dict[KeyPath, int], path: Path, above: tuple[yaml.Node, ...] = ()
) -> None:
    if any(node is parent for parent in above):
        raise RecipeError(f"{path.name}:{lines[at]}: the alias at {dotted(at)!r} contains itself", hint=EXAMPLE)
    above = (*above, node)
    if isinstance(node, yaml.MappingNode):
        for key, child in node.value:
            here = (*at, str(key.value))
            line = key.start_mark.line + 1
            if here in lines:
                raise RecipeError(
                    f"{path.name}:{line}: the key {dotted(here)!r} is there twice (first on line {lines[here]})",
                    hint="Keep one of them.",
                )
            lines[here] = line
            _walk(child, here, lines, path, above)
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            lines[(*at, index)] = child.start_mark.line + 1
            _walk(child, (*at, index), lines, path, above)


def dotted(key_path: KeyPath) -> str:
    """Return ``devices.cpu.args`` or ``warmup.prompts[2]``."""
    text = ""
    for part in key_path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
