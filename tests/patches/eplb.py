"""One EPLB rebalance on a tiny model: the real manager and updater, one rank, a made-up count of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patches import moe_models

REDUNDANT = 2
AT_EVERY_PASS = {
    "eplb_rebalance_num_iterations": 1,
    "expert_distribution_recorder_buffer_size": 1,
    "eplb_rebalance_layers_per_chunk": 100,  # all in one chunk, and no GPU timing
}


@pytest.fixture
def redundant_experts() -> Iterator[None]:
    """Rebalancing after every pass, with redundant experts."""
    from sglang.srt.runtime_context import get_exec

    with get_exec().moe.override(ep_num_redundant_experts=REDUNDANT, **AT_EVERY_PASS):
        yield


def locate(model_class: type, config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the trivial expert locations of a model, as a starting server does, and return them."""
    from sglang.srt import model_loader
    from sglang.srt.eplb import eplb_manager, expert_location, expert_location_dispatch, expert_location_updater

    monkeypatch.setattr(model_loader, "get_model_architecture", lambda _: (model_class, model_class.__name__))
    model_config = SimpleNamespace(hf_config=config)
    metadata = expert_location.ExpertLocationMetadata.init_trivial(model_config, moe_ep_rank=0)
    for module in (eplb_manager, expert_location_dispatch, expert_location_updater):
        monkeypatch.setattr(module, "get_global_expert_location_metadata", lambda: metadata)
    return metadata


def rebalance(model: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run one rebalance in which logical expert 1 of each layer is by far the busiest; return the new locations."""
    from sglang.srt.eplb import eplb_manager
    from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater

    metadata = locate(type(model), config, monkeypatch)
    model_config = SimpleNamespace(hf_config=config)
    moe_models.number_the_experts(model, metadata.physical_to_logical_map)

    counts = torch.ones(metadata.num_layers, metadata.num_logical_experts)
    counts[:, 1] = 1000
    dump = {"logical_count": counts, "average_utilization_rate_over_window": None}
    recorder = SimpleNamespace(recording=True, dump_record=lambda output_mode: dump)
    monkeypatch.setattr(eplb_manager, "get_global_expert_distribution_recorder", lambda: recorder)
    updater = ExpertLocationUpdater()
    updater._first_execution = False  # empties the cache of a GPU
    manager = eplb_manager.EPLBManager(
        model_config=model_config,
        get_model=lambda: model,
        get_expert_location_updater=lambda: updater,
        get_expert_backup_client=lambda: None,
        get_weight_updater=lambda: SimpleNamespace(update_weights_from_disk=None),
    )
    manager.on_forward_pass_end()
    manager.on_forward_pass_end()
    return metadata


def check_rebalance(
    make: Callable[[], moe_models.Built], monkeypatch: pytest.MonkeyPatch, redundant: int = REDUNDANT
) -> None:
    model_class, config = make()
    model = moe_models.build(model_class, config)
    metadata = rebalance(model, config, monkeypatch)
    layers = moe_models.expert_layers(model)
    assert layers
    for layer_id in layers:
        wanted = metadata.physical_to_logical_map[layer_id].tolist()
        assert wanted.count(1) == 1 + redundant
        assert moe_models.experts_in_slots(model, layer_id) == wanted


def check_dispatch(make: Callable[[], moe_models.Built], monkeypatch: pytest.MonkeyPatch) -> None:
    """The router of every expert layer finds where its experts are."""
    from sglang.srt.layers.moe.topk import TopK
    from sglang.srt.runtime_context import get_exec

    model_class, config = make()
    model = moe_models.build(model_class, config)
    locate(model_class, config, monkeypatch)
    routers = [module for module in model.modules() if isinstance(module, TopK)]
    assert len(routers) == len(moe_models.expert_layers(model)) > 0
    with get_exec().moe.override(ep_dispatch_algorithm="dynamic"):
        for router in routers:
            _, info = router.routing_inputs()
            assert info.num_physical_experts == moe_models.EXPERTS + REDUNDANT
            assert info.partial_logical_to_all_physical_map.shape[0] == moe_models.EXPERTS
