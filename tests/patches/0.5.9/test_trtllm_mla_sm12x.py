"""trtllm_mla on SM12x: what has no kernel there is replaced or refused before the weights are loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.patches.engine_059 import resolve
from tests.patches.model_shapes import model_config
from tests.patches.resolver import B200, DGX_SPARK, RTX_PRO_6000

SM12X = [("sm120", RTX_PRO_6000), ("sm121", DGX_SPARK)]
# Attention DP leaves each rank the 128 heads that XQA takes.
FOR_XQA = {"dp_size": 8, "enable_dp_attention": True, "kv_cache_dtype": "fp8_e4m3"}


def backends(arch: str, memory: int, parent: Path, target: str, **flags: Any) -> tuple[str, str]:
    """Return the (prefill, decode) attention backends of a resolved launch."""
    args = resolve(arch, memory, **{"model_path": model_config(parent, target), "tp_size": 8, **flags})
    prefill, decode = args.get_attention_backends()
    return prefill, decode


def answer(arch: str, memory: int, parent: Path, target: str, **flags: Any) -> str:
    """Return the refusal of a launch, or which backends it is accepted with."""
    try:
        prefill, decode = backends(arch, memory, parent, target, **flags)
    except ValueError as refusal:
        return str(refusal)
    return f"accepted: prefill on {prefill}, decode on {decode}"


@pytest.mark.stock_failure(AssertionError, r"prefill runs trtllm_mla")
@pytest.mark.parametrize(
    "flags",
    [
        {"attention_backend": "trtllm_mla"},
        {"attention_backend": "trtllm_mla", "decode_attention_backend": "triton"},
    ],
)
@pytest.mark.parametrize(("arch", "memory"), SM12X)
def test_prefill_goes_to_a_backend_that_exists(flags: dict[str, str], arch: str, memory: int, tmp_path: Path) -> None:
    prefill, decode = backends(arch, memory, tmp_path, "deepseek-v3", **flags, **FOR_XQA)
    assert prefill == "triton", f"prefill runs {prefill}"
    assert decode == flags.get("decode_attention_backend", "trtllm_mla")


@pytest.mark.stock_failure(AssertionError, r"^accepted: prefill on trtllm_mla, decode on (trtllm_mla|triton)")
@pytest.mark.parametrize(
    ("target", "flags", "text"),
    [
        ("deepseek-v3", {"prefill_attention_backend": "trtllm_mla"}, r"prefill kernel .* does not support SM12x"),
        ("deepseek-v3", {"attention_backend": "trtllm_mla"}, r"requires 128 query heads per rank, got 16"),
        ("kimi-k2.5-int4", {"attention_backend": "trtllm_mla", **FOR_XQA}, r"128 query heads per rank, got 64"),
        (
            "deepseek-v3",
            {"attention_backend": "trtllm_mla", **FOR_XQA, "kv_cache_dtype": "bf16"},
            r"requires --kv-cache-dtype fp8_e4m3",
        ),
        (
            "deepseek-v3",
            {
                "attention_backend": "trtllm_mla",
                "speculative_algorithm": "NEXTN",
                "speculative_attention_mode": "decode",
                **FOR_XQA,
            },
            r"cannot verify drafts",
        ),
    ],
)
def test_what_cannot_run_is_refused(target: str, flags: dict[str, Any], text: str, tmp_path: Path) -> None:
    found = answer("sm120", RTX_PRO_6000, tmp_path, target, **flags)
    assert re.search(text, found), found


def test_split_backends_are_left_alone(tmp_path: Path) -> None:
    flags = {"prefill_attention_backend": "flashinfer", "decode_attention_backend": "trtllm_mla", **FOR_XQA}
    assert backends("sm120", RTX_PRO_6000, tmp_path, "deepseek-v3", **flags) == ("flashinfer", "trtllm_mla")


@pytest.mark.parametrize("target", ["deepseek-v3", "kimi-k2.5-int4"])
def test_sm100_runs_both_phases(target: str, tmp_path: Path) -> None:
    assert backends("sm100", B200, tmp_path, target) == ("trtllm_mla", "trtllm_mla")
