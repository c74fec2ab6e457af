"""The adaptive policy hears of each round by itself: its own steps and its time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patches.cpu_package import put_stand_in


class Worker:
    """Takes what the result processor tells a speculative worker, on either engine."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def on_verify_complete_cpu(self, accepted: list[int], batch_size: int) -> None:
        self.told.append({"batch_size": batch_size, "accepted": accepted})

    def on_decode_round(self, done: Any) -> None:
        self.told.append(
            {
                "batch_size": done.batch_size,
                "accepted": done.num_correct_drafts_per_req,
                "steps": done.num_steps,
                "seconds": done.launch_gap_s,
            }
        )


@pytest.mark.stock_failure(AssertionError, "^the policy is not told the steps of the round")
def test_a_round_brings_its_own_steps_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    put_stand_in(monkeypatch)
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.managers.utils import GenerationBatchResult

    worker = Worker()
    processor = SimpleNamespace(
        metrics_reporter=SimpleNamespace(snapshot_spec_decode_metrics=lambda *_: None),
        model_worker=worker,
        advance_grammar_fsm=lambda *_: None,
    )
    # Launched with 2 draft steps; by now the worker may run with any other number.
    result = GenerationBatchResult(
        next_token_ids=torch.arange(6), accept_lens=torch.tensor([3, 1]), speculative_num_draft_tokens=3
    )
    result.launch_gap_s = 0.25
    requests = [SimpleNamespace(is_retracted=True) for _ in range(2)]
    SchedulerBatchResultProcessor._resolve_spec_v2_tokens(processor, result, SimpleNamespace(reqs=requests))
    (told,) = worker.told
    assert "steps" in told, "the policy is not told the steps of the round"
    assert told == {"batch_size": 2, "accepted": [2, 0], "steps": 2, "seconds": 0.25}


@pytest.mark.parametrize(
    ("previous", "idle", "gap"),
    [
        pytest.param((6, 10.0, False), False, 0.5, id="the launch before was a decode round"),
        pytest.param((6, 10.0, True), False, None, id="a prefill came between"),
        pytest.param((5, 10.0, False), False, None, id="another launch came between"),
        pytest.param((6, 10.0, False), True, None, id="the scheduler was idle"),
        pytest.param((6, 1.0, False), False, None, id="a stall"),
        pytest.param(None, False, None, id="the first round"),
    ],
)
def test_only_adjacent_decode_launches_are_timed(previous: Any, idle: bool, gap: float | None) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    batch = SimpleNamespace(forward_iter=7, launch_ts=10.5, after_idle_gap=idle)
    assert Scheduler._decode_launch_gap(SimpleNamespace(_prev_step=previous), batch) == gap
