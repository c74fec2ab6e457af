"""A published engine with process groups of one rank on a CPU, in which tiny models are built by their own code.

No kernel runs and no weight is loaded: for tests of what a model class tells the engine about itself.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patches.cpu_package import put_stand_in

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}


# Ops that model files look up when they are imported on a CPU.
_NAMED_AT_IMPORT = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)


@contextlib.contextmanager
def tiny_engine(folder: Path, **arguments: Any) -> Iterator[None]:
    """Publish server arguments for a small Llama and set up groups of one rank; undo both at the end.

    :param folder: where the model's configuration is written
    :param arguments: server arguments over the defaults
    """
    with pytest.MonkeyPatch.context() as patches:
        put_stand_in(patches)
        patches.setattr(torch.cuda, "Stream", _Stream)
        for name in _NAMED_AT_IMPORT:
            patches.setattr(torch.ops.sgl_kernel, name, _no_op(name), raising=False)
        from sglang.srt.distributed import parallel_state
        from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
        from sglang.srt.server_args import ServerArgs

        def clear() -> None:
            """Leave no group and no published value, whoever made them: an earlier test may have run a scheduler."""
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
            reset_context()

        clear()
        (folder / "config.json").write_text(json.dumps(_LLAMA))
        defaults = {"model_path": str(folder), "device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True}
        publish(
            ServerArgs(**(defaults | arguments)),
            role="scheduler",
            ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0),
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        try:
            yield
        finally:
            clear()


class _Stream:
    """Some models make streams on any device; nothing runs on them here."""


def _no_op(name: str) -> Any:
    def op(*_: Any, **__: Any) -> Any:
        raise AssertionError(f"the test calls the stand-in of {name}")

    return op
