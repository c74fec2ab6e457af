"""The algorithm fits the draft: EAGLE given for an EAGLE-3 draft is corrected, the reverse is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.patches.model_shapes import model_config
from tests.patches.resolver import B200, RTX_PRO_6000, resolve

PAIRS = [
    ("kimi-k2.5-int4", "eagle3-7168"),
    ("kimi-k2.5-int4", "kimi-eagle3-mla"),
    ("glm-4.6-nvfp4", "eagle3-5120"),
    ("minimax-m2", "eagle3-3072"),
    ("qwen3.5", "eagle3-4096"),
    ("llama-3.3-70b", "eagle3-8192"),
]


def algorithm(parent: Path, target: str, draft: str | None, asked: str, arch: str = "sm120", **flags: Any) -> str:
    if draft:
        flags["speculative_draft_model_path"] = model_config(parent, draft)
    view = resolve(
        arch,
        RTX_PRO_6000 if arch == "sm120" else B200,
        model_path=model_config(parent, target),
        tp_size=8,
        speculative_algorithm=asked,
        **flags,
    )
    return str(view.speculative_algorithm)


@pytest.mark.stock_failure(AssertionError, r"^an EAGLE-3 draft runs as EAGLE\b")
@pytest.mark.parametrize("asked", ["EAGLE", "NEXTN", "eagle"])
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_an_eagle3_draft_runs_as_eagle3(
    target: str, draft: str, asked: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        resolved = algorithm(tmp_path, target, draft, asked)
    assert resolved == "EAGLE3", f"an EAGLE-3 draft runs as {resolved}"
    assert f"changing --speculative-algorithm from {asked.upper()} to EAGLE3" in caplog.text


@pytest.mark.stock_failure(AssertionError, r"^an EAGLE-3 draft runs as EAGLE\b")
def test_so_it_does_on_sm100(tmp_path: Path) -> None:
    resolved = algorithm(tmp_path, "kimi-k2.5-int4", "kimi-eagle3-mla", "EAGLE", "sm100")
    assert resolved == "EAGLE3", f"an EAGLE-3 draft runs as {resolved}"


def test_an_eagle_draft_is_refused_as_eagle3(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLMEagle is an EAGLE draft.*--speculative-algorithm EAGLE\."):
        algorithm(tmp_path, "llama-3.3-70b", "eagle-llama", "EAGLE3")


@pytest.mark.parametrize(
    ("target", "draft", "asked", "expected"),
    [
        ("llama-3.3-70b", "eagle-llama", "EAGLE", "EAGLE"),
        ("llama-3.3-70b", "eagle3-8192", "EAGLE3", "EAGLE3"),
        ("kimi-k2.5-int4", "kimi-eagle3-mla", "EAGLE3", "EAGLE3"),
        ("deepseek-v3", None, "NEXTN", "EAGLE"),
        ("glm-4.6-nvfp4", "glm-4.6", "EAGLE", "EAGLE"),  # NextN layers kept in a checkpoint of their own
        ("llama-3.3-70b", "eagle3-8192", "STANDALONE", "STANDALONE"),
    ],
)
def test_what_fits_stays(target: str, draft: str | None, asked: str, expected: str, tmp_path: Path) -> None:
    assert algorithm(tmp_path, target, draft, asked) == expected
