"""Read a model's ``config.json`` into a ``ModelShape``. Field names are those of the published models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sglang_bw.errors import UnknownConfigError
from sglang_bw.plan.fields import Fields
from sglang_bw.plan.quantization import read_quantization
from sglang_bw.plan.shapes import Attention, Experts, Indexer, Latent, LinearState, ModelShape, Vision, Window

# The engine keeps a pool of their own for sliding layers of these architectures only (configs/model_config.py);
# for every other one a sliding layer costs what a full one does.
_WINDOW_POOLS = (
    "GptOss", "GraniteSWA", "GraniteMoeSWA", "Llama4", "MiMoV2", "Step3p5", "Step3p7", "Gemma4", "Laguna", "Mellum",
)  # fmt: skip
_DTYPES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
_MOST_SCALED = 1024


def read_shape(config: Mapping[str, Any], *, origin: str = "config.json") -> ModelShape:
    """Read a configuration.

    :param origin: the file's name, for messages.
    :raises UnknownConfigError: fields are missing, no numbers, or contradict each other; names every finding.
    """
    findings: list[str] = []
    root = Fields(config, findings)
    text = root.part("text_config", "llm_config", "language_config", "thinker_config") or root
    text = text.part("text_config") or text
    architecture = next(iter(root.texts("architectures") or text.texts("architectures")), "")
    if not architecture:
        findings.append("architectures is missing")
    shape = _read(architecture, root, text)
    if findings:
        raise UnknownConfigError(
            "\n".join(
                [f"{origin} does not describe a model that can be planned:", *(f"  {text}" for text in findings)]
            ),
            hint="Is it the config.json of the model, and not that of an adapter or a GGUF file?",
        )
    return shape


def _read(architecture: str, root: Fields, text: Fields) -> ModelShape:
    layers = text.number("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    layers = min(layers, 10_000)
    hidden = text.number("hidden_size", "n_embd", "d_model")
    heads = text.number("num_attention_heads", "n_head", "n_heads")
    head_dim = text.number("head_dim", default=max(1, hidden // heads))
    latent = _latent(text)
    linear = _linear(text)
    attention = _attention(architecture, text, layers, linear)
    window = _window(text, heads, head_dim) if "window" in attention else None
    vision = _vision(root)
    return ModelShape(
        architecture=architecture,
        model_type=str(text.any("model_type") or root.any("model_type") or ""),
        hidden=hidden,
        vocab=text.number("vocab_size"),
        heads=heads,
        kv_heads=text.number("num_key_value_heads", "num_kv_heads", "multi_query_group_num", default=heads),
        head_dim=head_dim,
        v_head_dim=head_dim if latent else text.number("v_head_dim", default=head_dim),
        intermediate=text.number("intermediate_size", "ffn_hidden_size", "n_inner", default=4 * hidden),
        attention=attention,
        tied=bool(
            root.any("tie_word_embeddings")
            if root.any("tie_word_embeddings") is not None
            else text.any("tie_word_embeddings")
        ),
        dtype_bytes=_DTYPES.get(str(root.any("torch_dtype", "dtype") or text.any("torch_dtype", "dtype")), 2),
        context=_context(text),
        mtp_layers=text.number(
            "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", default=0, least=0
        ),
        mtp_stated=text.any("num_nextn_predict_layers") is not None,
        gated_attention=bool(text.any("attn_output_gate")),
        latent=latent,
        indexer=_indexer(text, layers) if latent else None,
        experts=_experts(text, layers),
        linear=linear,
        window=window,
        vision=vision,
        multimodal=vision is not None or root.part("audio_config") is not None,
        draft_vocab=text.number("draft_vocab_size", default=0, least=0),
        quantization=read_quantization(
            root.part("quantization_config", "compression_config") or text.part("quantization_config")
        ),
        unpriced=_unpriced(architecture, text),
    )


def _context(text: Fields) -> int:
    """Return the tokens of the longest request, as the engine derives them: 0 where no field says it."""
    stated = text.number("max_position_embeddings", "max_sequence_length", "seq_length", default=0, least=0)
    scaling = text.part("rope_scaling")
    # With the original length beside it, the stated one is that of the scaled model already.
    if scaling is None or scaling.any("original_max_position_embeddings") or scaling.any("rope_type") == "llama3":
        return stated
    factor = scaling.any("factor")
    return int(stated * factor) if isinstance(factor, int | float) and 0 < factor < _MOST_SCALED else stated


def _latent(text: Fields) -> Latent | None:
    if text.any("kv_lora_rank") is None:
        return None
    return Latent(
        kv_rank=text.number("kv_lora_rank"),
        rope=text.number("qk_rope_head_dim", least=0),
        q_rank=text.number("q_lora_rank", default=0, least=0),
        nope=text.number("qk_nope_head_dim", default=128),
        v=text.number("v_head_dim", default=128),
    )


def _indexer(text: Fields, layers: int) -> Indexer | None:
    if text.any("index_topk") is None:
        return None
    return Indexer(
        heads=text.number("index_n_heads", default=64),
        dim=text.number("index_head_dim", default=128),
        pool=text.number("index_kpool", default=1),
        owners=frozenset(layer for layer in range(layers) if not _shares_index(text, layer)),
    )


def _shares_index(text: Fields, layer: int) -> bool:
    """Tell whether a layer reuses another's choice of tokens (``dsa_layer_skips_topk`` of the engine)."""
    if types := text.texts("indexer_types"):
        return layer < len(types) and types[layer] == "shared"
    if (every := text.number("cli_factor", default=1)) > 1:
        return layer % every != 0
    if isinstance(pattern := text.any("index_topk_pattern"), str | list):
        return layer < len(pattern) and pattern[layer] == "S"
    every = text.number("index_topk_freq", default=1)
    offset = text.number("index_skip_topk_offset", default=2)
    return max(layer - offset + 1, 0) % every != 0


