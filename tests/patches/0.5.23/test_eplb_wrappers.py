"""EPLB, redundant experts and expert recording work for wrappers around MoE language models."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.patches import moe_models
from tests.patches.eplb import check_dispatch, check_rebalance, locate, redundant_experts  # noqa: F401
from tests.patches.tiny_engine import tiny_engine

WRAPPERS = [
    moe_models.glm4v_moe,
    moe_models.intern_vl,
    moe_models.intern_s1,
    moe_models.qwen3_omni_moe,
    moe_models.pixtral,
]
NO_LOCATIONS = pytest.mark.stock_failure(AssertionError, "^Expert dispatch requires placement metadata")


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with tiny_engine(tmp_path_factory.mktemp("model")):
        yield


@NO_LOCATIONS
@pytest.mark.usefixtures("redundant_experts")
@pytest.mark.parametrize("make", WRAPPERS)
def test_the_router_finds_the_experts(make: Callable[[], moe_models.Built], monkeypatch: pytest.MonkeyPatch) -> None:
    check_dispatch(make, monkeypatch)


@pytest.mark.usefixtures("redundant_experts")
@pytest.mark.parametrize("make", WRAPPERS)
def test_weights_follow_the_new_locations(
    make: Callable[[], moe_models.Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rebalance(make, monkeypatch)


def test_intern_vl_around_gpt_oss(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GptOssConfig

    model_class, config = moe_models.intern_vl()
    config.llm_config = GptOssConfig(num_hidden_layers=3, num_local_experts=8, architectures=["GptOssForCausalLM"])
    assert locate(model_class, config, monkeypatch).physical_to_logical_map.shape == (3, 8)


@pytest.mark.parametrize("make", [moe_models.intern_vl, moe_models.intern_s1, moe_models.pixtral])
def test_around_a_dense_model_there_are_no_locations(
    make: Callable[[], moe_models.Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_class, config = make()
    config.text_config.architectures, config.text_config.model_type = ["Qwen3ForCausalLM"], "qwen3"
    assert locate(model_class, config, monkeypatch) is None
