"""TRT-LLM attention on SM12x: what has no kernel there is replaced or refused before the weights are loaded."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patches.model_shapes import model_config, modelopt_nvfp4, write_hf_quant_config
from tests.patches.resolver import B200, DGX_SPARK, RTX_PRO_6000, machine, resolve

SM12X = [("sm120", RTX_PRO_6000), ("sm121", DGX_SPARK)]


def backends(arch: str, memory: int, parent: Path, target: str, **flags: Any) -> tuple[str, str]:
    """Return the (prefill, decode) attention backends of a resolved launch."""
    view = resolve(arch, memory, **{"model_path": model_config(parent, target), "tp_size": 8, **flags})
    return (
        view.prefill_attention_backend or view.attention_backend,
        view.decode_attention_backend or view.attention_backend,
    )


def answer(arch: str, memory: int, parent: Path, target: str, **flags: Any) -> str:
    """Return the refusal of a launch, or which backends it is accepted with."""
    try:
        prefill, decode = backends(arch, memory, parent, target, **flags)
    except ValueError as refusal:
        return str(refusal)
    return f"accepted: prefill on {prefill}, decode on {decode}"


# -------------------------------------------------------------------------------------------------- trtllm_mla

ALL_HEADS = {"attn_dp_size": 8}  # attention DP leaves each rank the 128 heads that XQA takes


@pytest.mark.stock_failure(AssertionError, r"prefill runs trtllm_mla")
@pytest.mark.parametrize(
    "flags",
    [
        {"attention_backend": "trtllm_mla"},
        {"attention_backend": "trtllm_mla", "kv_cache_dtype": "fp8_e4m3"},
        {"attention_backend": "trtllm_mla", "decode_attention_backend": "triton"},
    ],
)
@pytest.mark.parametrize(("arch", "memory"), SM12X)
def test_prefill_goes_to_a_backend_that_exists(flags: dict[str, str], arch: str, memory: int, tmp_path: Path) -> None:
    prefill, decode = backends(arch, memory, tmp_path, "deepseek-v3", **flags, **ALL_HEADS)
    assert prefill == "triton", f"prefill runs {prefill}"
    assert decode == flags.get("decode_attention_backend", "trtllm_mla")


@pytest.mark.stock_failure(AssertionError, r"^accepted: prefill on trtllm_mla, decode on (trtllm_mla|triton)")
@pytest.mark.parametrize(
    ("target", "flags", "text"),
    [
        ("deepseek-v3", {"prefill_attention_backend": "trtllm_mla"}, r"prefill kernel .* does not support SM12x"),
        ("deepseek-v3", {"attention_backend": "trtllm_mla"}, r"requires 128 query heads per rank, got 16"),
        ("kimi-k2.5-int4", {"attention_backend": "trtllm_mla", **ALL_HEADS}, r"128 query heads per rank, got 64"),
        (
            "deepseek-v3",
            {
                "attention_backend": "trtllm_mla",
                "speculative_algorithm": "NEXTN",
                "speculative_attention_mode": "decode",
                **ALL_HEADS,
            },
            r"cannot verify drafts",
        ),
    ],
)
def test_what_cannot_run_is_refused(target: str, flags: dict[str, Any], text: str, tmp_path: Path) -> None:
    found = answer("sm120", RTX_PRO_6000, tmp_path, target, **flags)
    assert re.search(text, found), found


def test_split_backends_are_left_alone(tmp_path: Path) -> None:
    flags = {"prefill_attention_backend": "flashinfer", "decode_attention_backend": "trtllm_mla", **ALL_HEADS}
    assert backends("sm120", RTX_PRO_6000, tmp_path, "deepseek-v3", **flags) == ("flashinfer", "trtllm_mla")


@pytest.mark.parametrize("target", ["deepseek-v3", "kimi-k2.5-int4"])
def test_sm100_runs_both_phases(target: str, tmp_path: Path) -> None:
    assert backends("sm100", B200, tmp_path, target) == ("trtllm_mla", "trtllm_mla")


class FlashInfer:
    """Says what FlashInfer's dense MLA decode says about a counter buffer: only trtllm-gen takes it."""

    def __init__(self, capability: int) -> None:
        self.decode = SimpleNamespace(trtllm_batch_decode_with_kv_cache_mla=self._decode)
        self._backend = "trtllm-gen" if capability == 10 else "xqa"
        self.calls: list[dict[str, Any]] = []

    def _decode(self, **arguments: Any) -> torch.Tensor:
        if self._backend == "xqa" and arguments.get("multi_ctas_kv_counter_buffer") is not None:
            raise ValueError("multi_ctas_kv_counter_buffer is only supported by the trtllm-gen backend")
        self.calls.append(arguments)
        return torch.empty(0)


