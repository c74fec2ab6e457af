"""Adaptive speculation starts on a CPU with its default flags."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from tests.patches.cpu_package import eagle_arguments, keep_the_package_backend, put_stand_in, start_scheduler


@pytest.mark.stock_failure(AssertionError, "^the server stops in init_cuda_graph_state")
def test_every_candidate_gets_a_state_without_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if put_stand_in(monkeypatch, copy_all_layer_kv_cache_cpu=lambda *_: None):
        keep_the_package_backend(monkeypatch)
    try:
        scheduler = start_scheduler(**eagle_arguments(tmp_path, speculative_adaptive=True))
    except NotImplementedError as error:
        where = traceback.extract_tb(error.__traceback__)[-1].name
        raise AssertionError(f"the server stops in {where}") from error
    states = scheduler.draft_worker.adaptive_controller._states
    assert len(states) > 1
    for steps, state in states.items():
        assert state.speculative_num_draft_tokens == steps + 1
        assert state.target_graph_runner is None
        assert state.target_attn_backend is not None
