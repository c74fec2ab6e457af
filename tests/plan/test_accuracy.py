"""The bars: parameters fitted on half of the sources, tested on the rest; nothing of the tested ones is known."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from scripts.fit_speculation import examples, fit, left_out_errors
from scripts.plan_accuracy import PAGE, Half, halves, shares
from sglang_bw.plan.replay import bundle, replay
from sglang_bw.plan.replay.forms import read
from sglang_bw.plan.speculation.tables import parameters
from sglang_bw.plan.speculation.verdict import Interval

DATA = Path(__file__).parent / "data"
CELLS = DATA / "speculation_cells.csv"


@pytest.fixture(scope="module")
def divided() -> list[Half]:
    return list(halves(read(CELLS).rows))


def test_losses_and_wins_of_sources_nobody_fitted_on(divided: list[Half]) -> None:
    losses, wins, always = shares([pair for half in divided for pair in half.pairs()])
    assert losses >= 0.80
    assert wins >= 0.95
    assert always < 0.85, "the score of 'it always pays', which finds no loss at all"


def test_intervals_hold_about_eighty_percent_of_what_was_held_out(divided: list[Half]) -> None:
    sigma = parameters().sigma
    held = [
        Interval.around(cell.predicted(half.fitted), sigma[cell.parts.basis])
        for half in divided
        for cell in half.tested
    ]
    observed = [cell.speedup for half in divided for cell in half.tested]
    inside = sum(interval.low <= value <= interval.high for interval, value in zip(held, observed, strict=True))
    assert 0.7 < inside / len(observed) < 0.9


def test_what_was_fitted_depends_on_what_was_trained_on(divided: list[Half]) -> None:
    assert len({tuple(half.fitted.traffic.values()) for half in divided}) > 20


def test_a_fit_recovers_the_parameters_that_made_the_answers() -> None:
    cells = examples(read(CELLS).rows)
    truth = replace(
        parameters(), traffic={"eagle3": 1.7, "mtp": 1.4}, draft_step=0.06, attention={"vllm": 0.8, "sglang": 0.4}
    )
    made = [replace(cell, speedup=cell.predicted(truth)) for cell in cells]
    found = fit(made, parameters())
    assert found.traffic["eagle3"] == pytest.approx(1.7, abs=0.06)
    assert found.traffic["mtp"] == pytest.approx(1.4, abs=0.06)
    assert found.draft_step == pytest.approx(0.06, abs=0.01)


def test_shipped_parameters_are_those_of_the_fit() -> None:
    found = fit(examples(read(CELLS).rows), parameters())
    assert found.traffic == pytest.approx(parameters().traffic, abs=0.001)
    assert found.draft_step == pytest.approx(parameters().draft_step, abs=0.001)
    assert found.attention == pytest.approx(parameters().attention, abs=0.001)


def test_bundle_with_each_data_set_left_out() -> None:
    errors = [abs(error) for error in left_out_errors(bundle.shipped())]
    assert len(errors) == 230, "without Llama-4-Scout, whose baseline is wrong"
    assert median(errors) < 0.05


def test_bundle_as_replay_predicts_it() -> None:
    assert replay(DATA / "specbundle.csv").summary()["median"] < 0.05


def test_targets_that_are_not_in_the_table() -> None:
    """SpecForge's page gives R of two targets that this table does not have."""
    published = {
        ("Llama-3.3-70B-Instruct", (3, 1, 4)): 1.25,
        ("Llama-3.3-70B-Instruct", (7, 1, 8)): 1.42,
        ("Qwen3-235B-A22B-Instruct-2507", (3, 1, 4)): 1.60,
        ("Qwen3-235B-A22B-Instruct-2507", (7, 1, 8)): 1.80,
    }
    for (target, config), ratio in published.items():
        run = bundle.Run(target, "a draft", "gsm8k", 8, config, None)
        assert bundle.modelled_ratio(run) == pytest.approx(ratio, rel=0.08)


def test_the_page_says_what_the_tables_say(divided: list[Half]) -> None:
    losses, wins, _ = shares([pair for half in divided for pair in half.pairs()])
    page = PAGE.read_text(encoding="utf-8")
    shown = re.search(r"ways to fit on half .*?\| ([\d.]+)% \| ([\d.]+)% \| [\d.]+% right", page)
    assert shown, "run `python -m scripts.plan_accuracy DIRECTORY`"
    assert float(shown[1]) == pytest.approx(100 * losses, abs=0.06)
    assert float(shown[2]) == pytest.approx(100 * wins, abs=0.06)
