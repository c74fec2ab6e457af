"""MXFP8 experts on SM12x, which has no kernel for them: an error before the load, or converted to block FP8."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patches.model_shapes import MXFP8, Config, model_config
from tests.patches.resolver import B200, DGX_SPARK, RTX_PRO_6000, machine, resolve

SM12X = [("sm120", RTX_PRO_6000), ("sm121", DGX_SPARK)]
CONVERT = "SGLANG_FORCE_MXFP8_BLOCK_CONVERT"
MIXED: Config = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.mlp.experts": {"quant_algo": "MXFP8"},
    },
    "ignore": ["lm_head"],
}


@pytest.fixture(autouse=True)
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONVERT, raising=False)


def answer(arch: str, memory: int, model_path: str, **flags: Any) -> str:
    """Return the MoE runner of a launch, or its refusal."""
    try:
        return f"accepted with {resolve(arch, memory, model_path=model_path, tp_size=8, **flags).moe_runner_backend}"
    except ValueError as refusal:
        return str(refusal)


@pytest.mark.stock_failure(AssertionError, r"^accepted with (auto|flashinfer_trtllm|cutlass|deep_gemm)\b")
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"quantization": "mxfp8"},
        {"quantization": "mxfp8", "moe_runner_backend": "cutlass"},
        {"quantization": "mxfp8", "moe_runner_backend": "deep_gemm"},
    ],
)
@pytest.mark.parametrize(("arch", "memory"), SM12X)
def test_mxfp8_experts_are_refused_before_the_load(
    flags: dict[str, str], arch: str, memory: int, tmp_path: Path
) -> None:
    found = answer(arch, memory, model_config(tmp_path, "qwen3-moe-mxfp8"), **flags)
    assert re.match(rf"MXFP8 MoE is not supported on SM12x.*{CONVERT}=1", found), found


@pytest.mark.stock_failure(AssertionError, r"^accepted with (auto|flashinfer_trtllm)\b")
@pytest.mark.parametrize(
    ("target", "changes", "flags"),
    [
        ("qwen3-moe", {"quantization_config": MIXED}, {}),
        ("qwen3-moe", {}, {"quantization": "mxfp8"}),  # online
    ],
)
def test_so_are_other_ways_to_them(target: str, changes: dict[str, Any], flags: dict[str, str], tmp_path: Path) -> None:
    found = answer("sm120", RTX_PRO_6000, model_config(tmp_path, target, **changes), **flags)
    assert found.startswith("MXFP8 MoE is not supported on SM12x"), found


@pytest.mark.stock_failure(AssertionError, r"^accepted with (auto|flashinfer_trtllm|deep_gemm)\b")
@pytest.mark.parametrize(
    "flags",
    [{}, {"quantization": "mxfp8"}, {"quantization": "mxfp8", "moe_runner_backend": "deep_gemm"}],
)
def test_converted_to_block_fp8_they_run_on_triton(
    flags: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONVERT, "1")
    found = answer("sm120", RTX_PRO_6000, model_config(tmp_path, "qwen3-moe-mxfp8"), **flags)
    assert found == "accepted with triton", found


def test_there_is_nothing_to_convert_in_an_unquantized_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONVERT, "1")
    found = answer("sm120", RTX_PRO_6000, model_config(tmp_path, "qwen3-moe"), quantization="mxfp8")
    assert "Use --quantization fp8" in found


@pytest.mark.parametrize(
    ("target", "changes", "arch", "memory", "expected"),
    [
        ("qwen3-moe-mxfp8", {}, "sm100", B200, "flashinfer_trtllm"),
        ("llama-3.3-70b", {"quantization_config": MXFP8}, "sm120", RTX_PRO_6000, "auto"),  # dense: FlashInfer has it
        (
            "qwen3-moe",
            {"quantization_config": {**MXFP8, "ignore": ["lm_head", "model.layers.*.mlp.experts*"]}},
            "sm120",
            RTX_PRO_6000,
            "auto",
        ),
        ("qwen3-moe-fp8", {}, "sm120", RTX_PRO_6000, "auto"),
        ("qwen3-moe-nvfp4", {}, "sm120", RTX_PRO_6000, "flashinfer_cutlass"),
    ],
)
def test_nothing_else_is_refused(
    target: str, changes: dict[str, Any], arch: str, memory: int, expected: str, tmp_path: Path
) -> None:
    assert answer(arch, memory, model_config(tmp_path, target, **changes)) == f"accepted with {expected}"


def test_the_converted_experts_hold_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's conversion, on which the way out relies: 1x32 scales become 128x128 blocks."""
    with machine("sm120", RTX_PRO_6000):
        from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
        from sglang.srt.layers.quantization.mxfp8_block_convert import dequant_mxfp8_2d_to_bf16

        generator = torch.Generator().manual_seed(3)
        layer = SimpleNamespace()
        for name, shape in {"w13": (2, 256, 128), "w2": (2, 128, 128)}.items():
            weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
            scale = torch.randint(120, 128, (*shape[:-1], shape[-1] // 32), generator=generator, dtype=torch.uint8)
            setattr(layer, f"{name}_weight", torch.nn.Parameter(weight, requires_grad=False))
            setattr(layer, f"{name}_weight_scale_inv", torch.nn.Parameter(scale, requires_grad=False))
        before = dequant_mxfp8_2d_to_bf16(layer.w13_weight[0], layer.w13_weight_scale_inv[0]).float()
        method = Fp8MoEMethod(Fp8Config(is_checkpoint_fp8_serialized=True, use_mxfp8=True))
        method._convert_mxfp8_moe_to_block_fp8(layer)
    scale = layer.w13_weight_scale_inv[0].repeat_interleave(128, 0).repeat_interleave(128, 1)
    after = layer.w13_weight[0].float() * scale
    assert torch.allclose(after, before, rtol=2**-3, atol=float(before.abs().max()) / 448)
