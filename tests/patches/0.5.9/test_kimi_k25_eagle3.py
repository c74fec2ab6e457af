"""Kimi-K2.5 captures hidden states for an EAGLE-3 draft and lends it embedding and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.patches import moe_models
from tests.patches.engine_059 import tiny_engine
from tests.patches.kimi_k25 import kimi_k25


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with tiny_engine(tmp_path_factory.mktemp("model"), speculative_algorithm="EAGLE3") as args:
        yield args


def target() -> Any:
    model_class, config = kimi_k25()
    config.text_config.num_hidden_layers = 8
    return moe_models.build(model_class, config)


def say_how_it_ends(step: Callable[[], Any]) -> None:
    """Run a step of the engine's start. It is the engine that asks the model for what it may not have."""
    try:
        step()
    except AttributeError as error:
        raise AssertionError(f"the server stops: {error}") from None


def initialize(model: Any, args: Any, layers: list[int] | None) -> None:
    """Run the model runner's own initialization around a model; what needs a GPU or weights is left out."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    runner = MagicMock()
    runner.server_args = args
    runner.model = model
    runner.model_config = args.get_model_config()
    runner.is_draft_worker = True  # sets no expert locations
    runner.device = "cpu"
    runner.tp_size = runner.dp_size = 1
    runner.max_total_num_tokens = runner.req_to_token_pool.size = 64
    runner.eagle_use_aux_hidden_state = True
    runner.eagle_aux_hidden_state_layer_ids = layers
    ModelRunner.initialize(runner, 0.0)
    runner.init_attention_backend.assert_called_once()


@pytest.mark.stock_failure(AssertionError, r"^the server stops: 'KimiK25ForConditionalGeneration' object has no")
@pytest.mark.parametrize(("layers", "captured"), [(None, [2, 4, 5]), ([1, 3, 6], [2, 4, 7])])
def test_the_runner_can_ask_for_hidden_states(layers: list[int] | None, captured: list[int], args: Any) -> None:
    model = target()
    say_how_it_ends(lambda: initialize(model, args, layers))
    assert model.language_model.capture_aux_hidden_states
    assert model.language_model.model.layers_to_capture == captured


@pytest.mark.stock_failure(AssertionError, r"^the server stops: 'KimiK25ForConditionalGeneration' object has no")
def test_the_draft_worker_gets_the_embedding(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.speculative import eagle_worker

    class Worker(eagle_worker.EAGLEWorker):
        draft_model_runner = MagicMock()
        init_attention_backend = init_cuda_graphs = MagicMock()

    model = target()
    target_worker = MagicMock()
    target_worker.get_memory_pool.return_value = (None, None)
    target_worker.model_runner.model = model
    Worker.draft_model_runner.model.load_lm_head_from_target = False
    Worker.draft_model_runner.model.hot_token_id = None
    monkeypatch.setattr(TpModelWorker, "__init__", lambda *_, **__: None)
    ranks = dict.fromkeys(("tp_rank", "dp_rank", "moe_ep_rank", "attn_cp_rank", "moe_dp_rank"), 0)
    say_how_it_ends(lambda: Worker(args, gpu_id=0, nccl_port=0, target_worker=target_worker, **ranks))
    Worker.draft_model_runner.model.set_embed.assert_called_once_with(model.language_model.model.embed_tokens.weight)


def test_embedding_and_head_can_be_replaced(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = target()
    embed, head = (torch.nn.Parameter(torch.ones_like(weight)) for weight in model.get_embed_and_head())
    model.set_embed_and_head(embed, head)
    assert model.language_model.model.embed_tokens.weight is embed
    assert model.language_model.lm_head.weight is head
