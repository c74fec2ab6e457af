"""DeepSeek-V3.2 on SM12x takes the sparse-MLA kernel that GLM's DSA takes: the target and its NextN layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patches.model_shapes import model_config
from tests.patches.resolver import B200, DGX_SPARK, H200, RTX_PRO_6000, machine, resolve, resolved_args

SM12X = [("sm120", RTX_PRO_6000), ("sm121", DGX_SPARK)]
V32 = ["deepseek-v3.2", "deepseek-v3.2-nvfp4"]


def dsa_backends(arch: str, memory: int, parent: Path, target: str, **flags: Any) -> tuple[str, str]:
    view = resolve(arch, memory, model_path=model_config(parent, target), tp_size=8, **flags)
    return view.dsa_prefill_backend, view.dsa_decode_backend


@pytest.mark.stock_failure(AssertionError, r"^sparse attention runs trtllm and trtllm")
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"attn_dp_size": 8},
        {"speculative_algorithm": "EAGLE"},
    ],
)
@pytest.mark.parametrize("target", V32)
@pytest.mark.parametrize(("arch", "memory"), SM12X)
def test_the_default_has_a_kernel(target: str, flags: dict[str, Any], arch: str, memory: int, tmp_path: Path) -> None:
    found = dsa_backends(arch, memory, tmp_path, target, **flags)
    assert found == ("flashinfer_sparse_mla",) * 2, f"sparse attention runs {found[0]} and {found[1]}"


@pytest.mark.stock_failure(ValueError, r"^flashinfer_sparse_mla supports only GLM DSA with FP8 KV cache")
@pytest.mark.parametrize("is_draft", [False, True], ids=["target", "NextN"])
def test_the_attention_backend_accepts_it(is_draft: bool, tmp_path: Path) -> None:
    target = model_config(tmp_path, "deepseek-v3.2")
    with machine("sm120", RTX_PRO_6000):
        from sglang.kernels.ops.attention.flash_mla_sm120 import _validate_flashinfer_sparse_mla_backend
        from sglang.srt.configs.model_config import ModelConfig

        args = resolved_args(model_path=target, tp_size=8, speculative_algorithm="EAGLE")
        architecture = ModelConfig.from_server_args(args, is_draft_model=is_draft).hf_config.architectures[0]
        assert architecture == ("DeepseekV3ForCausalLMNextN" if is_draft else "DeepseekV32ForCausalLM")
        assert _validate_flashinfer_sparse_mla_backend(
            model_arch=architecture,
            device_sm_major=12,
            kv_cache_dtype=torch.float8_e4m3fn,
            prefill_impl="flashinfer_sparse_mla",
            decode_impl="flashinfer_sparse_mla",
        )


@pytest.mark.parametrize(
    ("architecture", "major", "dtype"),
    [
        ("DeepseekV32ForCausalLM", 10, torch.float8_e4m3fn),
        ("DeepseekV32ForCausalLM", 12, torch.bfloat16),
        ("LongcatFlashForCausalLM", 12, torch.float8_e4m3fn),
    ],
)
def test_it_accepts_nothing_else(architecture: str, major: int, dtype: torch.dtype) -> None:
    with machine("sm120", RTX_PRO_6000):
        from sglang.kernels.ops.attention.flash_mla_sm120 import _validate_flashinfer_sparse_mla_backend

        with pytest.raises(ValueError, match="flashinfer_sparse_mla supports only"):
            _validate_flashinfer_sparse_mla_backend(
                model_arch=architecture,
                device_sm_major=major,
                kv_cache_dtype=dtype,
                prefill_impl="flashinfer_sparse_mla",
                decode_impl="flashinfer_sparse_mla",
            )


def test_an_explicit_backend_wins(tmp_path: Path) -> None:
    flags = {"dsa_prefill_backend": "triton_sparse_mla", "kv_cache_dtype": "fp8_e4m3"}
    found = dsa_backends("sm120", RTX_PRO_6000, tmp_path, "deepseek-v3.2", **flags)
    assert found[0] == "triton_sparse_mla"


@pytest.mark.parametrize(
    ("target", "arch", "memory", "expected"),
    [
        ("deepseek-v3.2", "sm100", B200, ("trtllm", "trtllm")),
        ("deepseek-v3.2", "sm90", H200, ("flashmla_sparse", "fa3")),
        ("glm-5-nvfp4", "sm120", RTX_PRO_6000, ("flashinfer_sparse_mla", "flashinfer_sparse_mla")),
        ("glm-5-nvfp4", "sm100", B200, ("trtllm", "trtllm")),
        ("deepseek-v3", "sm120", RTX_PRO_6000, (None, None)),
    ],
)
def test_others_are_as_before(
    target: str, arch: str, memory: int, expected: tuple[str | None, str | None], tmp_path: Path
) -> None:
    assert dsa_backends(arch, memory, tmp_path, target) == expected
