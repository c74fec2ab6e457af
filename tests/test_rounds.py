"""Arms measured in turn: when they drop out, when it ends, and what the ratio is."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import CHECKOUT

sys.path.insert(0, str(CHECKOUT / "scripts"))
from record import rounds

Block = tuple[float, float]
ARMS = ["off", "fixed", "stock", "goodput"]


def at(speeds: dict[str, float], noise: float = 0.0) -> Callable[[str], Block]:
    dice = random.Random(1)
    return lambda name: (speeds[name] * (1 + dice.gauss(0, noise)), 2.0)


def counts(found: list[rounds.Round]) -> dict[str, int]:
    return {name: sum(name in row for row in found) for name in ARMS}


def test_arms_that_are_far_behind_drop_out_and_it_ends_when_it_is_decided() -> None:
    speeds = {"off": 100.0, "fixed": 60.0, "stock": 95.0, "goodput": 98.0}
    found = rounds.measure(at(speeds, 0.005), ARMS, "goodput", least=3, most=21, within=0.02)
    assert counts(found) == {"off": 7, "fixed": 3, "stock": 7, "goodput": 7}, "no interval below six, and two in a row"
    told = rounds.judge(found, "goodput")
    assert told["best"] == "off"
    assert told["ratio"] == pytest.approx(0.98, abs=0.01)
    assert told["half_width"] <= 0.02
    assert told["verdict"] == "passes"
    assert told["arms"]["fixed"]["blocks"][3:] == [None] * 4
    assert rounds.ratio(found, "stock", ["off", "fixed"]) == pytest.approx(0.95, abs=0.01)


def test_it_ends_undecided_after_the_most_rounds() -> None:
    speeds = dict.fromkeys(ARMS, 100.0)
    found = rounds.measure(at(speeds, 0.2), ARMS, "goodput", least=3, most=9, within=0.02)
    assert len(found) == 9
    told = rounds.judge(found, "goodput")
    assert told["half_width"] > 0.02
    assert told["verdict"] == "undecided"


def test_one_narrow_interval_ends_nothing() -> None:
    speeds = iter([100.0] * 12 + [100.0, 50.0] + [100.0, 150.0] * 3)
    found = rounds.measure(lambda _: (next(speeds), 1.0), ["off", "goodput"], "goodput", least=3, most=9, within=0.02)
    assert len(found) == 9


def test_an_interval_below_the_bar_fails() -> None:
    found = rounds.measure(
        at({"off": 100.0, "goodput": 95.0}, 0.002), ["off", "goodput"], "goodput", least=3, most=9, within=0.02
    )
    assert rounds.judge(found, "goodput")["verdict"] == "fails"
    assert rounds.judge(found, "goodput", within=1e-6)["verdict"] == "undecided"
    assert rounds.judge(found[:5], "goodput")["verdict"] == "undecided", "there is no interval"


def test_one_hit_block_moves_the_pooled_ratio_and_not_the_median() -> None:
    found: list[rounds.Round] = [{"off": (100.0, 1.0), "goodput": (100.0, 1.0)} for _ in range(9)]
    found[4] = {"off": (100.0, 1.0), "goodput": (50.0, 1.0)}
    told = rounds.judge(found, "goodput")
    assert (told["ratio"], told["pooled"], told["interval"]) == (1.0, 0.9, [1.0, 1.0])


def test_arms_that_never_differ_are_decided_by_the_second_interval() -> None:
    found = rounds.measure(at(dict.fromkeys(ARMS, 100.0)), ARMS, "goodput", least=3, most=21, within=0.0)
    assert len(found) == 7


def test_the_order_turns_round() -> None:
    ran: list[str] = []

    def run(name: str) -> Block:
        ran.append(name)
        return 1.0, 1.0

    rounds.measure(run, ["off", "goodput"], "goodput", least=3, most=3, within=0.0)
    assert ran == ["off", "goodput", "goodput", "off", "off", "goodput"]


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30))
def test_the_interval_holds_the_median_or_does_not_exist(ratios: list[float]) -> None:
    found = rounds.interval(ratios)
    assert (found is None) == (len(ratios) < 6)
    if found:
        middle = sorted(ratios)[len(ratios) // 2]
        assert found[0] <= middle <= found[1]


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    dice, trials = random.Random(5), 400
    samples = [[dice.lognormvariate(0, 0.1) for _ in range(20)] for _ in range(trials)]
    held = sum(low <= 1 <= high for low, high in filter(None, map(rounds.interval, samples)))
    assert 0.93 < held / trials < 0.99
