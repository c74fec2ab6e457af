"""Read the engine flags of every release from its wheel and write sglang_bw/recipes/data/flags.json.

`python scripts/flags.py FOLDER` with the wheels of `pip download sglang==X.Y.Z --no-deps` in FOLDER. The wheels are
read, never imported: server_args.py and arg_groups/ by their syntax trees.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename
from packaging.version import Version

DATA = Path(__file__).resolve().parent.parent / "sglang_bw" / "recipes" / "data" / "flags.json"
_SOURCES = ("sglang/srt/server_args.py", "sglang/srt/arg_groups/")
_ABBREVIATED = {"A", "Annotated"}


def flags_of(wheel: Path) -> dict[str, dict[str, Any]]:
    """Return the flags of a release: name without dashes -> its other names, and whether it is deprecated."""
    found: dict[str, dict[str, Any]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(_SOURCES) and name.endswith(".py"):
                for flag in _flags(ast.parse(archive.read(name))):
                    found.setdefault(flag.pop("flag"), flag)
    return found


def _flags(tree: ast.Module) -> Iterator[dict[str, Any]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and (flag := _field(field)):
                    yield flag
        elif isinstance(node, ast.Call) and (flag := _argument(node)):
            yield flag


def _field(field: ast.AnnAssign) -> dict[str, Any] | None:
    """Read ``name: A[type, "help"]`` or ``name: A[type, Arg(...)]``."""
    kind = field.annotation
    if not (isinstance(kind, ast.Subscript) and isinstance(kind.value, ast.Name) and kind.value.id in _ABBREVIATED):
        return None
    if not (isinstance(field.target, ast.Name) and isinstance(kind.slice, ast.Tuple)):
        return None
    name = "--" + field.target.id.replace("_", "-")
    names = [name]
    for part in kind.slice.elts[1:]:
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "Arg":
            options = {option.arg: option.value for option in part.keywords}
            if _text(options.get("no_cli")) is True:
                return None
            names = [_text(options.get("cli_name")) or name, *(_text(options.get("aliases")) or ())]
            return _flag(names, _text(options.get("help")))
        if _text(part) is not None:
            return _flag(names, _text(part))
    return None


def _argument(call: ast.Call) -> dict[str, Any] | None:
    """Read ``parser.add_argument("--name", ...)``."""
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"):
        return None
    names = [_text(part) for part in call.args]
    names = [name for name in names if isinstance(name, str) and name.startswith("--")]
    options = {option.arg: option.value for option in call.keywords}
    action = options.get("action")
    retired = isinstance(action, ast.Name) and action.id.startswith("Deprecated")
    return _flag(names, _text(options.get("help")), retired=retired) if names else None


def _flag(names: list[str], help_text: Any, *, retired: bool = False) -> dict[str, Any]:
    bare = [name.removeprefix("--") for name in names]
    said = "deprecated" in str(help_text or "").lower().partition(".")[0]
    return {"flag": bare[0], "aliases": bare[1:], "deprecated": retired or said}


def _text(node: ast.expr | None) -> Any:
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None


def table(releases: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return what flags.json holds: names by the releases that have them, and the deprecations."""
    versions = list(releases)
    known = {version: _names(flags) for version, flags in releases.items()}
    spans: dict[str, list[str]] = {}
    for name in sorted(set().union(*known.values())):
        spans.setdefault(_span(versions, [name in known[version] for version in versions]), []).append(name)
    deprecated: dict[str, str] = {}
    for version in versions:
        for name, flag in releases[version].items():
            if flag["deprecated"]:
                deprecated.setdefault(name, version)
    return {"releases": versions, "flags": dict(sorted(spans.items())), "deprecated": dict(sorted(deprecated.items()))}


def _names(flags: dict[str, dict[str, Any]]) -> set[str]:
    return {name for flag, facts in flags.items() for name in (flag, *facts["aliases"])}


def _span(versions: list[str], present: list[bool]) -> str:
    """Return ``first..last`` for each run of releases that have the flag; an open end when the newest has it."""
    runs: list[str] = []
    for index, here in enumerate(present):
        if here and (index == 0 or not present[index - 1]):
            runs.append(f"{versions[index]}..")
        if not here and index and present[index - 1]:
            runs[-1] += versions[index - 1]
    return ",".join(runs)


def main(folder: Path) -> None:
    wheels = {str(parse_wheel_filename(path.name)[1]): path for path in folder.glob("sglang-*.whl")}
    releases = {version: flags_of(wheels[version]) for version in sorted(wheels, key=Version)}
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(json.dumps(table(releases), indent=1) + "\n", encoding="utf-8")
    print(f"{DATA.name}: {', '.join(f'{version} {len(flags)}' for version, flags in releases.items())}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
