"""NVFP4 experts with ``--moe-runner-backend auto``: a backend that the board has, prepared for and run alike."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patches.model_shapes import model_config
from tests.patches.resolver import B200, DGX_SPARK, RTX_PRO_6000, machine, resolve

NVFP4 = [
    "kimi-k2.5-nvfp4",
    "deepseek-v3-nvfp4",
    "deepseek-v3.2-nvfp4",
    "glm-4.6-nvfp4",
    "glm-5-nvfp4",
    "minimax-m2-nvfp4",
    "qwen3.5-nvfp4",
    "qwen3-moe-nvfp4",
]
MIXED = ["kimi-k2.5-mixed", "deepseek-v3-mixed", "glm-4.6-mixed", "glm-5-mixed", "qwen3.5-mixed"]
SM12X = [("sm120", RTX_PRO_6000), ("sm121", DGX_SPARK)]

# --------------------------------------------------------------------------------------------- server arguments


def backend(arch: str, memory: int, parent: Path, target: str, **flags: Any) -> str:
    return str(resolve(arch, memory, model_path=model_config(parent, target), tp_size=8, **flags).moe_runner_backend)


@pytest.mark.stock_failure(AssertionError, r"'auto' == 'flashinfer_cutlass'")
@pytest.mark.parametrize(("arch", "memory"), SM12X)
@pytest.mark.parametrize("target", NVFP4 + MIXED)
def test_sm12x_takes_cutlass_without_a_flag(target: str, arch: str, memory: int, tmp_path: Path) -> None:
    assert backend(arch, memory, tmp_path, target) == "flashinfer_cutlass"


@pytest.mark.stock_failure(AssertionError, r"'auto' == 'flashinfer_cutlass'")
@pytest.mark.parametrize("target", MIXED)
def test_sm12x_takes_cutlass_for_mixed_with_the_flag(target: str, tmp_path: Path) -> None:
    chosen = backend("sm120", RTX_PRO_6000, tmp_path, target, quantization="modelopt_mixed")
    assert chosen == "flashinfer_cutlass"


@pytest.mark.parametrize("target", NVFP4)
def test_sm12x_takes_cutlass_with_the_flag(target: str, tmp_path: Path) -> None:
    assert backend("sm120", RTX_PRO_6000, tmp_path, target, quantization="modelopt_fp4") == "flashinfer_cutlass"


@pytest.mark.stock_failure(AssertionError, r"'auto' == 'marlin'")
@pytest.mark.parametrize(
    ("target", "arch", "memory"),
    [
        ("glm-4.6-mixed-w4a16", "sm120", RTX_PRO_6000),
        ("qwen3.5-mixed-w4a16", "sm120", RTX_PRO_6000),
        ("glm-4.6-mixed-w4a16", "sm100", B200),
    ],
)
def test_experts_with_16_bit_activations_take_marlin(target: str, arch: str, memory: int, tmp_path: Path) -> None:
    assert backend(arch, memory, tmp_path, target) == "marlin"


@pytest.mark.stock_failure(AssertionError, r"'auto' == 'flashinfer_trtllm'")
def test_sm100_takes_trtllm_for_mixed_glm(tmp_path: Path) -> None:
    assert backend("sm100", B200, tmp_path, "glm-4.6-mixed") == "flashinfer_trtllm"


@pytest.mark.parametrize("target", [*NVFP4, *(name for name in MIXED if name != "glm-4.6-mixed")])
def test_other_choices_of_sm100_stay(target: str, tmp_path: Path) -> None:
    routed = target == "minimax-m2-nvfp4"
    assert backend("sm100", B200, tmp_path, target) == "flashinfer_trtllm" + "_routed" * routed


@pytest.mark.parametrize("target", ["kimi-k2.5-int4", "deepseek-v3", "glm-4.6", "glm-5-fp8", "minimax-m2", "qwen3.5"])
def test_other_checkpoints_stay_auto_on_sm120(target: str, tmp_path: Path) -> None:
    assert backend("sm120", RTX_PRO_6000, tmp_path, target) == "auto"


@pytest.mark.parametrize("explicit", ["marlin", "triton", "flashinfer_trtllm"])
def test_an_explicit_backend_wins(explicit: str, tmp_path: Path) -> None:
    assert backend("sm120", RTX_PRO_6000, tmp_path, "glm-4.6-nvfp4", moe_runner_backend=explicit) == explicit


def test_an_explicitly_unquantized_run_is_left_alone(tmp_path: Path) -> None:
    assert backend("sm120", RTX_PRO_6000, tmp_path, "qwen3-moe", quantization="unquant") == "auto"


# --------------------------------------------------------------------------------------------------- one layer

EXPERTS, HIDDEN, INTERMEDIATE, GROUP = 4, 128, 128, 16


class FusedMoE(torch.nn.Module):
    """What the method reads of a layer: one rank, ``EXPERTS`` gated experts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = self.num_local_experts = EXPERTS
        self.moe_ep_size = self.moe_tp_size = 1
        self.moe_ep_rank = self.moe_tp_rank = 0
        self.layer_id = 0
        self._mega_moe_nvfp4 = False
        self.trtllm_padded_hidden_size = None
        self.moe_runner_config = SimpleNamespace(
            activation="silu",
            is_gated=True,
            apply_router_weight_on_input=False,
            gemm1_alpha=None,
            gemm1_clamp_limit=None,
            swiglu_limit=None,
            num_experts=EXPERTS,
            intermediate_size_per_partition=INTERMEDIATE,
        )
        self.dispatcher = SimpleNamespace(set_quant_config=lambda _config: None)


