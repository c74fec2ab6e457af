"""A draft is quantized as its own checkpoint says, not as the target's flag."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.patches.engine_059 import machine, resolve
from tests.patches.model_shapes import FP8_BLOCK, Config, model_config, write_hf_quant_config
from tests.patches.resolver import RTX_PRO_6000

AWQ: Config = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ: Config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FLAGS: dict[str, Config | None] = {
    "awq": AWQ,
    "gptq": GPTQ,
    "fp8": None,  # of a bf16 checkpoint, while it is loaded
}


def draft_quantization(parent: Path, flag: str, draft: str, **flags: Any) -> str | None:
    """Return how the draft worker would load ``draft`` beside a target loaded with ``--quantization flag``."""
    target = model_config(parent, "qwen3-moe", **({"quantization_config": FLAGS[flag]} if FLAGS[flag] else {}))
    args = resolve(
        "sm120",
        RTX_PRO_6000,
        model_path=target,
        tp_size=8,
        quantization=flag,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=draft,
        **flags,
    )
    with machine("sm120", RTX_PRO_6000):
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_loader.weight_utils import get_quant_config

        config = ModelConfig.from_server_args(args, model_path=draft, is_draft_model=True)
        if config.quantization is not None:
            get_quant_config(config, LoadConfig(), {})
        return str(config.quantization) if config.quantization else None


@pytest.mark.parametrize(
    "flag",
    [
        pytest.param("awq", marks=pytest.mark.stock_failure(ValueError, r"Cannot find the config file for awq")),
        pytest.param("gptq", marks=pytest.mark.stock_failure(ValueError, r"Cannot find the config file for gptq")),
    ],
)
def test_a_draft_without_quantization_loads_beside_a_quantized_target(flag: str, tmp_path: Path) -> None:
    assert draft_quantization(tmp_path, flag, model_config(tmp_path, "eagle3-4096")) is None


@pytest.mark.stock_failure(AssertionError, r"the draft is loaded as fp8")
def test_a_draft_is_not_quantized_online_unasked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = draft_quantization(tmp_path, "fp8", model_config(tmp_path, "eagle3-4096"))
    assert found is None, f"the draft is loaded as {found}"
    assert "--speculative-draft-model-quantization fp8" in caplog.text


@pytest.mark.parametrize("flag", list(FLAGS))
def test_the_drafts_config_decides(flag: str, tmp_path: Path) -> None:
    draft = model_config(tmp_path, "eagle3-4096", quantization_config=FP8_BLOCK)
    assert draft_quantization(tmp_path, flag, draft) == "fp8"


@pytest.mark.parametrize(("algorithm", "expected"), [("NVFP4", "modelopt_fp4"), ("FP8", "modelopt_fp8")])
def test_so_does_its_hf_quant_config(algorithm: str, expected: str, tmp_path: Path) -> None:
    draft = model_config(tmp_path, "eagle3-4096")
    write_hf_quant_config(draft, {"quant_algo": algorithm, "group_size": 16, "exclude_modules": ["lm_head"]})
    assert draft_quantization(tmp_path, "awq", draft) == expected


def test_an_explicit_flag_wins(tmp_path: Path) -> None:
    draft = model_config(tmp_path, "eagle3-4096")
    fp8, unquantized = ({"speculative_draft_model_quantization": value} for value in ("fp8", "unquant"))
    assert draft_quantization(tmp_path / "4 bits", "awq", draft, **fp8) == "fp8"
    assert draft_quantization(tmp_path / "8 bits", "fp8", draft, **unquantized) is None


@pytest.mark.parametrize("spelling", [None, "{}", "{}/", "{}/../glm-4.6"])
def test_layers_of_the_targets_checkpoint_stay_with_it(spelling: str | None, tmp_path: Path) -> None:
    target = model_config(tmp_path, "glm-4.6")
    args = resolve(
        "sm120",
        RTX_PRO_6000,
        model_path=target,
        tp_size=8,
        quantization="fp8",
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=spelling and spelling.format(target),
    )
    assert args.speculative_draft_model_quantization == "fp8"


def test_formats_that_are_loaded_by_flag_are_shared(tmp_path: Path) -> None:
    args = resolve(
        "sm120",
        RTX_PRO_6000,
        model_path=model_config(tmp_path, "llama-3.3-70b"),
        quantization="bitsandbytes",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=model_config(tmp_path, "eagle3-8192"),
    )
    assert args.speculative_draft_model_quantization == "bitsandbytes"
