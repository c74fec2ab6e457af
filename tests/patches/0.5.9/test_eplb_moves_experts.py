"""EPLB moves the experts of models that do not list them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.patches import moe_models
from tests.patches.engine_059 import tiny_engine
from tests.patches.eplb_059 import AT_EVERY_PASS, check_rebalance, locate, rebalance
from tests.patches.kimi_k25 import deepseek_v3


def qwen3_vl_moe() -> moe_models.Built:
    """The wrapper around the language model, without a vision tower."""
    from sglang.srt.models.qwen3_vl_moe import Qwen3MoeLLMModel, Qwen3VLMoeForConditionalGeneration

    text = moe_models.qwen3_moe()[1]
    return Qwen3VLMoeForConditionalGeneration, moe_models.wrapper(text, model=lambda: Qwen3MoeLLMModel(config=text))


DIES = pytest.mark.stock_failure(AttributeError, r"has no attribute 'routed_experts_weights_of_layer'")
UNLISTED = [
    pytest.param(moe_models.minimax_m2, marks=DIES),
    pytest.param(moe_models.qwen2_moe, marks=DIES),
    pytest.param(qwen3_vl_moe, marks=DIES),
    moe_models.glm4_moe,  # stock does not get that far: it lacks the slots
]


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with tiny_engine(tmp_path_factory.mktemp("model"), **AT_EVERY_PASS) as args:
        yield args


@pytest.mark.parametrize("make", UNLISTED)
def test_weights_follow_the_new_locations(
    make: Callable[[], moe_models.Built], args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rebalance(make(), args, monkeypatch)


@pytest.mark.stock_failure(AssertionError, r"slots: \{4\}")
def test_glm_has_slots_for_redundant_experts(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model_class, config = moe_models.glm4_moe()
    located = locate(model_class, config, args, monkeypatch).num_physical_experts
    layers = moe_models.expert_layers(moe_models.build(model_class, config))
    slots = {layer.w13_weight.shape[0] for layer in layers.values()}
    assert slots == {located}, f"slots: {slots}"


@pytest.mark.parametrize("make", [deepseek_v3, moe_models.qwen3_moe])
def test_a_model_that_lists_them_is_asked(
    make: Callable[[], moe_models.Built], args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rebalance(make(), args, monkeypatch)


def test_a_model_without_experts_is_named(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dense(torch.nn.Module):
        get_model_config_for_expert_location = classmethod(
            lambda _cls, config: deepseek_v3()[0].get_model_config_for_expert_location(config)
        )

    with pytest.raises(ValueError, match="Dense has no MoE layer"):
        rebalance(Dense(), deepseek_v3()[1], args, monkeypatch)
