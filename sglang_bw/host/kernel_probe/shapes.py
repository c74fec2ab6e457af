"""The models whose shapes are compiled, per GPU at the tensor parallelism that they are served with.

Numbers are those of the published ``config.json`` files, divided by ``tp``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """Attention of one layer on one GPU.

    :ivar heads: query heads; ``kv_heads``: key heads (1 for absorbed MLA).
    :ivar qk_dim: width of a query and of a key, rotary part included.
    :ivar v_dim: width of a value.
    :ivar absorbed: MLA on the latent cache, whose values are the front of its keys.
    """

    model: str
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    absorbed: bool = False


@dataclass(frozen=True)
class Moe:
    """The routed experts of one layer on one GPU.

    :ivar width: columns of an expert's gate, which is the intermediate size over ``tp``.
    :ivar formats: how the weights come: ``bf16``, ``fp8 block`` (128 x 128), ``fp8 channel``, ``fp8 tensor``,
        ``int4`` (groups of 32).
    """

    model: str
    experts: int
    hidden: int
    width: int
    top_k: int
    formats: tuple[str, ...]


@dataclass(frozen=True)
class Dense:
    """One linear layer on one GPU, in block FP8."""

    model: str
    rows: int
    columns: int


# Decode and verify.
ATTENTION = (
    Attention("Kimi-K2.5 tp8", 8, 1, 576, 512, absorbed=True),
    Attention("DeepSeek-V3 tp8", 16, 1, 576, 512, absorbed=True),
    Attention("DeepSeek-V3 tp1", 128, 1, 576, 512, absorbed=True),
    Attention("Kimi-K2.5 EAGLE-3 draft tp8", 8, 8, 128, 128),
    Attention("GLM-4.6 tp8", 12, 1, 128, 128),
    Attention("MiniMax-M2 tp4", 12, 2, 128, 128),
    Attention("Qwen3-8B", 32, 8, 128, 128),
    Attention("Qwen3.5-397B tp8", 4, 1, 256, 256),
    Attention("tiny", 4, 2, 64, 64),
)
# Prefill of MLA models is not absorbed: full keys and values, one for each query head.
PREFILL = (
    Attention("Kimi-K2.5 tp8", 8, 8, 192, 128),
    Attention("GLM-5 tp8", 8, 8, 256, 256),
)
MOE = (
    Moe("Kimi-K2.5 tp8", 384, 7168, 256, 8, ("int4", "bf16")),
    Moe("GLM-5 tp8", 256, 6144, 256, 8, ("fp8 block", "fp8 channel", "fp8 tensor", "bf16")),
    Moe("GLM-4.6 tp8", 160, 5120, 192, 8, ("fp8 channel",)),
    Moe("MiniMax-M2 tp4", 256, 3072, 384, 8, ("fp8 block", "int4", "bf16")),
    Moe("Qwen3-30B-A3B", 128, 2048, 768, 8, ("fp8 block", "fp8 channel", "fp8 tensor", "bf16")),
    Moe("Qwen3.5-397B tp8", 512, 4096, 128, 10, ("fp8 block", "bf16")),
)
DENSE = (
    Dense("Qwen3-8B", 6144, 4096),
    Dense("MiniMax-M2 tp4", 2048, 3072),
)
# Width of a draft's vocabulary, and of a target's.
DRAFT_VOCABULARY = 32_000
VOCABULARY = 163_840
