"""EPLB, redundant experts and expert dispatch work for Kimi-K2.5, and so for a draft beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.patches import moe_models
from tests.patches.engine_059 import tiny_engine
from tests.patches.eplb_059 import AT_EVERY_PASS, REDUNDANT, check_rebalance, locate
from tests.patches.kimi_k25 import kimi_k25


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with tiny_engine(tmp_path_factory.mktemp("model"), **AT_EVERY_PASS) as args:
        yield args


@pytest.mark.stock_failure(AssertionError, r"^$")
def test_tokens_are_dispatched_to_where_the_experts_are(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo

    model_class, config = kimi_k25()
    locate(model_class, config, args, monkeypatch)
    info = ExpertLocationDispatchInfo.init_new(layer_id=1)
    assert info.num_physical_experts == moe_models.EXPERTS + REDUNDANT
    assert info.partial_logical_to_all_physical_map.shape[0] == moe_models.EXPERTS


@pytest.mark.stock_failure(AssertionError, r"^the recorder refuses: ExpertLocationMetadata is required")
def test_experts_can_be_recorded(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.eplb import expert_distribution

    # Its counters lie on a GPU.
    monkeypatch.setattr(expert_distribution, "_ExpertDistributionRecorderReal", lambda *_: "records")
    metadata = locate(*kimi_k25(), args, monkeypatch)
    monkeypatch.setattr(args, "expert_distribution_recorder_mode", "stat")
    try:
        recorder = expert_distribution.ExpertDistributionRecorder.init_new(args, metadata, rank=0)
    except AssertionError as refusal:
        raise AssertionError(f"the recorder refuses: {refusal}") from None
    assert recorder == "records"


def test_weights_follow_the_new_locations(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_rebalance(kimi_k25(), args, monkeypatch)
