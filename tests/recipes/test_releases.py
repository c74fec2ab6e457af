"""A flag of one engine release, said in another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bw.recipes import releases
from sglang_bw.recipes.flags import Flag, parse, tokens
from sglang_bw.recipes.releases import Fate, translate

NEWEST = "0.5.23+bw.1"


def said(line: str, version: str = NEWEST, before: str | None = None) -> tuple[Fate, list[str]]:
    found = translate(parse(line.split())[0], before, version)
    return found.fate, tokens(found.flags)


@pytest.mark.parametrize(
    ("line", "version", "fate", "instead"),
    [
        ("--cuda-graph-max-bs 16", NEWEST, Fate.RENAMED, "--cuda-graph-max-bs-decode 16"),
        ("--cuda-graph-max-bs 16", "0.5.16.post1", Fate.DEPRECATED, "--cuda-graph-max-bs-decode 16"),
        ("--cuda-graph-max-bs 16", "0.5.9", Fate.SAME, "--cuda-graph-max-bs 16"),
        ("--cuda-graph-max-bs-decode 16", "0.5.9", Fate.RENAMED, "--cuda-graph-max-bs 16"),
        ("--cuda-graph-bs 1 2 4", NEWEST, Fate.RENAMED, "--cuda-graph-bs-decode 1 2 4"),
        ("--nsa-prefill-backend trtllm", NEWEST, Fate.RENAMED, "--dsa-prefill-backend trtllm"),
        ("--stream-output", NEWEST, Fate.RENAMED, "--incremental-streaming-output"),
        ("--disable-piecewise-cuda-graph", NEWEST, Fate.RENAMED, "--cuda-graph-backend-prefill disabled"),
        ("--prefill-round-robin-balance", NEWEST, Fate.REMOVED, ""),
        ("--torchao-config int4", "0.5.18", Fate.REMOVED, ""),
        ("--attn-dp-size 2", "0.5.9", Fate.NOT_YET, ""),
        ("--tp 8", NEWEST, Fate.ABBREVIATED, "--tp-size 8"),
        ("--speculative-algo EAGLE", NEWEST, Fate.ABBREVIATED, "--speculative-algorithm EAGLE"),
        ("--pp 2", NEWEST, Fate.AMBIGUOUS, ""),
        ("--tensor-parallel-size 8", NEWEST, Fate.SAME, "--tensor-parallel-size 8"),
        ("--no-enable-tf32-matmul", NEWEST, Fate.SAME, "--no-enable-tf32-matmul"),
        ("--tensor-paralel 8", NEWEST, Fate.UNKNOWN, ""),
    ],
)
def test_translations(line: str, version: str, fate: Fate, instead: str) -> None:
    assert said(line, version) == (fate, instead.split())


def test_a_removed_flag_says_why_and_since_when() -> None:
    found = translate(Flag("enable-double-sparsity"), "0.5.9", "0.5.23")
    assert found.breaks
    assert "went after sglang 0.5.10" in found.reason
    assert "double sparsity was taken out" in found.reason


def test_a_version_that_is_none() -> None:
    with pytest.raises(ValueError, match="'newest' is not a version"):
        translate(Flag("tp-size", ("2",)), None, "newest")


def test_unread_versions_count_as_the_nearest_older_one() -> None:
    assert not releases.known("0.5.99")
    assert said("--cuda-graph-max-bs 16", "0.5.99") == said("--cuda-graph-max-bs 16", "0.5.23")
    assert said("--cuda-graph-max-bs 16", "0.4.1") == said("--cuda-graph-max-bs 16", "0.5.9")


def test_every_retired_flag_is_explained() -> None:
    """Flags that the newest release lacks: either something says the same, or the reason is a sentence of its own."""
    newest = releases.releases()[-1]
    for name in releases._spans():
        found = translate(Flag(name, ("x",)), None, newest)
        assert found.fate is not Fate.UNKNOWN
        if found.fate is Fate.RENAMED:
            assert all(translate(flag, None, newest).fate is Fate.SAME for flag in found.flags), name


flag_names = st.sampled_from(sorted(releases._spans()))
versions = st.sampled_from(releases.releases())


@given(name=flag_names, version=versions)
def test_what_is_offered_instead_exists_there(name: str, version: str) -> None:
    found = translate(Flag(name, ("1",)), None, version)
    offered = {translate(flag, None, version).fate for flag in found.flags}
    assert offered <= {Fate.SAME, Fate.DEPRECATED}
    assert bool(found.reason) is (found.fate is not Fate.SAME)
    assert found.breaks or found.flags


@given(name=st.text(max_size=30), version=versions)
def test_any_name_has_an_answer(name: str, version: str) -> None:
    assert translate(Flag(name), None, version).as_json()["fate"] in {fate.value for fate in Fate}
