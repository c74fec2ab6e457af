"""A draft without MLA never runs an attention backend that only reads a latent KV cache."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.engine_059 import machine, resolve
from tests.patches.model_shapes import model_config
from tests.patches.resolver import B200, H200, RTX_PRO_6000


def speculative(
    parent: Path, target: str, draft: str | None, algorithm: str = "EAGLE3", **flags: Any
) -> dict[str, Any]:
    arguments = {"model_path": model_config(parent, target), "tp_size": 8, "speculative_algorithm": algorithm}
    if draft:
        arguments["speculative_draft_model_path"] = model_config(parent, draft)
    return arguments | flags


def draft_backends(args: Any) -> set[str]:
    """Return what the draft worker runs: its own backend, else the target's pair."""
    own = args.speculative_draft_attention_backend
    return {own} if own else set(args.get_attention_backends())


@pytest.mark.stock_failure(ValueError, r"trtllm_mla backend can only be used with MLA models")
@pytest.mark.parametrize("target", ["deepseek-v3", "kimi-k2.5-int4"])
def test_the_draft_worker_can_build_its_backend(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = resolve("sm100", B200, **speculative(tmp_path, target, "eagle3-7168"))
    with machine("sm100", B200):
        from sglang.srt.layers.attention import attention_registry

        built: list[str] = []
        runner = SimpleNamespace(use_mla_backend=False, server_args=args)
        # The backend itself needs a GPU; what is in question is its guard.
        registry = attention_registry.ATTENTION_BACKENDS
        monkeypatch.setitem(registry, "trtllm_mha", lambda _runner: built.append("trtllm_mha"))
        for name in draft_backends(args):
            registry[name](runner)
    assert built == ["trtllm_mha"]


@pytest.mark.stock_failure(AssertionError, r"the draft runs (trtllm_mla|flashmla|cutlass_mla|nsa)")
@pytest.mark.parametrize(
    ("target", "flags", "arch", "memory", "expected"),
    [
        ("deepseek-v3", {}, "sm100", B200, "trtllm_mha"),
        ("kimi-k2.5-int4", {}, "sm100", B200, "trtllm_mha"),
        ("deepseek-v3", {"attention_backend": "flashmla"}, "sm90", H200, "fa3"),
        ("deepseek-v3", {"attention_backend": "nsa"}, "sm120", RTX_PRO_6000, "flashinfer"),
        ("deepseek-v3", {"attention_backend": "cutlass_mla"}, "sm100", B200, "flashinfer"),  # pages of 128
        ("deepseek-v3", {"attention_backend": "trtllm_mla", "page_size": 32}, "sm100", B200, "trtllm_mha"),
    ],
)
def test_an_mha_draft_has_a_backend_of_its_own(
    target: str, flags: dict[str, Any], arch: str, memory: int, expected: str, tmp_path: Path
) -> None:
    args = resolve(arch, memory, **speculative(tmp_path, target, "eagle3-7168", **flags))
    assert draft_backends(args) == {expected}, f"the draft runs {', '.join(draft_backends(args))}"


def test_a_tree_has_no_trtllm_mha(tmp_path: Path) -> None:
    tree = {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
    flags = speculative(tmp_path, "deepseek-v3", "eagle3-7168", decode_attention_backend="trtllm_mla", **tree)
    args = resolve("sm100", B200, attention_backend="flashinfer", **flags)
    assert draft_backends(args) == {"flashinfer"}


def test_an_explicit_backend_wins(tmp_path: Path) -> None:
    flags = {"speculative_draft_attention_backend": "triton"}
    args = resolve("sm100", B200, **speculative(tmp_path, "deepseek-v3", "eagle3-7168", **flags))
    assert args.speculative_draft_attention_backend == "triton"


@pytest.mark.parametrize(
    ("target", "draft", "algorithm", "arch", "memory"),
    [
        ("deepseek-v3", None, "EAGLE", "sm100", B200),  # NextN layers of the target
        ("kimi-k2.5-int4", "eagle3-7168", "EAGLE3", "sm120", RTX_PRO_6000),  # triton reads both caches
        ("glm-4.6-nvfp4", "eagle3-5120", "EAGLE3", "sm100", B200),  # no MLA anywhere
        ("minimax-m2", "eagle3-3072", "EAGLE3", "sm120", RTX_PRO_6000),
    ],
)
def test_others_still_run_the_targets_backend(
    target: str, draft: str | None, algorithm: str, arch: str, memory: int, tmp_path: Path
) -> None:
    args = resolve(arch, memory, **speculative(tmp_path, target, draft, algorithm))
    assert args.speculative_draft_attention_backend is None
