"""What a model and a way to divide it look like, as far as memory is concerned. Made by ``plan.config``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sglang_bw.errors import CheckpointError

Attention = Literal["full", "linear", "window"]


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (MLA): one compressed vector a token and layer, the same for all heads.

    :ivar kv_rank: elements of the latent vector.
    :ivar rope: elements of the rotary key beside it.
    :ivar q_rank: rank of the query's compression; 0 without one.
    :ivar nope: query and key elements a head without rotary position.
    :ivar v: value elements a head.
    """

    kv_rank: int
    rope: int
    q_rank: int = 0
    nope: int = 0
    v: int = 0

    @property
    def width(self) -> int:
        """Elements a token and layer."""
        return self.kv_rank + self.rope


@dataclass(frozen=True)
class Indexer:
    """The key cache of sparse MLA (DSA): FP8 keys with a 4-byte scale for every 128 elements.

    :ivar heads: query heads of the indexer.
    :ivar dim: elements of one key.
    :ivar pool: tokens that share one key.
    :ivar owners: layers with keys of their own; the others reuse a neighbour's choice.
    """

    heads: int
    dim: int
    pool: int
    owners: frozenset[int]


@dataclass(frozen=True)
class Experts:
    """Routed experts.

    :ivar count: in each layer that has any.
    :ivar width: intermediate size of one.
    :ivar active: used for each token.
    :ivar shared: intermediate size of the shared expert; 0 without one.
    :ivar layers: the layers that have them.
    """

    count: int
    width: int
    active: int
    shared: int
    layers: frozenset[int]


@dataclass(frozen=True)
class LinearState:
    """Linear attention: a state of fixed size for each request instead of keys and values for each token.

    :ivar kind: ``gdn`` (gated delta net) or ``kda`` (Kimi delta attention).
    :ivar key_heads: heads of queries and keys.
    :ivar value_heads: heads of values.
    :ivar key_dim: elements of a key.
    :ivar value_dim: elements of a value.
    :ivar kernel: taps of the short convolution.
    :ivar state_bytes: bytes of one element of the state.
    """

    kind: Literal["gdn", "kda"]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    state_bytes: int


@dataclass(frozen=True)
class Window:
    """Layers with sliding-window attention, which have a pool of their own.

    :ivar size: tokens that a layer looks back.
    :ivar kv_heads: KV heads of these layers.
    :ivar head_dim: elements of a key.
    :ivar v_head_dim: elements of a value.
    """

    size: int
    kv_heads: int
    head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class Vision:
    """A vision tower, by the two sizes that the engine's memory fraction asks for."""

    layers: int
    hidden: int
    width: int


@dataclass(frozen=True)
class Quantization:
    """How the checkpoint stores its linear layers.

    :ivar name: as the engine calls the method: ``fp8``, ``compressed-tensors``, ``modelopt_fp4``; empty for none.
    :ivar bits: bits of one weight, its share of the scales included; 16 for none.
    :ivar everywhere: false when only routed experts are quantized.
    :ivar skipped: name patterns of what is not.
    :ivar fp8_kv: whether the checkpoint declares its KV cache to be FP8, so that ``auto`` means that.
    """

    name: str = ""
    bits: float = 16.0
    everywhere: bool = True
    skipped: tuple[str, ...] = ()
    fp8_kv: bool = False


