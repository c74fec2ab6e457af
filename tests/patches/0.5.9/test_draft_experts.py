"""The experts of a draft stay where they were loaded, whatever expert load balancing does to the target's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patches import moe_models
from tests.patches.engine_059 import tiny_engine
from tests.patches.eplb_059 import AT_EVERY_PASS, locate
from tests.patches.kimi_k25 import deepseek_v3

TRIVIAL, MOVED = [0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 2, 3]  # the logical expert in each slot


def glm_nextn() -> moe_models.Built:
    from sglang.srt.models.glm4_moe_nextn import Glm4MoeForCausalLMNextN

    return Glm4MoeForCausalLMNextN, moe_models.glm4_moe()[1]


def deepseek_nextn() -> moe_models.Built:
    from sglang.srt.models.deepseek_nextn import DeepseekV3ForCausalLMNextN

    config = deepseek_v3()[1]
    config.architectures = ["DeepseekV3ForCausalLMNextN"]
    return DeepseekV3ForCausalLMNextN, config


DRAFTS = [(moe_models.glm4_moe, glm_nextn), (deepseek_v3, deepseek_nextn)]


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with tiny_engine(tmp_path_factory.mktemp("model"), **AT_EVERY_PASS) as args:
        yield args


@pytest.fixture
def locations(args: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that gives all layers of a target the same placement of experts."""

    def place(target: Callable[[], moe_models.Built], slots: list[int]) -> None:
        from sglang.srt.eplb import expert_location

        model_class, config = target()
        trivial = locate(model_class, config, args, monkeypatch)
        metadata = expert_location.ExpertLocationMetadata.init_by_mapping(
            args, SimpleNamespace(hf_config=config), [slots] * trivial.num_layers, moe_ep_rank=0
        )
        monkeypatch.setattr(expert_location, "_global_expert_location_metadata", metadata)

    return place


def build(built: moe_models.Built, *, draft: bool, experts: int = moe_models.EXPERTS) -> Any:
    """Build a model as a draft worker does, or as a target's, and load numbered experts into it."""
    from sglang.srt.layers.moe.utils import speculative_moe_backend_context

    if draft:
        with speculative_moe_backend_context():
            model = moe_models.build(*built)
    else:
        model = moe_models.build(*built)
    for layer in moe_models.expert_layers(model).values():
        for param in (layer.w13_weight, layer.w2_weight):
            param.data.fill_(-1)  # one rank loads one copy of each of the target's experts
        for expert in range(experts):
            for name in ("w1", "w2", "w3"):
                param = layer.w2_weight if name == "w2" else layer.w13_weight
                rows = param.shape[1] // (1 if name == "w2" else 2)
                value = torch.full((rows, param.shape[2]), float(100 * layer.layer_id + expert))
                layer.weight_loader(param, value, f"experts.{expert}.{name}.weight", name, expert)
    return model


def experts_that_run(model: Any, layer_id: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[Any]]:
    """Route one token to each logical expert; return which expert lies in the slot it is sent to, and what is counted.

    The router's own function runs, eager instead of compiled.
    """
    from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo
    from sglang.srt.layers.moe import topk

    counted: list[Any] = []
    recorder = SimpleNamespace(on_select_experts=lambda topk_ids: counted.append(topk_ids))
    monkeypatch.setattr(topk, "get_global_expert_distribution_recorder", lambda: recorder)
    monkeypatch.setattr(topk, "biased_grouped_topk", _only_what_it_takes(topk.biased_grouped_topk_impl))
    router = next(m for m in model.modules() if isinstance(m, topk.TopK) and m.layer_id == layer_id)
    router.topk_config.top_k = 1
    router.topk_config.correction_bias = torch.zeros(moe_models.EXPERTS)
    logits = 10 * torch.eye(moe_models.EXPERTS)
    info = ExpertLocationDispatchInfo.init_new(layer_id=layer_id)
    with torch.compiler.set_stance("force_eager"):
        chosen = router.forward_native(torch.zeros(len(logits), 64), logits, expert_location_dispatch_info=info)
    held = moe_models.experts_in_slots(model, layer_id)
    return [held[slot] for slot in chosen.topk_ids.flatten().tolist()], counted


def _only_what_it_takes(function: Any) -> Any:
    return lambda *args, num_fused_shared_experts=0, **kwargs: function(*args, **kwargs)


@pytest.mark.stock_failure(AssertionError, r"tokens for experts 0 to 3 meet \[\d, \d, \d, \d\]")
@pytest.mark.parametrize(("target", "draft"), DRAFTS)
def test_a_rebalance_of_the_target_moves_no_draft(
    target: Any, draft: Any, locations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    locations(target, TRIVIAL)
    model = build(draft(), draft=True)
    locations(target, MOVED)
    met, _ = experts_that_run(model, 0, monkeypatch)
    assert met == [0, 1, 2, 3], f"tokens for experts 0 to 3 meet {met}"


@pytest.mark.stock_failure(AssertionError, r"^a draft's choices count as the target's")
@pytest.mark.parametrize(("target", "draft"), DRAFTS)
def test_what_a_draft_chooses_is_not_counted(
    target: Any, draft: Any, locations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    locations(target, TRIVIAL)
    _, counted = experts_that_run(build(draft(), draft=True), 0, monkeypatch)
    assert not counted, "a draft's choices count as the target's"


@pytest.mark.parametrize(("target", "draft"), DRAFTS)
def test_a_given_placement_of_the_target_is_not_the_drafts(
    target: Any, draft: Any, locations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    locations(target, MOVED)
    model = build(draft(), draft=True)
    assert moe_models.experts_in_slots(model, 0) == TRIVIAL
    assert experts_that_run(model, 0, monkeypatch)[0] == [0, 1, 2, 3]


@pytest.mark.parametrize("experts", [2, 8])
def test_a_draft_may_have_another_number_of_experts(experts: int, locations: Any) -> None:
    locations(moe_models.glm4_moe, MOVED)
    model_class, config = glm_nextn()
    config.n_routed_experts = experts
    model = build((model_class, config), draft=True, experts=experts)
    assert moe_models.experts_in_slots(model, 0)[:experts] == list(range(experts))


@pytest.mark.parametrize("target", [moe_models.glm4_moe, deepseek_v3])
def test_the_target_goes_by_its_map(target: Any, locations: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    locations(target, MOVED)
    model = build(target(), draft=False)
    assert moe_models.experts_in_slots(model, 1)[: moe_models.EXPERTS] == MOVED[: moe_models.EXPERTS]
    met, counted = experts_that_run(model, 1, monkeypatch)
    assert met == [0, 1, 2, 3]
    assert len(counted) == 1
