"""A model without expert locations runs, as long as no token is dispatched by them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.patches.engine_059 import tiny_engine


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with tiny_engine(tmp_path_factory.mktemp("model")) as args:
        yield args


def dispatch_info() -> Any:
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo

    assert get_global_expert_location_metadata() is None
    return ExpertLocationDispatchInfo.init_new(layer_id=0)


@pytest.mark.stock_failure(AssertionError, r"^$")
@pytest.mark.usefixtures("args")
def test_nothing_is_asserted_without_an_algorithm() -> None:
    assert dispatch_info() is None


def test_an_algorithm_still_needs_locations(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(args, "ep_dispatch_algorithm", "static")
    with pytest.raises(AssertionError, match="get_model_config_for_expert_location"):
        dispatch_info()
