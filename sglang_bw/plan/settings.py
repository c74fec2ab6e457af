"""The engine's settings that memory depends on: the engine's own resolution, or restated from its formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sglang_bw.errors import CheckpointError
from sglang_bw.plan.releases import Release
from sglang_bw.plan.shapes import Parallel
from sglang_bw.recipes import chain

_EAGLE = {"EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP"}
_OWN_CONFIG = {"DFLASH", "DSPARK"}


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one launch.

    :ivar mem_fraction_static: part of the memory free at the start that weights and KV pool may take.
    :ivar kv_cache_dtype: as on the command line: ``auto``, ``bf16``, ``fp8_e4m3``, ``nvfp4``, ...
    :ivar chunked_prefill_size: tokens of one prefill pass.
    :ivar decode_max_bs: the largest captured batch; 0 without decode graphs.
    :ivar prefill_graph: whether prefill is captured.
    :ivar context_length: tokens of the longest request.
    :ivar algorithm: of speculation; ``None`` without.
    :ivar draft_is_mtp: the draft is the target's own multi-token-prediction head.
    :ivar choices: draft steps that a policy chooses from; empty where they are fixed.
    :ivar flashinfer: decode and verify run on FlashInfer.
    :ivar sparse_scaled: sparse MLA stores FP8 latents with their scales.
    :ivar fraction_is_default: nobody set ``mem_fraction_static``, so it follows the other settings.
    :ivar source: where the settings come from; ``restated``: formulas, the engine was not run.
    """

    release: Release
    mem_fraction_static: float
    kv_cache_dtype: str = "auto"
    draft_kv_cache_dtype: str | None = None
    page_size: int = 1
    chunked_prefill_size: int = 8192
    decode_max_bs: int = 256
    prefill_graph: bool = False
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    context_length: int = 0
    algorithm: str | None = None
    draft_is_mtp: bool = False
    steps: int = 0
    topk: int = 1
    draft_tokens: int = 0
    choices: tuple[int, ...] = ()
    flashinfer: bool = False
    a2a: str = "none"
    quantization: str = ""
    disable_radix_cache: bool = False
    disable_overlap: bool = False
    max_mamba_cache_size: int | None = None
    mamba_ratio: float = 0.9
    mamba_extra_buffer: Literal["none", "full", "lazy"] = "none"
    mamba_dtype: str | None = None
    swa_ratio: float = 0.8
    sparse_scaled: bool = False
    language_only: bool = False
    gpu_transport: bool = False
    symm_mem_gib: float = 0.0
    head_by_attention: bool = False
    dense_whole: bool = False
    redundant_experts: int = 0
    fraction_is_default: bool = False
    source: Literal["engine", "restated"] = "restated"

    @property
    def eagle(self) -> bool:
        """Whether a draft model runs whose KV is kept beside the target's."""
        return self.algorithm in _EAGLE

    @property
    def own_config_draft(self) -> bool:
        """Whether every release prices this kind of draft by its own config."""
        return self.algorithm in _OWN_CONFIG

    @property
    def shared_whole(self) -> bool:
        """Whether every GPU holds the shared experts whole."""
        return self.a2a not in ("none", "")

    def check(self) -> None:
        """Check numbers that came from a user.

        :raises CheckpointError: one makes no sense; names every finding.
        """
        findings = (
            []
            if 0 < self.mem_fraction_static <= 1
            else [f"mem_fraction_static is {self.mem_fraction_static}, not in 0..1"]
        )
        least = {"page_size": 1, "chunked_prefill_size": -1, "decode_max_bs": 0, "context_length": 0, "mamba_ratio": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if not math.isfinite(value) or value < smallest:
                findings.append(f"{name} is {value}, expected {smallest} or more")
        for name in ("max_running_requests", "max_total_tokens", "max_mamba_cache_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                findings.append(f"{name} is {value}, expected 1 or more")
        if findings:
            raise CheckpointError(
                "\n".join(["the settings make no sense:", *(f"  {text}" for text in findings)]),
                hint="Correct the flag behind '--', or the recipe.",
            )


def parallel_of(effective: Mapping[str, Any]) -> Parallel:
    """Read the parallel sizes from the engine's resolved settings."""
    dp = _int(effective, "attn_dp_size") or (_int(effective, "dp_size") if effective.get("enable_dp_attention") else 1)
    return Parallel(
        tp=_int(effective, "tp_size") or 1,
        ep=_int(effective, "ep_size") or 1,
        pp=_int(effective, "pp_size") or 1,
        dp=dp or 1,
    )


def from_resolved(
    effective: Mapping[str, Any], release: Release, *, context: int = 0, fraction_is_default: bool = False
) -> EngineSettings:
    """Take the settings from the engine's resolved arguments, by the names of its fields.

    :param effective: field name -> value; ``cuda_graph_config`` may be the mapping of the newer releases.
    :param context: the model's longest context, where the arguments name none.
    :param fraction_is_default: the user did not set ``mem_fraction_static``.
    :raises CheckpointError: numbers that make no sense.
    """
    prefill, decode = _graphs(effective)
    strategy = str(
        effective.get("mamba_radix_cache_strategy") or effective.get("mamba_scheduler_strategy") or "no_buffer"
    )
    algorithm = effective.get("speculative_algorithm")
    draft = effective.get("speculative_draft_model_path")
    settings = EngineSettings(
        release=release,
        mem_fraction_static=float(effective.get("mem_fraction_static") or 0.0),
        kv_cache_dtype=str(effective.get("kv_cache_dtype") or "auto"),
        draft_kv_cache_dtype=effective.get("speculative_draft_kv_cache_dtype"),
        page_size=_int(effective, "page_size") or 1,
        chunked_prefill_size=_int(effective, "chunked_prefill_size") or _int(effective, "max_prefill_tokens") or 8192,
        decode_max_bs=decode,
        prefill_graph=prefill,
        max_running_requests=_int(effective, "max_running_requests"),
        max_total_tokens=_int(effective, "max_total_tokens"),
        context_length=_int(effective, "context_length") or context,
        algorithm="EAGLE" if algorithm == "NEXTN" else algorithm,
        draft_is_mtp=bool(algorithm) and draft in (None, effective.get("model_path")),
        steps=_int(effective, "speculative_num_steps") or 0,
        topk=_int(effective, "speculative_eagle_topk") or 1,
        draft_tokens=_int(effective, "speculative_num_draft_tokens") or 0,
        choices=choices(effective, _int(effective, "speculative_num_steps") or 0),
        flashinfer=decodes_on_flashinfer(effective),
        a2a=str(effective.get("moe_a2a_backend") or "none"),
        quantization=str(effective.get("quantization") or ""),
        disable_radix_cache=bool(effective.get("disable_radix_cache")),
        disable_overlap=bool(effective.get("disable_overlap_schedule")),
        max_mamba_cache_size=_int(effective, "max_mamba_cache_size"),
        mamba_ratio=float(effective.get("mamba_full_memory_ratio") or 0.9),
        mamba_extra_buffer={"extra_buffer": "full", "extra_buffer_lazy": "lazy"}.get(strategy, "none"),  # type: ignore[arg-type]
        mamba_dtype=effective.get("mamba_ssm_dtype"),
        swa_ratio=float(effective.get("swa_full_tokens_ratio") or 0.8),
        sparse_scaled=_sparse_scaled(effective),
        language_only=bool(effective.get("language_only") or effective.get("language_model_only")),
        gpu_transport=effective.get("mm_feature_transport") in ("cuda_ipc", "cuda_vmm"),
        symm_mem_gib=4.0 if effective.get("enable_symm_mem") else 0.0,
        head_by_attention=bool(effective.get("enable_dp_lm_head")),
        dense_whole=_int(effective, "moe_dense_tp_size") == 1,
        redundant_experts=_int(effective, "ep_num_redundant_experts") or 0,
        fraction_is_default=fraction_is_default,
        source="engine",
    )
    settings.check()
    return settings


def _graphs(effective: Mapping[str, Any]) -> tuple[bool, int]:
    config = effective.get("cuda_graph_config")
    if not isinstance(config, Mapping):
        off = bool(effective.get("disable_cuda_graph"))
        piecewise = (
            effective.get("enable_piecewise_cuda_graph") or effective.get("disable_piecewise_cuda_graph") is False
        )
        return bool(piecewise) and not off, 0 if off else _int(effective, "cuda_graph_max_bs") or 0
    prefill, decode = config.get("prefill") or {}, config.get("decode") or {}
    captured = prefill.get("backend") not in (None, "disabled")
    return captured, 0 if decode.get("backend") == "disabled" else _int(decode, "max_bs") or 0


def choices(fields: Mapping[str, Any], steps: int) -> tuple[int, ...]:
    """Return what the goodput policy chooses from below ``steps`` when no configuration names anything else."""
    if not fields.get("speculative_adaptive") or fields.get("speculative_adaptive_policy") != "goodput":
        return ()
    return chain.candidates(steps)


def decodes_on_flashinfer(fields: Mapping[str, Any]) -> bool:
    """Whether the target decodes and verifies on FlashInfer."""
    return (fields.get("decode_attention_backend") or fields.get("attention_backend")) == "flashinfer"


def _sparse_scaled(effective: Mapping[str, Any]) -> bool:
    backends = [effective.get(f"{name}_{phase}_backend") for name in ("dsa", "nsa") for phase in ("prefill", "decode")]
    named = {backend for backend in backends if backend}
    return bool(named) and "trtllm" not in named and named != {"tilelang"}


def _int(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is None or isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value)
