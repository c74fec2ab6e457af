"""How the checks get at the engine: functions by name, in whichever module a release keeps them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any


class AbsentError(Exception):
    """The release has no such function."""


@dataclass(frozen=True)
class Case:
    """A piece of the engine's path that launches kernels.

    :ivar family: what it belongs to: ``speculation``, ``cache``, ``attention``, ``moe``, ``linear``.
    :ivar name: what it does, with which types.
    :ivar shape: the model.
    :ivar run: does it.
    """

    family: str
    name: str
    shape: str
    run: Callable[[], Any]


def find(*places: str) -> Any:
    """Return the first of ``module:name`` (below ``sglang.``) that the release has.

    :raises AbsentError: none of them.
    """
    for place in places:
        path, _, name = place.partition(":")
        module = _module(f"sglang.{path}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AbsentError(f"the release has no {places[0].rpartition(':')[2]}")


def _module(name: str) -> ModuleType | None:
    """Import a module; ``None`` when the release does not have it. What goes wrong inside it is not its absence."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def call(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call an engine function with those arguments that it has in this release.

    :raises TypeError: it wants one that is not there.
    """
    known = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        return function(**arguments)
    return function(**{name: value for name, value in arguments.items() if name in known})


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Launch a Triton kernel of the engine with those arguments that it has in this release."""
    kernel[grid](**{name: value for name, value in arguments.items() if name in kernel.arg_names})


def configure() -> None:
    """Publish the engine's default configuration, which many of its functions read."""
    try:
        context = find("srt.runtime_context:get_context")()
        context.override_server_args().install()
        context.parallel.override_permanently(tp_group=None)
    except (AbsentError, AttributeError):
        arguments = find("srt.server_args:ServerArgs")(model_path="dummy")
        find("srt.server_args:set_global_server_args_for_scheduler")(arguments)


def cases() -> Iterator[Case]:
    """Return everything that is checked, in a fixed order."""
    from sglang_bw.host.kernel_probe import attention, cache, experts, speculation

    yield from speculation.cases()
    yield from cache.cases()
    yield from attention.cases()
    yield from experts.cases()
