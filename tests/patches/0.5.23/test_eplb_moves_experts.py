"""EPLB rebalances every model that has a location hook, also those that do not list their experts themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.patches import moe_models
from tests.patches.eplb import AT_EVERY_PASS, REDUNDANT, check_rebalance, rebalance, redundant_experts  # noqa: F401
from tests.patches.tiny_engine import tiny_engine

LISTS_ITS_EXPERTS = [moe_models.qwen3_moe, moe_models.deepseek_v2]
LISTS_NONE = [
    moe_models.minimax_m2,
    moe_models.minimax_m3,
    moe_models.minimax_m3_vl,
    moe_models.qwen2_moe,
    moe_models.qwen3_vl_moe,
    moe_models.qwen4_exp,
]


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with tiny_engine(tmp_path_factory.mktemp("model")):
        yield


@pytest.mark.usefixtures("redundant_experts")
@pytest.mark.stock_failure(AttributeError, r"^'\w+' object has no attribute 'routed_experts_weights_of_layer'$")
@pytest.mark.parametrize("make", LISTS_NONE)
def test_weights_follow_the_new_locations(
    make: Callable[[], moe_models.Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rebalance(make, monkeypatch)


@pytest.mark.stock_failure(AttributeError, r"^'\w+' object has no attribute 'routed_experts_weights_of_layer'$")
def test_glm_weights_follow_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.runtime_context import get_exec

    with get_exec().moe.override(**AT_EVERY_PASS):
        check_rebalance(moe_models.glm4_moe, monkeypatch, redundant=0)


@pytest.mark.usefixtures("redundant_experts")
def test_glm_weights_follow_with_redundant_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    check_rebalance(moe_models.glm4_moe, monkeypatch)


@pytest.mark.usefixtures("redundant_experts")
@pytest.mark.parametrize("make", LISTS_ITS_EXPERTS)
def test_a_model_that_lists_its_experts_is_asked(
    make: Callable[[], moe_models.Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rebalance(make, monkeypatch)


@pytest.mark.usefixtures("redundant_experts")
@pytest.mark.stock_failure(AssertionError, r"^GLM-4.x has 4 slots for 6 physical experts")
def test_glm_has_a_slot_for_every_redundant_expert() -> None:
    model = moe_models.build(*moe_models.glm4_moe())
    for experts in moe_models.expert_layers(model).values():
        slots, wanted = experts.w13_weight.shape[0], moe_models.EXPERTS + REDUNDANT
        assert slots == wanted, f"GLM-4.x has {slots} slots for {wanted} physical experts"


def test_fused_shared_experts_stay_in_their_slot() -> None:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    experts = FusedMoE(
        num_experts=5, num_fused_shared_experts=1, top_k=3, layer_id=1, hidden_size=32, intermediate_size=32
    )
    assert [weight.shape[0] for weight in experts.get_moe_weights()] == [4, 4]


def test_a_model_without_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model_class, config = moe_models.minimax_m2()
    model = torch.nn.Linear(1, 1)
    model.model_class = model_class
    monkeypatch.setattr(
        torch.nn.Linear, "get_model_config_for_expert_location", model_class.get_model_config_for_expert_location, False
    )
    from sglang.srt.runtime_context import get_exec

    with get_exec().moe.override(**AT_EVERY_PASS), pytest.raises(ValueError, match="Linear has no MoE layer"):
        rebalance(model, config, monkeypatch)
