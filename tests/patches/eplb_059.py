"""One EPLB rebalance of 0.5.9 on a tiny model: the real manager and updater, one rank, a made-up count of tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patches import moe_models

REDUNDANT = 2
# Rebalance after every pass, all layers in one chunk, and no GPU timing.
AT_EVERY_PASS = {
    "ep_num_redundant_experts": REDUNDANT,
    "ep_dispatch_algorithm": "static",
    "eplb_rebalance_num_iterations": 1,
    "expert_distribution_recorder_buffer_size": 1,
    "eplb_rebalance_layers_per_chunk": 100,
}


def locate(model_class: type, config: Any, args: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the trivial expert locations of a model, as a starting server does, and return them."""
    from sglang.srt.eplb import expert_location

    monkeypatch.setattr(expert_location, "get_model_architecture", lambda _: (model_class, model_class.__name__))
    metadata = expert_location.ExpertLocationMetadata.init_trivial(
        args, SimpleNamespace(hf_config=config), moe_ep_rank=0
    )
    monkeypatch.setattr(expert_location, "_global_expert_location_metadata", metadata)
    return metadata


def rebalance(model: Any, config: Any, args: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run one rebalance in which logical expert 1 of each layer is by far the busiest; return the new locations."""
    from sglang.srt.eplb import eplb_manager
    from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater
    from sglang.srt.model_executor.model_runner import ModelRunner

    metadata = locate(type(model), config, args, monkeypatch)
    moe_models.number_the_experts(model, metadata.physical_to_logical_map)

    counts = torch.ones(metadata.num_layers, metadata.num_logical_experts)
    counts[:, 1] = 1000
    dump = {"logical_count": counts, "average_utilization_rate_over_window": None}
    recorder = SimpleNamespace(recording=True, dump_record=lambda output_mode: dump)
    monkeypatch.setattr(eplb_manager, "get_global_expert_distribution_recorder", lambda: recorder)
    runner = SimpleNamespace(
        server_args=args,
        model_config=SimpleNamespace(hf_config=config),
        model=model,
        expert_location_updater=ExpertLocationUpdater(),
        tp_rank=0,
    )
    runner.expert_location_updater._first_execution = False  # empties the cache of a GPU
    runner.update_expert_location = lambda *a, **k: ModelRunner.update_expert_location(runner, *a, **k)
    manager = eplb_manager.EPLBManager(runner)
    manager.on_forward_pass_end()
    manager.on_forward_pass_end()
    return metadata


def check_rebalance(built: moe_models.Built, args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights lie where the new locations say."""
    model_class, config = built
    model = moe_models.build(model_class, config)
    metadata = rebalance(model, config, args, monkeypatch)
    layers = moe_models.expert_layers(model)
    assert layers
    for layer_id in layers:
        wanted = metadata.physical_to_logical_map[layer_id].tolist()
        assert wanted.count(1) == 1 + REDUNDANT
        assert moe_models.experts_in_slots(model, layer_id) == wanted
