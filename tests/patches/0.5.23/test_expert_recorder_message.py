"""The recorder says why it cannot start, to the end of the sentence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.patches.tiny_engine import tiny_engine


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with tiny_engine(tmp_path_factory.mktemp("model")):
        yield


@pytest.mark.stock_failure(AssertionError, r"^the message ends in 'recording. One possible'")
def test_the_message_is_whole() -> None:
    from sglang.srt.eplb.expert_distribution import ExpertDistributionRecorder
    from sglang.srt.runtime_context import get_exec

    with get_exec().moe.override(expert_distribution_recorder_mode="stat"), pytest.raises(AssertionError) as refused:
        ExpertDistributionRecorder.init_new(None, 0)
    message = str(refused.value)
    assert "get_model_config_for_expert_location" in message, f"the message ends in {message[-23:]!r}"
    assert "One possible reason is that" in message
