"""The engine's policy modules, loaded from its sources without importing the engine, and so without torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_bw.errors import PolicyError

_FOLDER = "sglang.srt.speculative"
_STOCK = "adaptive_spec_params"
_OWN = ("goodput_policy", "goodput_cost")
# What is executed; every other module of the engine that these import is a stand-in that they only name.
_REAL = (_STOCK, *_OWN, "goodput_params")


@dataclass(frozen=True)
class Policies:
    """The modules of one engine.

    :ivar stock: upstream's ``adaptive_spec_params``.
    :ivar policy: ours, ``goodput_policy``; its cost table is in ``cost``.
    """

    stock: ModuleType
    policy: ModuleType
    cost: ModuleType


def load(tree: Path) -> Policies:
    """Load the policies of an engine.

    :param tree: the folder that has ``sglang/``.
    :raises PolicyError: there is no engine, or it has no cost-aware policy.
    """
    folder = tree / "sglang" / "srt" / "speculative"
    missing = [name for name in (_STOCK, *_OWN) if not (folder / f"{name}.py").is_file()]
    if missing:
        raise PolicyError(
            f"{tree} has no {missing[0]}.py below sglang/srt/speculative",
            hint="name the folder of a patched engine that has the goodput policy: --tree DIR; `sglang-bw build`.",
        )
    with _instead_of_the_engine(tree / "sglang"):
        stock, policy, cost = (importlib.import_module(f"{_FOLDER}.{name}") for name in (_STOCK, *_OWN))
    return Policies(stock, policy, cost)


class _StandIn(ModuleType):
    """A module that has every name; functions do nothing, classes are plain."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_keywords: None


class _Finder:
    """Finds the policy modules in their files, and stand-ins for the rest of the engine."""

    def __init__(self, package: Path) -> None:
        self.package = package

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "sglang" and not name.startswith("sglang."):
            return None
        folder, _, last = name.rpartition(".")
        if folder == _FOLDER and last in _REAL:
            return importlib.util.spec_from_file_location(name, self._path(name).with_suffix(".py"))
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # a loader by its methods

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""

    def _path(self, name: str) -> Path:
        return self.package.joinpath(*name.split(".")[1:])


@contextmanager
def _instead_of_the_engine(package: Path) -> Iterator[None]:
    """Let ``sglang`` mean the stand-ins, and afterwards what it meant before."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "sglang"}
    finder: Any = _Finder(package)
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update(before)
