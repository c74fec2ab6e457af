"""EPLB, redundant experts and expert recording work for Kimi-K3, Kimi-Linear and Kimi-VL."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.patches import moe_models
from tests.patches.eplb import check_dispatch, check_rebalance, locate, redundant_experts  # noqa: F401
from tests.patches.tiny_engine import tiny_engine

KIMI = [moe_models.kimi_linear, moe_models.kimi_k3_linear, moe_models.kimi_k3, moe_models.kimi_vl]
NO_LOCATIONS = pytest.mark.stock_failure(AssertionError, "^Expert dispatch requires placement metadata")


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with tiny_engine(tmp_path_factory.mktemp("model")):
        yield


@NO_LOCATIONS
@pytest.mark.usefixtures("redundant_experts")
@pytest.mark.parametrize("make", KIMI)
def test_the_router_finds_the_experts(make: Callable[[], moe_models.Built], monkeypatch: pytest.MonkeyPatch) -> None:
    check_dispatch(make, monkeypatch)


@pytest.mark.usefixtures("redundant_experts")
@pytest.mark.parametrize("make", KIMI)
def test_weights_follow_the_new_locations(
    make: Callable[[], moe_models.Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rebalance(make, monkeypatch)


def test_a_dense_kimi_linear_has_no_locations(monkeypatch: pytest.MonkeyPatch) -> None:
    model_class, config = moe_models.kimi_linear()
    config.num_experts = None
    assert locate(model_class, config, monkeypatch) is None
