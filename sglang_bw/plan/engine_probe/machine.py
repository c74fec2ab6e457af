"""A machine that is not there, as the engine's argument resolution sees it.

The engine takes the facts of its machine from ``override_platform``. Stood in for are only those that it asks past it:
the memory of a board, its compute capability, and probes that a module imported by name.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


class TooOldError(Exception):
    """The engine's resolution cannot be run as another machine."""


@dataclass(frozen=True)
class Pretence:
    """What makes the engine see a machine that is not there.

    :ivar facts: for the engine's own ``override_platform``.
    :ivar places: owner, attribute, and what stands in for it: what the engine asks past that.
    """

    facts: dict[str, Any]
    places: tuple[tuple[Any, str, Callable[..., Any]], ...]


@contextmanager
def machine(capability: tuple[int, int], memory_mib: int, count: int, name: str) -> Iterator[None]:
    """Let the engine see ``count`` CUDA boards, for as long as this process lives; it resolves once and ends.

    :param memory_mib: of one board, as nvidia-smi prints it.
    :raises TooOldError: the engine has no ``override_platform``.
    """
    pretence = pretend(capability, memory_mib, count, name)
    override_platform, _ = _platform()
    for owner, attribute, answer in pretence.places:
        setattr(owner, attribute, answer)
    with override_platform(**pretence.facts):
        yield


def pretend(capability: tuple[int, int], memory_mib: int, count: int, name: str) -> Pretence:
    """Return what has to be put in place for such boards; nothing is changed yet.

    :raises TooOldError: the engine has no ``override_platform``.
    """
    # All are loaded before anything is stood in for, so that no kernel module is loaded for the pretended machine.
    _load_resolution()
    import torch

    _, probes = _platform()
    facts = {fact: value for fact, value in _facts(capability, probes).items() if fact in probes}
    asked: dict[str, Callable[..., Any]] = {
        probes[fact]: lambda *_a, _value=value, **_k: _value for fact, value in facts.items()
    }
    asked["get_device_memory_capacity"] = lambda _device=None: memory_mib
    return Pretence(
        facts,
        (
            (torch.cuda, "get_device_capability", lambda _device=None: capability),
            (torch.cuda, "get_device_name", lambda _device=None: name),
            (torch.cuda, "device_count", lambda: count),
            *_probes_by_name(asked),
        ),
    )


def _platform() -> tuple[Callable[..., Any], dict[str, str]]:
    try:
        from sglang.srt import runtime_context

        return runtime_context.override_platform, {
            **runtime_context._PLATFORM_PROBES,
            **getattr(runtime_context, "_PLATFORM_VALUES", {}),
        }
    except (ImportError, AttributeError) as error:
        raise TooOldError(str(error)) from error


def _facts(capability: tuple[int, int], probes: dict[str, str]) -> dict[str, Any]:
    major, minor = capability
    true = {
        "is_cuda": True,
        "has_flashinfer": True,
        "is_sm90": major == 9,
        "is_hopper_with_cuda_12_3": major == 9,
        "is_sm100": major == 10,
        "is_sm100_or_sm110": major in (10, 11),
        "is_sm110": major == 11,
        "is_sm120": major == 12,
        "is_blackwell": major in (10, 11, 12),
    }
    values = {"device_sm": 10 * major + minor, "device_capability": capability}
    return dict.fromkeys(probes, False) | true | values


def _probes_by_name(asked: dict[str, Callable[..., Any]]) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield every module that has one of the engine's probes by its name."""
    from sglang.srt.utils import common

    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "sglang"]
    for function, answer in asked.items():
        probe = getattr(common, function, None)
        for module in modules:
            if probe is not None and vars(module).get(function) is probe:
                yield module, function, answer


def _load_resolution() -> None:
    try:
        package = importlib.import_module("sglang.srt.arg_groups")
    except ImportError as error:
        raise TooOldError(str(error)) from error
    for found in pkgutil.walk_packages(package.__path__, "sglang.srt.arg_groups."):
        importlib.import_module(found.name)
