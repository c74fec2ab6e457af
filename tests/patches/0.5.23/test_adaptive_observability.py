"""What the goodput policy believes can be read."""

from __future__ import annotations

from dataclasses import fields

import pytest


@pytest.mark.stock_failure(AssertionError, "^no metric tells what a round costs")
def test_the_gauges_have_their_values() -> None:
    from sglang.srt.observability.metrics_collector import SchedulerStats

    names = {item.name for item in fields(SchedulerStats)}
    wanted = {"spec_round_ratio", "spec_speedup", "spec_break_even", "spec_switches"}
    assert wanted <= names, f"no metric tells what a round costs: {sorted(wanted - names)}"


def test_a_snapshot_tells_steps_and_reason() -> None:
    from sglang.srt.speculative.adaptive_spec_params import make_adaptive_policy

    policy = make_adaptive_policy(3, None, "goodput")
    policy.get_steps_for_batch(4)
    told = policy.snapshot()
    assert told["steps"] == 3
    assert told["batch_tier"] == 4
    assert {"accept_length", "round_ratio", "speedup", "break_even", "switches", "reason"} <= set(told)
