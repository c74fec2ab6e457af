"""Kimi-K2.5 of 0.5.9, tiny and without its vision tower."""

from __future__ import annotations

from tests.patches import moe_models


def kimi_k25() -> moe_models.Built:
    """Return the model class and a configuration for :func:`moe_models.build`."""
    from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration

    return KimiK25ForConditionalGeneration, moe_models.around(deepseek_v3)


def deepseek_v3() -> moe_models.Built:
    """Return the language model's class and a configuration."""
    from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM

    config = moe_models.deepseek_v2()[1]
    config.architectures = ["DeepseekV3ForCausalLM"]
    return DeepseekV3ForCausalLM, config
