"""SGLang 0.5.9 in the newest base's environment: its kernel package and the GPU are stood in for, the rest is its own.

The release is pure Python over a compiled ``sgl_kernel`` that is not here, and has none of the later releases' platform
overrides. So every part of the package can be imported and none be called, and the few probes that argument
resolution asks are answered for another board.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.ranks.kernel_stand_in import stand_in_for_the_kernels

_CAPABILITIES = {"sm90": (9, 0), "sm100": (10, 0), "sm120": (12, 0), "sm121": (12, 1)}


@contextmanager
def machine(arch: str, memory_mib: int) -> Iterator[None]:
    """Pretend to have boards of ``arch`` with ``memory_mib`` MiB each; the environment is restored after."""
    stand_in_for_the_kernels()
    from sglang.srt import server_args

    capability = _CAPABILITIES[arch]
    major = capability[0]
    answers = {
        "is_cuda": True,
        "is_flashinfer_available": True,
        "is_sm90_supported": major == 9,
        "is_hopper_with_cuda_12_3": major == 9,
        "is_sm100_supported": major == 10,
        "is_sm120_supported": major == 12,
        "is_blackwell_supported": major in (10, 12),
        "get_device_memory_capacity": memory_mib,
    }
    environment = dict(os.environ)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch.cuda, "get_device_capability", lambda _device=None: capability)
        for name, value in answers.items():
            patches.setattr(server_args, name, lambda *_, _value=value, **__: _value)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(environment)


def resolve(arch: str, memory_mib: int, **arguments: Any) -> Any:
    """Return the engine's ``ServerArgs`` as resolved on such boards. Errors are the engine's own."""
    with machine(arch, memory_mib):
        from sglang.srt.server_args import ServerArgs

        return ServerArgs(device="cuda", **arguments)


@contextmanager
def tiny_engine(folder: Path, **arguments: Any) -> Iterator[Any]:
    """Set up groups of one rank on a CPU and global server arguments; yield the arguments and undo it at the end.

    No kernel runs and no weight is loaded: for tests of what a model class tells the engine about itself.
    """
    stand_in_for_the_kernels()
    from sglang.srt import server_args
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.moe import initialize_moe_config

    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patches:
        args = server_args.ServerArgs(**{"model_path": str(folder), "device": "cpu", **arguments})
        patches.setattr(server_args, "_global_server_args", args)
        initialize_moe_config(args)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        no_groups = dict(vars(parallel_state))
        parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        dp_attention.initialize_dp_attention(args, args.get_model_config())
        try:
            yield args
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
            vars(parallel_state).update(no_groups)  # the first of the two forgets the attention and expert groups
