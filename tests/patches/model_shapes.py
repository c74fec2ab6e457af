"""Published shapes of large checkpoints, written as the files that the engine reads before it loads any weight.

The numbers are those of the models' own ``config.json`` files; there are no weights. ``model_config(folder, name)``
writes one and returns its path.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]


def model_config(parent: Path, name: str, **changes: Any) -> str:
    """Write the checkpoint ``name`` below ``parent``, its ``config.json`` changed by ``changes``; return its path.

    A name is a key of ``TARGETS`` or ``DRAFTS``, or ``eagle3-N``: a Llama-like EAGLE-3 draft of hidden size N.
    """
    folder = parent / name
    folder.mkdir(parents=True, exist_ok=True)
    if name.startswith("eagle3-"):
        config = eagle3_draft(int(name.removeprefix("eagle3-")))
    else:
        config = {**TARGETS, **DRAFTS}[name]
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


def write_hf_quant_config(folder: str, quantization: Config) -> None:
    """Put the ``hf_quant_config.json`` that ModelOpt exports beside a ``config.json``."""
    document = {"producer": {"name": "modelopt", "version": "0.40.0"}, "quantization": quantization}
    (Path(folder) / "hf_quant_config.json").write_text(json.dumps(document))


# ------------------------------------------------------------------------------------------------ quantizations

FP8_BLOCK: Config = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}

# Four-bit integers, 32 to a scale, in the routed experts only.
INT4_EXPERTS: Config = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "group_size": 32,
                "strategy": "group",
                "symmetric": True,
                "dynamic": False,
                "observer": "minmax",
            },
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}

_FP4 = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
FP8_KV: Config = {"num_bits": 8, "type": "float", "dynamic": False}


def modelopt_nvfp4(*, fp8_kv: bool = True) -> Config:
    """Return what ModelOpt writes for an NVFP4 checkpoint, and whether its KV cache is declared FP8."""
    config = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "producer": {"name": "modelopt", "version": "0.40.0"},
        "config_groups": {"group_0": {"weights": _FP4, "input_activations": _FP4, "targets": ["Linear"]}},
        "ignore": ["lm_head", "*self_attn*"],
    }
    return {**config, "kv_cache_scheme": FP8_KV} if fp8_kv else config


def modelopt_mixed(experts: str = "NVFP4") -> Config:
    """Return what ModelOpt writes for experts in ``experts`` and attention in FP8."""
    expert = {"quant_algo": experts, "group_size": 16}
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "producer": {"name": "modelopt", "version": "0.40.0"},
        "kv_cache_scheme": FP8_KV,
        "quantized_layers": {
            "model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
            "model.layers.3.mlp.experts.0.gate_proj": expert,
            "model.layers.3.mlp.experts.0.up_proj": expert,
            "model.layers.3.mlp.experts.0.down_proj": expert,
        },
        "ignore": ["lm_head"],
    }


MXFP8: Config = {
    "quant_method": "modelopt",
    "quant_algo": "MXFP8",
    "group_size": 32,
    "producer": {"name": "modelopt", "version": "0.40.0"},
    "ignore": ["lm_head"],
}

# ------------------------------------------------------------------------------------------------------ targets

_COMMON: Config = {
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}
_DEEPSEEK: Config = {
    **_COMMON,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_bias": False,
}
DEEPSEEK_V3: Config = {
    **_DEEPSEEK,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "quantization_config": FP8_BLOCK,
}
DEEPSEEK_V32: Config = {
    **DEEPSEEK_V3,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
DEEPSEEK_V4: Config = {
    **_COMMON,
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "max_position_embeddings": 1048576,
    "quantization_config": {**FP8_BLOCK, "scale_fmt": "ue8m0"},
}
_KIMI_TEXT: Config = {
    **_DEEPSEEK,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "rope_theta": 50000,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_KIMI: Config = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "media_placeholder_token_id": 163605,
    "vision_config": {
        "model_type": "kimi_k25",
        "patch_size": 14,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "mm_hidden_size": 1152,
        "text_hidden_size": 7168,
    },
}
_GLM4: Config = {
    **_COMMON,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 5120,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
    "vocab_size": 151552,
    "max_position_embeddings": 202752,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-5,
}
_GLM5: Config = {
    **_COMMON,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 64,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "num_nextn_predict_layers": 1,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "rms_norm_eps": 1e-5,
}
_MINIMAX: Config = {
    **_COMMON,
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "hidden_size": 3072,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rotary_dim": 64,
    "intermediate_size": 1536,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "vocab_size": 200064,
    "max_position_embeddings": 196608,
    "rope_theta": 5000000,
}
_QWEN35_LAYERS = 60
_QWEN35: Config = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "text_config": {
        **_COMMON,
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 4096,
        "num_hidden_layers": _QWEN35_LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
        * (_QWEN35_LAYERS // 4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "mamba_ssm_dtype": "float32",
        "attn_output_gate": True,
        "mtp_num_hidden_layers": 1,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    },
    "vision_config": {
        "model_type": "qwen3_5_moe",
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "in_channels": 3,
        "deepstack_visual_indexes": [],
    },
}
_QWEN3_MOE: Config = {
    **_COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
}
_LLAMA: Config = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000,
}


def _quantized(config: Config, quantization: Config) -> Config:
    return {**config, "quantization_config": quantization}


TARGETS: dict[str, Config] = {
    "kimi-k2.5-int4": {**_KIMI, "text_config": _quantized(_KIMI_TEXT, INT4_EXPERTS)},
    "kimi-k2.5-nvfp4": {**_quantized(_KIMI, modelopt_nvfp4()), "text_config": _KIMI_TEXT},
    "kimi-k2.5-mixed": {**_quantized(_KIMI, modelopt_mixed()), "text_config": _KIMI_TEXT},
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3-nvfp4": _quantized(DEEPSEEK_V3, modelopt_nvfp4()),
    "deepseek-v3-mixed": _quantized(DEEPSEEK_V3, modelopt_mixed()),
    "deepseek-v3.2": DEEPSEEK_V32,
    "deepseek-v3.2-nvfp4": _quantized(DEEPSEEK_V32, modelopt_nvfp4()),
    "deepseek-v4": DEEPSEEK_V4,
    "glm-4.6": _GLM4,
    "glm-4.6-nvfp4": _quantized(_GLM4, modelopt_nvfp4()),
    "glm-4.6-mixed": _quantized(_GLM4, modelopt_mixed()),
    "glm-4.6-mixed-w4a16": _quantized(_GLM4, modelopt_mixed("W4A16_NVFP4")),
    "glm-5": _GLM5,
    "glm-5-fp8": _quantized(_GLM5, FP8_BLOCK),
    "glm-5-nvfp4": _quantized(_GLM5, modelopt_nvfp4()),
    "glm-5-mixed": _quantized(_GLM5, modelopt_mixed()),
    "minimax-m2": _quantized(_MINIMAX, FP8_BLOCK),
    "minimax-m2-nvfp4": _quantized(_MINIMAX, modelopt_nvfp4()),
    "qwen3.5": _QWEN35,
    "qwen3.5-nvfp4": _quantized(_QWEN35, modelopt_nvfp4()),
    "qwen3.5-mixed": _quantized(_QWEN35, modelopt_mixed()),
    "qwen3.5-mixed-w4a16": _quantized(_QWEN35, modelopt_mixed("W4A16_NVFP4")),
    "qwen3-moe": _QWEN3_MOE,
    "qwen3-moe-fp8": _quantized(_QWEN3_MOE, FP8_BLOCK),
    "qwen3-moe-nvfp4": _quantized(_QWEN3_MOE, modelopt_nvfp4()),
    "qwen3-moe-mxfp8": _quantized(_QWEN3_MOE, MXFP8),
    "llama-3.3-70b": _LLAMA,
    "llama-3.3-70b-nvfp4": _quantized(_LLAMA, modelopt_nvfp4()),
}

# ------------------------------------------------------------------------------------------------------- drafts

# hidden size of the target -> (attention heads, KV heads, intermediate size, target's vocabulary)
_EAGLE3 = {
    3072: (24, 8, 8192, 200064),  # MiniMax-M2
    4096: (32, 8, 14336, 151936),  # Qwen3, Qwen3.5
    5120: (40, 8, 12288, 151552),  # GLM-4.x
    6144: (48, 8, 16384, 154880),  # GLM-5.x
    7168: (64, 64, 18432, 163840),  # Kimi-K2.x, DeepSeek-V3: as many KV heads as heads
    8192: (64, 8, 28672, 128256),  # Llama-3.3-70B
}


def eagle3_draft(hidden_size: int) -> Config:
    """Return the one-layer Llama-like EAGLE-3 draft (MHA or GQA attention) for targets of ``hidden_size``."""
    heads, kv_heads, intermediate, vocabulary = _EAGLE3[hidden_size]
    return {
        **_COMMON,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "draft_vocab_size": 32000,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
    }


DRAFTS: dict[str, Config] = {
    # An EAGLE-3 draft of Kimi-K2.5 with the target's own latent attention.
    "kimi-eagle3-mla": {
        **_KIMI_TEXT,
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 163840,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]},
    },
    # Earlier EAGLE: no `fc` over three layers, the target's own vocabulary.
    "eagle-llama": {
        **_LLAMA,
        "architectures": ["LlamaForCausalLMEagle"],
        "num_hidden_layers": 1,
    },
}
