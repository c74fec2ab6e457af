"""The engine's own argument resolution, run as another machine.

``resolve("sm120", 97887, model_path=..., tp_size=8)`` answers what the engine would decide on eight such boards. The
machine is put in place as ``plan`` does it (``sglang_bw.plan.engine_probe.machine``), but taken away again; beside it
the kernel package is stood in for, where the engine cannot be imported without it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sglang_bw.host import boards
from sglang_bw.plan.engine_probe.machine import pretend
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
# Where the resolution asks. Elsewhere the pretended machine's kernels would be imported, which are not here.
_RESOLUTION = ("sglang.srt.arg_groups.", "torch.cuda")


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
        pretence = pretend(_CAPABILITIES[arch], memory_mib, 8, arch)
        from sglang.srt.model_executor import cuda_graph_config
        from sglang.srt.runtime_context import override_platform

        # What it is on CUDA; it asks in a place that more than the resolution asks.
        monkeypatch.setattr(cuda_graph_config, "default_prefill_backend", lambda: "breakable")
        for owner, attribute, answer in pretence.places:
            if owner.__name__.startswith(_RESOLUTION):
                monkeypatch.setattr(owner, attribute, answer)
        try:
            with override_platform(**pretence.facts):
                yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
