"""Speculation changes no token: chain and tree against the baseline, at temperature 0 and in fp32, so exactly."""

from __future__ import annotations

import httpx
import pytest

from tests.engine.conftest import TOKENS, Answer, RunningServer

pytestmark = pytest.mark.engine
AT_ONCE = 8


@pytest.fixture(scope="module")
def expected(baseline: RunningServer, prompts: list[str]) -> list[Answer]:
    answers = baseline.generate_all(prompts, concurrent=1)
    assert all("spec_verify_ct" not in answer["meta_info"] for answer in answers)
    return answers


def tokens(answers: list[Answer]) -> list[list[int]]:
    assert all(len(answer["output_ids"]) == TOKENS for answer in answers)
    return [answer["output_ids"] for answer in answers]


def accept_length(answers: list[Answer]) -> float:
    rounds = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    return float(1 + sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers) / rounds)


def test_the_prompts_ask_for_different_text(expected: list[Answer]) -> None:
    assert len({tuple(output) for output in tokens(expected)}) >= 12
    assert len({token for output in tokens(expected) for token in output}) >= 20


def test_the_baseline_does_not_depend_on_the_batch(
    baseline: RunningServer, prompts: list[str], expected: list[Answer]
) -> None:
    assert tokens(baseline.generate_all(prompts, concurrent=AT_ONCE)) == tokens(expected)


@pytest.mark.parametrize("at_once", [1, AT_ONCE])
def test_chain(chain: RunningServer, prompts: list[str], expected: list[Answer], at_once: int) -> None:
    answers = chain.generate_all(prompts, concurrent=at_once)
    assert tokens(answers) == tokens(expected)
    assert accept_length(answers) >= 2.5
    assert chain.most_at_once() >= min(at_once, 4)


@pytest.mark.parametrize("at_once", [1, AT_ONCE])
def test_tree(tree: RunningServer, prompts: list[str], expected: list[Answer], at_once: int) -> None:
    info = httpx.get(f"{tree.url}/server_info", timeout=30, trust_env=False).json()
    assert (info["speculative_eagle_topk"], info["speculative_num_draft_tokens"]) == (4, 8)
    answers = tree.generate_all(prompts, concurrent=at_once)
    assert tokens(answers) == tokens(expected)
    assert accept_length(answers) >= 2.5
    assert tree.most_at_once() >= min(at_once, 4)


def test_drafting_saves_target_passes(chain: RunningServer, prompts: list[str]) -> None:
    meta = chain.generate(prompts[0])["meta_info"]
    assert meta["spec_verify_ct"] < TOKENS / 2
