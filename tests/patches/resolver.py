"""The engine's own argument resolution, run as another machine.

``resolve("sm120", 97887, model_path=..., tp_size=8)`` answers what the engine would decide on eight such boards. The
engine takes the facts of the machine from ``override_platform``; stood in for are only those that it asks past it: the
board's memory, its compute capability, probes that a resolution step imported by name, and, where the engine cannot be
imported without it, the kernel package.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sglang_bw.host import boards
from tests.patches.cpu_package import put_stand_in

# MiB, as the engine sees them.
RTX_PRO_6000, RTX_5090, DGX_SPARK, B200, H200 = (
    boards.find(name).memory_mib for name in ("RTX PRO 6000", "RTX 5090", "GB10", "B200", "H200")
)

_CAPABILITIES = {
    "sm90": (9, 0),
    "sm100": (10, 0),
    "sm103": (10, 3),
    "sm110": (11, 0),
    "sm120": (12, 0),
    "sm121": (12, 1),
}


def resolve(arch: str, memory_mib: int, **server_args: Any) -> Any:
    """Return what the engine resolves ``server_args`` to on boards of ``arch`` with ``memory_mib`` MiB each.

    The result is read by attribute, one for each server argument. Errors are the engine's own.
    """
    with machine(arch, memory_mib):
        from sglang.srt.arg_groups.overrides import resolved_view

        return resolved_view(resolved_args(**server_args))


def resolved_args(**server_args: Any) -> Any:
    """Return the resolved ``ServerArgs``; to be called inside ``machine``, for tests that go on from there."""
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(**{"device": "cuda", **server_args})
    args.resolve_once()
    return args


@contextmanager
def machine(arch: str, memory_mib: int) -> Iterator[None]:
    """Let the engine see CUDA boards of ``arch`` with ``memory_mib`` MiB each; the environment is restored after."""
    environment = dict(os.environ)
    with pytest.MonkeyPatch.context() as monkeypatch:
        put_stand_in(monkeypatch)
        # All are loaded before anything is stood in for, so that no module remembers a fact of the pretended machine.
        steps = _resolution_modules()
        import torch
        from sglang.srt.runtime_context import override_platform

        facts = _facts(arch)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: _CAPABILITIES[arch])
        for name, value in _asked_by_name(facts, memory_mib).items():
            for module in steps:
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)
        try:
            with override_platform(**facts):
                yield
        finally:
            os.environ.clear()
            os.environ.update(environment)


def _facts(arch: str) -> dict[str, Any]:
    """Return every fact that ``override_platform`` knows, for ``arch``."""
    from sglang.srt.runtime_context import _PLATFORM_PROBES, _PLATFORM_VALUES

    capability = _CAPABILITIES[arch]
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
    known = dict.fromkeys(_PLATFORM_PROBES, False) | true | values
    return {name: value for name, value in known.items() if name in _PLATFORM_PROBES or name in _PLATFORM_VALUES}


def _asked_by_name(facts: dict[str, Any], memory_mib: int) -> dict[str, Callable[..., Any]]:
    from sglang.srt.runtime_context import _PLATFORM_PROBES, _PLATFORM_VALUES

    probes = {**_PLATFORM_PROBES, **_PLATFORM_VALUES}
    asked: dict[str, Callable[..., Any]] = {
        probes[name]: lambda *_a, _value=value, **_k: _value for name, value in facts.items()
    }
    return asked | {"get_device_memory_capacity": lambda _device=None: memory_mib}


def _resolution_modules() -> list[Any]:
    package = importlib.import_module("sglang.srt.arg_groups")
    for found in pkgutil.walk_packages(package.__path__, "sglang.srt.arg_groups."):
        importlib.import_module(found.name)
    return [module for name, module in list(sys.modules.items()) if name.startswith("sglang.srt.arg_groups.")]