def _experts(text: Fields, layers: int) -> Experts | None:
    count = text.number("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", default=0, least=0)
    if count <= 1:
        return None
    width = text.number("moe_intermediate_size", "moe_ffn_hidden_size", "expert_ffn_hidden_size", "intermediate_size")
    shared = text.number("shared_expert_intermediate_size", "shared_intermediate_size", default=0, least=0)
    return Experts(
        count=count,
        width=width,
        active=text.number("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k", default=1),
        shared=shared
        or text.number("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0, least=0) * width,
        layers=frozenset(layer for layer in range(layers) if _has_experts(text, layer)),
    )


def _has_experts(text: Fields, layer: int) -> bool:
    if types := text.texts("mlp_layer_types"):
        return layer < len(types) and types[layer] == "sparse"
    if isinstance(pattern := text.any("moe_layer_freq"), list):
        return layer < len(pattern) and bool(pattern[layer])
    if layer < text.number("first_k_dense_replace", default=0, least=0) or layer in text.numbers("mlp_only_layers"):
        return False
    every = text.number("moe_layer_freq", default=1)
    step = text.number("decoder_sparse_step", "interleave_moe_layer_step", default=1)
    return layer % every == 0 and (layer + 1) % step == 0


def _linear(text: Fields) -> LinearState | None:
    state_bytes = _DTYPES.get(str(text.any("mamba_ssm_dtype")), 4)
    if text.any("linear_num_value_heads") is not None:
        return LinearState(
            kind="gdn",
            key_heads=text.number("linear_num_key_heads"),
            value_heads=text.number("linear_num_value_heads"),
            key_dim=text.number("linear_key_head_dim"),
            value_dim=text.number("linear_value_head_dim"),
            kernel=text.number("linear_conv_kernel_dim", default=4),
            state_bytes=state_bytes,
        )
    part = text.part("linear_attn_config")
    if part is None:
        return None
    heads, dim = part.number("num_heads"), part.number("head_dim")
    kernel = part.number("short_conv_kernel_size", default=4)
    return LinearState("kda", heads, heads, dim, dim, kernel, state_bytes)


def _attention(architecture: str, text: Fields, layers: int, linear: LinearState | None) -> tuple[Attention, ...]:
    other: Attention = "linear" if linear else "window"
    if linear:
        others = _linear_layers(text, layers)
    elif architecture.startswith(_WINDOW_POOLS):
        others = frozenset(_window_layers(architecture, text, layers))
    else:
        others = frozenset()
    return tuple(other if layer in others else "full" for layer in range(layers))


def _linear_layers(text: Fields, layers: int) -> frozenset[int]:
    if types := text.texts("layer_types") or text.texts("layers_block_type"):
        return frozenset(layer for layer, kind in enumerate(types[:layers]) if kind == "linear_attention")
    if part := text.part("linear_attn_config"):
        return frozenset(layer - 1 for layer in part.numbers("kda_layers"))  # counted from one in the file
    every = text.number("full_attention_interval", default=4)
    return frozenset(layer for layer in range(layers) if (layer + 1) % every)


def _window_layers(architecture: str, text: Fields, layers: int) -> Iterable[int]:
    if architecture.startswith("Llama4"):
        return [layer for layer in range(layers) if (layer + 1) % 4]
    if pattern := text.numbers("hybrid_layer_pattern"):
        return [layer for layer, windowed in enumerate(pattern[:layers]) if windowed == 1]
    return [layer for layer, kind in enumerate(text.texts("layer_types")[:layers]) if kind == "sliding_attention"]


def _window(text: Fields, heads: int, head_dim: int) -> Window:
    kv_heads = text.number("num_key_value_heads", default=heads)
    swa_dim = text.number("swa_head_dim", default=head_dim)
    return Window(
        size=text.number("sliding_window", "sliding_window_size", "attention_chunk_size", default=4096),
        kv_heads=text.number("swa_num_key_value_heads", default=kv_heads),
        head_dim=swa_dim,
        v_head_dim=text.number("swa_v_head_dim", default=text.number("v_head_dim", default=swa_dim)),
    )


def _vision(root: Fields) -> Vision | None:
    part = root.part("vision_config")
    if part is None:
        return None
    # The engine asks for `num_hidden_layers` and takes 24 where a tower, such as Qwen's, calls it `depth`.
    hidden = part.number("hidden_size", "vt_hidden_size", default=1024)
    return Vision(
        layers=part.number("num_hidden_layers", "vt_num_hidden_layers", default=24),
        hidden=hidden,
        width=part.number("intermediate_size", "vt_intermediate_size", default=4 * hidden),
    )


def _unpriced(architecture: str, text: Fields) -> str:
    if text.any("compress_ratios") is not None:
        return f"{architecture} compresses its KV cache into several pools, which the plan does not restate"
    if text.any("sparse_attention_config", "sparse_index_dim") is not None:
        return f"{architecture} has an index pool beside the KV pool, which the plan does not restate"
    if text.any("mamba_d_state", "ssm_state_size", "hybrid_override_pattern", "mamba_num_heads") is not None:
        return f"{architecture} has Mamba layers, whose state the plan does not restate"
    return ""
