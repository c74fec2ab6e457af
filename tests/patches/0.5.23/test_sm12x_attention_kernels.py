"""Attention backends without SM12x kernels are refused while the arguments are resolved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.patches.model_shapes import model_config
from tests.patches.resolver import B200, DGX_SPARK, H200, RTX_PRO_6000, resolve

SM12X = [("sm120", RTX_PRO_6000), ("sm121", DGX_SPARK)]
FP8 = {"kv_cache_dtype": "fp8_e4m3"}


def answer(arch: str, memory: int, parent: Path, target: str, **flags: Any) -> str:
    """Return the refusal of a launch, or which attention it is accepted with."""
    try:
        view = resolve(arch, memory, model_path=model_config(parent, target), tp_size=8, **flags)
    except ValueError as refusal:
        return str(refusal)
    return f"accepted: {view.attention_backend}, DSA {view.dsa_prefill_backend} and {view.dsa_decode_backend}"


@pytest.mark.stock_failure(AssertionError, r"^accepted: ")
@pytest.mark.parametrize(
    ("target", "flags", "text"),
    [
        ("glm-4.6", {"attention_backend": "fa3"}, "fa3 attention backend has no SM12x kernels. Use flashinfer."),
        ("glm-4.6", {"prefill_attention_backend": "fa3"}, "fa3 attention backend has no SM12x kernels"),
        ("glm-4.6", {"decode_attention_backend": "fa3"}, "fa3 attention backend has no SM12x kernels"),
        ("kimi-k2.5-int4", {"attention_backend": "fa3"}, "Use triton."),
        (
            "deepseek-v3",
            {"attention_backend": "flashmla"},
            "flashmla attention backend has no SM12x kernels. Use triton",
        ),
        (
            "glm-4.6",
            {"speculative_algorithm": "EAGLE", "speculative_draft_attention_backend": "fa3"},
            "fa3 attention backend has no SM12x kernels",
        ),
        ("glm-5", {"kv_cache_dtype": "bf16"}, "The trtllm DSA kernels (trtllm-gen) do not support SM12x"),
        ("deepseek-v3.2", {"kv_cache_dtype": "bf16"}, "Got --kv-cache-dtype bfloat16"),
        ("deepseek-v3.2", {"dsa_decode_backend": "trtllm", **FP8}, "The trtllm DSA kernels"),
    ],
)
@pytest.mark.parametrize(("arch", "memory"), SM12X)
def test_what_has_no_kernels_is_refused(
    target: str, flags: dict[str, Any], text: str, arch: str, memory: int, tmp_path: Path
) -> None:
    found = answer(arch, memory, tmp_path, target, **flags)
    assert text in found, found


@pytest.mark.parametrize(
    ("target", "flags"),
    [
        ("glm-4.6", {}),
        ("glm-4.6", {"attention_backend": "triton"}),
        ("glm-4.6", {"attention_backend": "trtllm_mha"}),
        ("glm-4.6", {"attention_backend": "fa4"}),
        ("kimi-k2.5-int4", {}),
        ("kimi-k2.5-int4", {"attention_backend": "flashinfer"}),
        ("glm-5", {}),
        ("deepseek-v3.2", FP8),
        ("qwen3.5", {}),
        ("minimax-m2", {}),
    ],
)
def test_the_rest_is_accepted(target: str, flags: dict[str, Any], tmp_path: Path) -> None:
    found = answer("sm120", RTX_PRO_6000, tmp_path, target, **flags)
    assert found.startswith("accepted: "), found


@pytest.mark.parametrize(
    ("target", "flags", "arch", "memory"),
    [
        ("glm-4.6", {"attention_backend": "fa3"}, "sm90", H200),
        ("deepseek-v3", {"attention_backend": "flashmla"}, "sm90", H200),
        ("deepseek-v3", {"attention_backend": "flashmla"}, "sm100", B200),
        ("glm-5", {"kv_cache_dtype": "bf16"}, "sm100", B200),
        ("deepseek-v3.2", {}, "sm100", B200),
    ],
)
def test_other_gpus_are_as_before(target: str, flags: dict[str, Any], arch: str, memory: int, tmp_path: Path) -> None:
    found = answer(arch, memory, tmp_path, target, **flags)
    assert found.startswith("accepted: "), found