@dataclass(frozen=True)
class ModelShape:
    """A model's sizes.

    :ivar attention: one entry a layer.
    :ivar mtp_layers: layers of the multi-token-prediction head in the same checkpoint.
    :ivar mtp_stated: the config has ``num_nextn_predict_layers``, be it 0.
    :ivar dtype_bytes: bytes of an element that is not quantized.
    :ivar context: longest context in tokens.
    :ivar unpriced: why its KV cache cannot be priced here; empty when it can.
    """

    architecture: str
    model_type: str
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    intermediate: int
    attention: tuple[Attention, ...]
    tied: bool = False
    dtype_bytes: int = 2
    context: int = 0
    mtp_layers: int = 0
    mtp_stated: bool = False
    gated_attention: bool = False
    latent: Latent | None = None
    indexer: Indexer | None = None
    experts: Experts | None = None
    linear: LinearState | None = None
    window: Window | None = None
    vision: Vision | None = None
    multimodal: bool = False
    draft_vocab: int = 0
    quantization: Quantization = Quantization()
    unpriced: str = ""

    @property
    def layers(self) -> int:
        """Number of layers, the MTP head not counted."""
        return len(self.attention)

    def of_kind(self, kind: Attention, first: int = 0, end: int | None = None) -> int:
        """Return how many of the layers ``first:end`` have this kind of attention."""
        return self.attention[first:end].count(kind)


@dataclass(frozen=True)
class Parallel:
    """How a model is divided.

    :ivar tp: GPUs of a tensor-parallel group.
    :ivar ep: expert-parallel groups; divides ``tp``.
    :ivar pp: pipeline stages.
    :ivar dp: attention data-parallel groups (``--attn-dp-size``); divides ``tp``.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.tp * self.pp

    @property
    def attn_tp(self) -> int:
        """GPUs that share the heads."""
        return self.tp // self.dp

    @property
    def moe_tp(self) -> int:
        """GPUs that share one expert."""
        return self.tp // self.ep

    def stage(self, layers: int, index: int) -> tuple[int, int]:
        """Return the layers ``first, end`` of a pipeline stage; the last stages take what does not divide."""
        base, extra = divmod(layers, self.pp)
        shorter = self.pp - extra
        first = index * base + max(0, index - shorter)
        return first, first + base + (index >= shorter)

    def check(self, shape: ModelShape) -> None:
        """Check that the model can be divided so.

        :raises CheckpointError: it cannot; names every contradiction.
        """
        findings = [*self._findings(), *(_division_findings(self, shape) if self._is_sound() else ())]
        if findings:
            raise CheckpointError(
                "\n".join(["the parallel sizes contradict the model:", *(f"  {text}" for text in findings)]),
                hint="Change --tp-size, --ep-size, --pp-size or --attn-dp-size.",
            )

    def _is_sound(self) -> bool:
        return not self._findings()

    def _findings(self) -> list[str]:
        sizes = {"tp": self.tp, "ep": self.ep, "pp": self.pp, "dp": self.dp}
        findings = [f"{name} {size} is not a positive number" for name, size in sizes.items() if size < 1]
        if not findings:
            findings += [
                f"{name} {sizes[name]} does not divide tp {self.tp}" for name in ("ep", "dp") if self.tp % sizes[name]
            ]
        return findings


def _division_findings(parallel: Parallel, shape: ModelShape) -> list[str]:
    findings = []
    attn = parallel.attn_tp
    if shape.heads % attn:
        findings.append(f"{shape.heads} attention heads do not divide by {attn}")
    if not shape.latent and shape.kv_heads % attn and attn % shape.kv_heads:
        findings.append(f"{shape.kv_heads} KV heads and {attn} GPUs: neither divides the other")
    if shape.experts:
        if shape.experts.count % parallel.ep:
            findings.append(f"{shape.experts.count} experts do not divide by ep {parallel.ep}")
        if shape.experts.width % parallel.moe_tp:
            findings.append(f"an expert of width {shape.experts.width} does not divide by {parallel.moe_tp}")
    elif parallel.ep > 1:
        findings.append(f"ep {parallel.ep}, but the model has no experts")
    if parallel.pp > shape.layers:
        findings.append(f"pp {parallel.pp} is more than the {shape.layers} layers")
    return findings


def worst_stage(parallel: Parallel, layers: int, cost: Callable[[int, int, int], int]) -> int:
    """Return the stage index with the highest ``cost(index, first, end)``."""
    return max(range(parallel.pp), key=lambda index: cost(index, *parallel.stage(layers, index)))
