"""The states of adaptive speculation share one FlashInfer workspace.

Real: how a state is built, how its attention backend is found and made, and the backend's own set-up. Stood in for:
FlashInfer's wrappers and the parts of the model runner that the set-up asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patches.tiny_engine import tiny_engine

WORKSPACE = 1 << 20
CANDIDATES = (1, 3, 7)


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with tiny_engine(tmp_path_factory.mktemp("model")):
        yield


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention import flashinfer_backend
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup

    monkeypatch.setattr(flashinfer_backend.DllmConfig, "from_server_args", lambda _: None)
    monkeypatch.setattr(attention_backend_setup, "attn_backend_wrapper", lambda _, backend: backend)
    monkeypatch.setattr(attention_backend_setup, "attention_backends", lambda: ("flashinfer", "flashinfer"))

    def wrapper(workspace: torch.Tensor, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(workspace=workspace)

    for name in ("Ragged", "Paged"):
        monkeypatch.setattr(flashinfer_backend, f"BatchPrefillWith{name}KVCacheWrapper", wrapper, raising=False)
    monkeypatch.setattr(flashinfer_backend, "BatchDecodeWithPagedKVCacheWrapper", wrapper, raising=False)
    for name in ("FlashInferIndicesUpdaterPrefill", "FlashInferIndicesUpdaterDecode"):
        monkeypatch.setattr(flashinfer_backend, name, lambda *_: None)
    monkeypatch.setattr(flashinfer_backend, "should_use_tensor_core", lambda **_: False)
    monkeypatch.setenv("SGLANG_FLASHINFER_WORKSPACE_SIZE", str(WORKSPACE))
    assert envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.get() == WORKSPACE


def target_runner() -> Any:
    from sglang.srt.model_executor.model_runner import ModelRunner

    method = SimpleNamespace(resolve_attention_access=lambda *_: SimpleNamespace(kind=None, scale_recipe=None))
    pool = SimpleNamespace(get_kv_cache_quant_method=lambda: method)
    runner = SimpleNamespace(
        device="cpu",
        req_to_token_pool=SimpleNamespace(size=4),
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        kv_index_translator=None,
        kv_cache_dtype=torch.bfloat16,
        server_args=None,
        is_draft_worker=False,
        draft_attention_backend=None,
        page_size=1,
        sliding_window_size=None,
        use_mla_backend=False,
        init_new_workspace=False,
        prefill_attention_backend_str="flashinfer",
        decode_attention_backend_str="flashinfer",
        model_config=SimpleNamespace(
            num_attention_heads=8,
            get_num_kv_heads=lambda *_: 8,
            context_len=64,
            is_multimodal=False,
            is_encoder_decoder=False,
            head_dim=64,
            v_head_dim=64,
            hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        ),
    )
    runner._get_attention_backend = lambda **flags: ModelRunner._get_attention_backend(runner, **flags)
    return runner


@pytest.mark.stock_failure(AssertionError, r"^3 states hold 3 workspaces beyond the first, 3 MiB")
@pytest.mark.usefixtures("flashinfer")
def test_states_share_the_workspace_of_the_startup_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative import eagle_worker_v2

    monkeypatch.setattr(eagle_worker_v2, "get_available_gpu_memory", lambda *_: 0.0)
    monkeypatch.setattr(eagle_worker_v2, "check_cuda_graph_backend", lambda *_: True)
    runner = target_runner()
    startup = runner._get_attention_backend()

    draft = SimpleNamespace(
        init_attention_backend=lambda: None,
        _capture_cuda_graphs=lambda: None,
        draft_attn_backend=None,
        cuda_graph_runner=None,
        draft_extend_attn_backend=None,
        cuda_graph_runner_for_draft_extend=None,
    )
    worker = SimpleNamespace(
        device="cpu",
        gpu_id=0,
        _override_worker_state=lambda *_, **__: contextlib.nullcontext(),
        _draft_worker=draft,
        _target_worker=SimpleNamespace(model_runner=runner),
        _additional_graph_memory_usage={},
        _additional_graph_time_usage={},
    )
    states = [
        eagle_worker_v2.EAGLEWorkerV2.build_adaptive_runtime_state(worker, steps, steps + 1) for steps in CANDIDATES
    ]
    backends = [state.target_attn_backend for state in states]
    assert len({id(backend) for backend in backends}) == len(CANDIDATES)
    first = startup.workspace_buffer
    assert first.numel() == WORKSPACE
    extra = {b.workspace_buffer.data_ptr(): b.workspace_buffer.numel() for b in backends}
    extra.pop(first.data_ptr(), None)
    assert not extra, (
        f"{len(states)} states hold {len(extra)} workspaces beyond the first, {sum(extra.values()) >> 20} MiB"
    )
    wrappers = [w for b in backends for w in (*b.decode_wrappers, *b.prefill_wrappers_verify)]
    assert {w.workspace.data_ptr() for w in wrappers} == {first.data_ptr()}
    assert runner.init_new_workspace is False


@pytest.mark.usefixtures("flashinfer")
def test_a_backend_that_runs_beside_another_keeps_its_own() -> None:
    runner = target_runner()
    shared, own = (runner._get_attention_backend(init_new_workspace=new) for new in (False, True))
    assert shared.workspace_buffer.data_ptr() != own.workspace_buffer.data_ptr()
