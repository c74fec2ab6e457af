"""A stand-in for the CPU kernel package, and a CPU scheduler in this process.

Some faults of the stock engine on a CPU lie behind its import of ``sgl_kernel``. Their tests put this stand-in in the
package's place on the stock engine, to reach the fault; on the patched engine nothing is stood in for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import zmq


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.endswith("_cpu"):
            raise AttributeError(name)

        def op(*_: Any, **__: Any) -> Any:
            raise AssertionError(f"the test calls the stand-in of {name}")

        return op


def put_stand_in(monkeypatch: pytest.MonkeyPatch, **ops: Callable[..., Any]) -> bool:
    """Put a package with ``ops`` in place when the engine cannot do without; tell whether it did."""
    from sglang.srt.utils import common

    if hasattr(common, "has_cpu_kernel_package"):
        return False
    package = _StandIn("sgl_kernel")
    vars(package).update(ops)
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    for name in ("decode_attention_cpu", "extend_attention_cpu"):
        monkeypatch.setattr(torch.ops.sgl_kernel, name, getattr(package, name), raising=False)
    return True


def keep_the_package_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the resolver of the stock engine keep intel_amx, as it does on a host with AMX."""
    from sglang.srt.arg_groups import overrides

    found = overrides.get_platform()
    with_amx = SimpleNamespace(has_amx=True)

    class Platform:
        def __getattr__(self, name: str) -> Any:
            return getattr(with_amx, name) if hasattr(with_amx, name) else getattr(found, name)

    monkeypatch.setattr(overrides, "get_platform", Platform)


def llama_folders(parent: Path) -> tuple[Path, Path]:
    """Write the configurations of a small Llama and of an EAGLE-3 draft for it; there are no weights."""
    return (
        _write_config(parent / "target", "LlamaForCausalLM", layers=8),
        _write_config(parent / "draft", "LlamaForCausalLMEagle3", layers=1),
    )


def _write_config(folder: Path, architecture: str, *, layers: int) -> Path:
    folder.mkdir()
    config = {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": 260,
        "draft_vocab_size": 260,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def eagle_arguments(parent: Path, **flags: Any) -> dict[str, Any]:
    """Return server arguments for chain EAGLE-3 with dummy weights."""
    target, draft = llama_folders(parent)
    return {
        "model_path": str(target),
        "speculative_draft_model_path": str(draft),
        "device": "cpu",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_total_tokens": 4096,
        "mem_fraction_static": 0.3,
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    } | flags


def resolve(**arguments: Any) -> Any:
    """Run the engine's argument resolution and return its result."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(**arguments)
    run_resolution_pipeline(args)
    return resolved_view(args)


def start_scheduler(**arguments: Any) -> Any:
    """Start the engine's scheduler, models and caches included, in this process."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    # A scheduler that fails to start leaves open sockets, and collecting their context would wait for them for ever.
    zmq.Context.__del__ = lambda _context: None
    args = ServerArgs(**arguments)
    ports = PortArgs.init_new(args)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    return Scheduler(args, ports)