class Runner:
    """Stands in for the kernels: tells which backend ran, and on what."""

    def __init__(self, backend: Any, _config: Any) -> None:
        self.backend = backend

    def run(self, _dispatched: Any, quant_info: Any) -> tuple[Any, Any]:
        return self.backend, quant_info


@pytest.fixture
def quantization(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the engine's module, its kernels stood in for and no backend chosen."""
    with machine("sm120", RTX_PRO_6000):
        from sglang.srt.layers.moe.utils import MoeRunnerBackend
        from sglang.srt.layers.quantization import modelopt_quant

    monkeypatch.setattr(modelopt_quant, "MoeRunner", Runner)
    monkeypatch.setattr(modelopt_quant, "get_moe_runner_backend", lambda: MoeRunnerBackend.AUTO)
    monkeypatch.setattr(modelopt_quant, "should_use_flashinfer_cutlass_moe_fp4_allgather", lambda: False)
    return modelopt_quant


def runner_of(method: Any, layer: Any) -> Any:
    """Return the backend that a layer runs; 0.5.22 has it as an attribute only."""
    ask = getattr(method, "get_moe_runner_backend", None)
    return ask(layer) if ask else method._moe_runner_backend


def nvfp4_config(quantization: ModuleType) -> Any:
    return quantization.ModelOptFp4Config(
        is_checkpoint_nvfp4_serialized=True, group_size=GROUP, exclude_modules=[], use_per_token_activation=False
    )


def build(quantization: ModuleType, config: Any) -> tuple[Any, FusedMoE]:
    """Create the weights of one layer with the engine's own method, and choose its runner."""
    method, layer = quantization.ModelOptNvFp4FusedMoEMethod(config), FusedMoE()
    method.create_weights(layer, EXPERTS, HIDDEN, INTERMEDIATE, torch.bfloat16, weight_loader=lambda *_a, **_k: None)
    method.create_moe_runner(layer, layer.moe_runner_config)
    return method, layer


@pytest.mark.stock_failure(AttributeError, r"'FusedMoE' object has no attribute 'g1_scale_c'")
@pytest.mark.parametrize(("arch", "memory"), SM12X)
def test_the_layer_runs_what_it_was_prepared_for(arch: str, memory: int, quantization: ModuleType) -> None:
    with machine(arch, memory):
        method, layer = build(quantization, nvfp4_config(quantization))
        for parameter in layer.parameters():
            parameter.data.fill_(1)
        method.process_weights_after_loading(layer)
        backend, info = method.apply(layer, SimpleNamespace())
    assert backend.is_flashinfer_cutlass()
    assert backend is runner_of(method, layer)
    assert info.quant_type == "fp4"
    assert info.quant_scales[1] is layer.w13_blockscale_swizzled
    assert method.load_up_proj_weight_first


@pytest.mark.stock_failure(AssertionError, r"prepared for trtllm: False, run by flashinfer_trtllm")
def test_so_does_the_layer_on_sm100(quantization: ModuleType) -> None:
    with machine("sm100", B200):
        method, layer = build(quantization, nvfp4_config(quantization))
    prepared, runner = method.enable_flashinfer_trtllm_moe, runner_of(method, layer)
    assert prepared == runner.is_flashinfer_trtllm(), f"prepared for trtllm: {prepared}, run by {runner.value}"


@pytest.mark.stock_failure(AssertionError, r"run by flashinfer_trtllm")
@pytest.mark.parametrize(("arch", "memory"), [*SM12X, ("sm100", B200)])
def test_a_layer_of_w4a16_experts_runs_marlin(arch: str, memory: int, quantization: ModuleType) -> None:
    mixed = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": GROUP}},
        "ignore": [],
    }
    config = quantization.ModelOptMixedPrecisionConfig.from_config(mixed)
    with machine(arch, memory):
        method, layer = build(quantization, config.nvfp4a16_config)
    runner = runner_of(method, layer)
    assert runner.is_marlin(), f"run by {runner.value}"
