"""Tiny mixture-of-experts models of the families that the series touches, built by the engine's own classes.

Each builder returns ``(model class, configuration)``; :func:`build` makes the model. Layer 0 is dense wherever the
family has dense layers. Call inside :func:`tests.patches.tiny_engine.tiny_engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

EXPERTS = 4
LAYERS = 3

_COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1e4,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_MLA = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
_YARN = {
    "rope_type": "deepseek_yarn",
    "rope_theta": 1e4,
    "factor": 1.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_GROUPED = {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
Built = tuple[type, Any]


def _config(**values: Any) -> Any:
    from transformers import PretrainedConfig

    return PretrainedConfig(**(_COMMON | values))


def minimax_m2() -> Built:
    from sglang.srt.models.minimax_m2 import MiniMaxM2ForCausalLM

    return MiniMaxM2ForCausalLM, _config(
        num_local_experts=EXPERTS, scoring_func="sigmoid", rotary_dim=32, use_qk_norm=True
    )


def minimax_m3() -> Built:
    from sglang.srt.models.minimax_m3 import MiniMaxM3SparseForCausalLM

    return MiniMaxM3SparseForCausalLM, _config(
        num_local_experts=EXPERTS,
        scoring_func="sigmoid",
        rotary_dim=32,
        n_shared_experts=1,
        swiglu_alpha=1.0,
        swiglu_limit=7.0,
        dense_intermediate_size=64,
        moe_layer_freq=[0, 1, 1],
        qk_norm_type="per_head",
        use_qk_norm=True,
    )


def minimax_m3_vl() -> Built:
    """The wrapper around the language model, without a vision tower."""
    from sglang.srt.models.minimax_m3 import MiniMaxM3Model
    from sglang.srt.models.minimax_m3_vl import MiniMaxM3SparseForConditionalGeneration

    text = minimax_m3()[1]
    return MiniMaxM3SparseForConditionalGeneration, wrapper(text, model=lambda: MiniMaxM3Model(text))


def glm4_moe() -> Built:
    from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM

    return Glm4MoeForCausalLM, _config(partial_rotary_factor=0.5, use_qk_norm=True, **_GROUPED)


def qwen2_moe() -> Built:
    from sglang.srt.models.qwen2_moe import Qwen2MoeForCausalLM

    return Qwen2MoeForCausalLM, _config(
        num_experts=EXPERTS,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        mlp_only_layers=[0],
        qkv_bias=True,
    )


def qwen3_moe() -> Built:
    from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

    config = _config(num_experts=EXPERTS, decoder_sparse_step=1, mlp_only_layers=[0])
    config.architectures = ["Qwen3MoeForCausalLM"]
    return Qwen3MoeForCausalLM, config


def qwen3_vl_moe() -> Built:
    from sglang.srt.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

    return Qwen3VLMoeForConditionalGeneration, _language_model_only(qwen3_moe()[1])


def qwen4_exp() -> Built:
    from sglang.srt.configs.qwen4_exp import Qwen4ExpTextConfig
    from sglang.srt.models.qwen4_exp import Qwen4ExpForConditionalGeneration

    own = {"num_experts": EXPERTS, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1}
    attention = {"layer_types": ["full_attention"] * LAYERS, "full_attention_interval": 1, "hc_lowrank": 16}
    text = Qwen4ExpTextConfig(**(_COMMON | own | attention))
    text.rope_scaling = text.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    return Qwen4ExpForConditionalGeneration, _language_model_only(text)


def deepseek_v2() -> Built:
    from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM

    routing = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    rope = {"rope_parameters": _YARN, "rope_scaling": _YARN}
    return DeepseekV2ForCausalLM, _config(**(_GROUPED | _MLA | routing | rope))


def kimi_linear() -> Built:
    from sglang.srt.configs.kimi_linear import KimiLinearConfig
    from sglang.srt.models.kimi_linear import KimiLinearForCausalLM

    own = {
        "num_experts": EXPERTS,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "mla_use_nope": True,
        "rope_scaling": None,
        "rope_parameters": None,
        "linear_attn_config": {
            "kda_layers": [1, 2],
            "full_attn_layers": [3],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
    }
    values = {key: value for key, value in (_COMMON | _MLA | own).items() if key != "num_experts_per_tok"}
    return KimiLinearForCausalLM, KimiLinearConfig(**values)


def kimi_k3_linear() -> Built:
    from sglang.srt.models.kimi_k3 import KimiK3LinearForCausalLM

    return KimiK3LinearForCausalLM, kimi_linear()[1]


def kimi_k3() -> Built:
    from sglang.srt.models.kimi_k3 import KimiK3ForConditionalGeneration

    return KimiK3ForConditionalGeneration, around(kimi_k3_linear)


def kimi_vl() -> Built:
    from sglang.srt.models.kimi_vl import KimiVLForConditionalGeneration

    return KimiVLForConditionalGeneration, around(deepseek_v2)


def glm4v_moe() -> Built:
    from sglang.srt.models.glm4_moe import Glm4MoeModel
    from sglang.srt.models.glm4v_moe import Glm4vMoeForConditionalGeneration

    config = glm4_moe()[1]
    config.parts = {"model": lambda: Glm4MoeModel(config)}
    return Glm4vMoeForConditionalGeneration, config


def intern_vl() -> Built:
    from sglang.srt.models.internvl import InternVLChatModel

    return InternVLChatModel, around(qwen3_moe)


def intern_s1() -> Built:
    from sglang.srt.models.interns1 import InternS1ForConditionalGeneration

    return InternS1ForConditionalGeneration, around(qwen3_moe)


def qwen3_omni_moe() -> Built:
    """The thinker without its towers; the talker is never built."""
    from sglang.srt.models.qwen3_omni_moe import Qwen3OmniMoeForConditionalGeneration
    from transformers import PretrainedConfig

    vl_class, thinker = qwen3_vl_moe()
    config = PretrainedConfig()
    config.thinker_config = thinker
    config.parts = {"thinker": lambda: vl_class(thinker)}
    return Qwen3OmniMoeForConditionalGeneration, config


def pixtral() -> Built:
    """Mistral Large 3."""
    from sglang.srt.models.pixtral import PixtralForConditionalGeneration

    config = around(deepseek_v2)
    config.text_config.model_type = "deepseek_v3"
    return PixtralForConditionalGeneration, config


def hunyuan_v3() -> Built:
    from sglang.srt.models.hunyuan_v3 import HYV3ForCausalLM

    own = {"num_experts": EXPERTS, "num_shared_experts": 1, "first_k_dense_replace": 1, "route_norm": True}
    return HYV3ForCausalLM, _config(qk_norm=True, **own)


def hunyuan_v4() -> Built:
    from sglang.srt.configs.hy_v4 import HYV4Config
    from sglang.srt.models.hunyuan_v4 import HYV4ForCausalLM

    own = {"q_lora_rank": 32, "index_topk": 64, "index_head_dim": 128, "index_n_heads": 2, "n_routed_experts": EXPERTS}
    values = _COMMON | _MLA | own | {"rope_parameters": _YARN}
    return HYV4ForCausalLM, HYV4Config(**{key: value for key, value in values.items() if key != "head_dim"})


def around(make: Callable[[], Built]) -> Any:
    """Return the configuration of a wrapper whose language model is made by ``make``."""
    model_class, text = make()
    return wrapper(text, language_model=lambda: model_class(text))


def _language_model_only(text: Any) -> Any:
    from transformers import PretrainedConfig

    config = PretrainedConfig(text_config=text, language_model_only=True, tie_word_embeddings=False)
    config.vision_config = SimpleNamespace(deepstack_visual_indexes=[])
    return config


def wrapper(text: Any, **parts: Callable[[], Any]) -> Any:
    """Return a wrapper's configuration; :func:`build` makes ``parts`` instead of running the constructor."""
    from transformers import PretrainedConfig

    config = PretrainedConfig()
    config.text_config = config.llm_config = text
    config.parts = parts
    return config