def decode_once(arch: str, memory: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the backend's own decode step once on ``arch`` and return what it asked FlashInfer for."""
    with machine(arch, memory):
        from sglang.srt.layers.attention import trtllm_mla_backend as module

        flashinfer = FlashInfer(10 if arch == "sm100" else 12)
        monkeypatch.setattr(module, "flashinfer", flashinfer, raising=False)
        monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(dcp_enabled=False))
        backend = SimpleNamespace(
            backend="trtllm-gen",
            qk_nope_head_dim=128,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            device="cpu",
            num_decode_q_heads=128,
            workspace_buffer=torch.zeros(1),
            _multi_ctas_kv_counter_buffer=torch.zeros(1),
            _compute_decode_bmm1_scale=lambda _layer: 1.0,
        )
        lengths = torch.ones(1, dtype=torch.int32)
        query, pages = torch.zeros(1, 1, 128, 576), torch.zeros(1, 1, 64, 576)
        module.TRTLLMMLABackend._run_decode_kernel(backend, query, pages, torch.zeros(1, 1), lengths, 64, None)
        return flashinfer.calls[0]


@pytest.mark.stock_failure(ValueError, r"multi_ctas_kv_counter_buffer is only supported by the trtllm-gen backend")
def test_decode_asks_xqa_for_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "multi_ctas_kv_counter_buffer" not in decode_once("sm120", RTX_PRO_6000, monkeypatch)


def test_decode_on_sm100_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "multi_ctas_kv_counter_buffer" in decode_once("sm100", B200, monkeypatch)


# -------------------------------------------------------------------------------------------------- trtllm_mha

FP8_KV_REFUSED = "TRTLLM FMHAv2 prefill on SM120 does not support fp8_e4m3 KV cache"
MHA = {"attention_backend": "trtllm_mha"}


@pytest.mark.stock_failure(AssertionError, r"^accepted: prefill on trtllm_mha")
@pytest.mark.parametrize("target", ["glm-4.6-nvfp4", "glm-4.6-mixed", "minimax-m2-nvfp4", "qwen3-moe-nvfp4"])
@pytest.mark.parametrize(("arch", "memory"), SM12X)
def test_fp8_kv_declared_by_the_checkpoint_meets_the_guard(target: str, arch: str, memory: int, tmp_path: Path) -> None:
    found = answer(arch, memory, tmp_path, target, **MHA)
    assert FP8_KV_REFUSED in found, found


@pytest.mark.stock_failure(AssertionError, r"^accepted: prefill on trtllm_mha")
def test_so_does_one_declared_beside_the_config(tmp_path: Path) -> None:
    target = model_config(tmp_path, "glm-4.6")
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    write_hf_quant_config(target, quantization | {"kv_cache_quant_algo": "FP8"})
    found = answer("sm120", RTX_PRO_6000, tmp_path, "glm-4.6", model_path=target, **MHA)
    assert FP8_KV_REFUSED in found, found


def test_the_explicit_flag_is_refused_as_before(tmp_path: Path) -> None:
    assert FP8_KV_REFUSED in answer("sm120", RTX_PRO_6000, tmp_path, "glm-4.6", kv_cache_dtype="fp8_e4m3", **MHA)


@pytest.mark.parametrize("flags", [{"kv_cache_dtype": "bf16"}, {"prefill_attention_backend": "flashinfer"}])
def test_a_way_around_is_open(flags: dict[str, str], tmp_path: Path) -> None:
    assert backends("sm120", RTX_PRO_6000, tmp_path, "glm-4.6-nvfp4", **MHA, **flags)[1] == "trtllm_mha"


@pytest.mark.parametrize(
    ("target", "changes"), [("glm-4.6", {}), ("glm-4.6-nvfp4", {"quantization_config": modelopt_nvfp4(fp8_kv=False)})]
)
def test_a_checkpoint_without_fp8_kv_is_not_refused(target: str, changes: dict[str, Any], tmp_path: Path) -> None:
    view = resolve("sm120", RTX_PRO_6000, model_path=model_config(tmp_path, target, **changes), tp_size=8, **MHA)
    assert view.attention_backend == "trtllm_mha"


def test_sm100_reads_fp8_kv(tmp_path: Path) -> None:
    assert backends("sm100", B200, tmp_path, "glm-4.6-nvfp4", **MHA) == ("trtllm_mha", "trtllm_mha")
