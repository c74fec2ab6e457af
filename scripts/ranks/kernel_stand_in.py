"""SGLang's compiled kernel package, stood in for where it is not installed: all of it can be imported, none called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGE = "sgl_kernel"


class _Part(ModuleType):
    """A module of the kernel package: it has every name, and a call to one is an error."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "scalar_types":  # a namespace of plain values
            return _Part(f"{_PACKAGE}.{name}")

        def op(*_: Any, **__: Any) -> Any:
            raise AssertionError(f"the stand-in of {name} was called")

        return op


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == _PACKAGE else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Part(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def stand_in_for_the_kernels() -> None:
    """Let the engine import its kernel package, in this process and from now on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