def build(model_class: type, config: Any) -> Any:
    """Build a model; of a wrapper only its language model."""
    if not hasattr(config, "parts"):
        return model_class(config)
    model = model_class.__new__(model_class)
    nn.Module.__init__(model)
    vars(model)["config"] = config
    for name, make in config.parts.items():
        setattr(model, name, make())
    return model


def expert_layers(model: nn.Module) -> dict[int, Any]:
    """Return the routed-experts modules by layer id."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return {module.layer_id: module for module in model.modules() if isinstance(module, FusedMoE)}


def number_the_experts(model: nn.Module, physical_to_logical: torch.Tensor) -> None:
    """Fill each expert's weights with its logical number, plus 100 times its layer."""
    for layer_id, experts in expert_layers(model).items():
        for weight in (experts.w13_weight, experts.w2_weight):
            for slot, logical in enumerate(physical_to_logical[layer_id].tolist()):
                weight.data[slot].fill_(100 * layer_id + logical)


def experts_in_slots(model: nn.Module, layer_id: int) -> list[int]:
    """Return the logical numbers found in a layer's slots; every value of a slot must be the same."""
    found = []
    for slot in range(expert_layers(model)[layer_id].w13_weight.shape[0]):
        values = torch.cat(
            [getattr(expert_layers(model)[layer_id], name).data[slot].flatten() for name in ("w13_weight", "w2_weight")]
        )
        assert values.unique().numel() == 1, f"slot {slot} of layer {layer_id} mixes experts"
        found.append(int(values[0]) - 100 * layer_id)
    return found
