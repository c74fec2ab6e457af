"""The facts that rules ask for: the machine, the model, flags and environment, flat and by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_bw.plan.resolution import Resolution, look_up
from sglang_bw.recipes.flags import ALIASES, Flags
from sglang_bw.recipes.hardware import Hardware

_MLA_KEYS = ("kv_lora_rank", "qk_rope_head_dim")
# A few flags set several of the engine's arguments, or have another name there.
_FIELDS = {
    "flag.cuda-graph-max-bs-decode": "cuda_graph_config.decode.max_bs",
    "flag.fp4-gemm-backend": "fp4_gemm_runner_backend",
    "flag.fp8-gemm-backend": "fp8_gemm_runner_backend",
}
_GROUPS = {
    "any_attention": (
        "attention-backend",
        "prefill-attention-backend",
        "decode-attention-backend",
        "speculative-draft-attention-backend",
    ),
    "any_dsa": ("dsa-prefill-backend", "dsa-decode-backend", "nsa-prefill-backend", "nsa-decode-backend"),
    "any_moe": ("moe-runner-backend", "speculative-moe-runner-backend"),
    "any_fusion": ("flashinfer-allreduce-fusion-backend", "enable-flashinfer-allreduce-fusion"),
}
# In the name of every architecture that is made to be a draft.
_DRAFTS = ("eagle", "mtp", "nextn", "dflash", "dspark", "assistant")
_UNSET = (None, "", "auto", "none", False)


@dataclass(frozen=True)
class Facts:
    """Everything a condition may name.

    :ivar values: ``arch``, ``gpus``, ``mla``, ``any_attention``...; an unknown one is missing, and no condition holds.
    :ivar flags: what the command line says, or, once resolved, what the engine will use.
    :ivar env: variables of the launch.
    """

    values: Mapping[str, Any]
    flags: Mapping[str, Any]
    env: Mapping[str, str]
    patches: frozenset[str] = field(default_factory=frozenset)
    engine: str = ""

    def get(self, name: str) -> list[Any]:
        """Return what is known under a name; an empty list when it is unset or unknown."""
        kind, _, rest = name.partition(".")
        if kind == "flag":
            found = [self.flags.get(rest)]
        elif kind == "env":
            found = [self.env.get(rest)]
        elif name in _GROUPS:
            found = [self.flags.get(flag) for flag in _GROUPS[name]]
        else:
            found = [self.values.get(name)]
        return [value for value in found if value not in _UNSET]

    def with_flags(self, flags: Flags) -> Facts:
        """Return the facts of the same launch with other values of some flags."""
        return replace(self, flags={**self.flags, **_said(flags)})

    def without_speculation(self) -> Facts:
        """Return the facts of the same launch that does not speculate."""
        left = {name: value for name, value in self.flags.items() if not name.startswith("speculative-")}
        values = {name: value for name, value in self.values.items() if not name.startswith(("draft_", "separate_"))}
        return replace(self, flags=left, values={**values, "speculates": False, "draft_kind": ""})


def collect(
    *,
    machine: Hardware,
    board_mib: int,
    flags: Flags,
    env: Mapping[str, str],
    config: Mapping[str, Any],
    draft_config: Mapping[str, Any] | None,
    engine: str,
    patches: frozenset[str],
    resolution: Resolution | None = None,
) -> Facts:
    """Put the facts of a launch together.

    :param flags: the command line; values that the engine resolved win.
    :param config: the target's config.json.
    :param draft_config: the draft's, ``None`` for MTP layers or without speculation.
    :param patches: topics of the engine's patches, without number: ``trtllm-attention-guards``.
    """
    said = _said(flags)
    effective = _effective(resolution) if resolution and resolution.source == "engine" else {}
    known = {**said, **{name: value for name, value in effective.items() if value not in _UNSET}}
    values = {
        "arch": machine.arch,
        "gpus": machine.count,
        "fabric": machine.fabric,
        "board": machine.board,
        "board_gib": board_mib / 1024,
        **_model(config),
        **_speculation(known, config, draft_config),
        "cuda_graphs": not (known.get("disable-cuda-graph") or known.get("cuda-graph-backend-decode") == "disabled"),
    }
    return Facts(values, known, env, patches, engine)


def _said(flags: Flags) -> dict[str, Any]:
    return {ALIASES.get(flag.name, flag.name): flag.values[-1] if flag.values else True for flag in flags}


def _effective(resolution: Resolution) -> dict[str, Any]:
    flat = {name.replace("_", "-"): value for name, value in resolution.effective.items() if not name.startswith("_")}
    flat |= {flag.removeprefix("flag."): look_up(resolution.effective, path) for flag, path in _FIELDS.items()}
    return flat


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _model(config: Mapping[str, Any]) -> dict[str, Any]:
    text = text_config(config)
    quantization = config.get("quantization_config") or text.get("quantization_config") or {}
    return {
        "model": next(iter(config.get("architectures") or ()), ""),
        "mla": all(text.get(key) for key in _MLA_KEYS),
        "dsa": bool(text.get("index_topk")),
        "moe": any(text.get(key) for key in ("n_routed_experts", "num_experts", "num_local_experts")),
        "vision": "vision_config" in config,
        "quantization": _quantization(quantization) if isinstance(quantization, Mapping) else "",
    }


def _quantization(config: Mapping[str, Any]) -> str:
    method = str(config.get("quant_method", ""))
    return "modelopt_fp4" if method == "modelopt" and "FP4" in str(config.get("quant_algo", "")) else method


def _speculation(
    flags: Mapping[str, Any], config: Mapping[str, Any], draft: Mapping[str, Any] | None
) -> dict[str, Any]:
    speculates = flags.get("speculative-algorithm") not in _UNSET
    if not speculates or draft is None:
        return {"speculates": speculates, "draft_kind": "mtp" if speculates else ""}
    architecture = str(next(iter(draft.get("architectures") or ()), ""))
    vocabulary = text_config(config).get("vocab_size")
    return {
        "speculates": True,
        "separate_draft": True,
        "draft_kind": "mla" if all(draft.get(key) for key in _MLA_KEYS) else "mha",
        "draft_is_eagle3": "eagle3" in architecture.lower(),
        "draft_is_plain": bool(architecture) and not any(word in architecture.lower() for word in _DRAFTS),
        "draft_of_other_hidden_size": _other_hidden_size(config, draft),
        "draft_of_other_vocabulary": draft.get("vocab_size") != vocabulary,
        "draft_vocab_reduced": bool(draft.get("draft_vocab_size")) and draft.get("draft_vocab_size") != vocabulary,
    }


def _other_hidden_size(config: Mapping[str, Any], draft: Mapping[str, Any]) -> bool:
    """Tell whether a draft takes hidden states of another width than the target's; unknown sizes are no other."""
    inner = text_config(draft)
    taken = draft.get("target_hidden_size") or inner.get("target_hidden_size") or inner.get("hidden_size")
    made = text_config(config).get("hidden_size")
    return bool(taken) and bool(made) and taken != made
