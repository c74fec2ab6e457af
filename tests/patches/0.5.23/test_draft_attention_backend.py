"""A draft without MLA never runs an attention backend that only reads a latent KV cache."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.model_shapes import model_config
from tests.patches.resolver import B200, H200, RTX_PRO_6000, machine, resolve, resolved_args

MHA_DRAFT_OF = {
    "deepseek-v3": "eagle3-7168",
    "deepseek-v3.2": "eagle3-7168",
    "kimi-k2.5-int4": "eagle3-7168",
    "kimi-k2.5-nvfp4": "eagle3-7168",
    "glm-5-nvfp4": "eagle3-6144",
}
DSA_ONLY = {"deepseek-v3.2", "glm-5-nvfp4"}


def speculative(
    parent: Path, target: str, draft: str | None, algorithm: str = "EAGLE3", **flags: Any
) -> dict[str, Any]:
    arguments = {"model_path": model_config(parent, target), "tp_size": 8, "speculative_algorithm": algorithm}
    if draft:
        arguments["speculative_draft_model_path"] = model_config(parent, draft)
    return arguments | flags


def draft_backends(view: Any) -> set[str]:
    """Return what the draft worker runs: its own backend, else the target's pair."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    own = view.speculative_draft_attention_backend
    return {own} if own else set(attention_backends_of(view))


@pytest.mark.stock_failure(ValueError, r"trtllm_mla backend can only be used with MLA models")
def test_the_draft_worker_can_build_its_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with machine("sm100", B200):
        args = resolved_args(**speculative(tmp_path, "deepseek-v3", "eagle3-7168"))

        from sglang.srt.arg_groups.overrides import resolved_view
        from sglang.srt.layers.attention import attention_registry

        built: list[str] = []
        runner = SimpleNamespace(use_mla_backend=False, server_args=args)
        # The backend itself needs a GPU; what is in question is its guard.
        registry = attention_registry.ATTENTION_BACKENDS
        monkeypatch.setitem(registry, "trtllm_mha", lambda _runner: built.append("trtllm_mha"))
        for name in draft_backends(resolved_view(args)):
            registry[name](runner)
    assert built == ["trtllm_mha"]


@pytest.mark.stock_failure(AssertionError, r"the draft runs (trtllm_mla|dsa)")
@pytest.mark.parametrize(
    ("target", "arch", "memory", "expected"),
    [
        *[(target, "sm100", B200, "trtllm_mha") for target in MHA_DRAFT_OF],
        *[(target, "sm120", RTX_PRO_6000, "flashinfer") for target in sorted(DSA_ONLY)],
        *[(target, "sm90", H200, "fa3") for target in sorted(DSA_ONLY)],
    ],
)
def test_an_mha_draft_has_a_backend_of_its_own(
    target: str, arch: str, memory: int, expected: str, tmp_path: Path
) -> None:
    view = resolve(arch, memory, **speculative(tmp_path, target, MHA_DRAFT_OF[target]))
    assert draft_backends(view) == {expected}, f"the draft runs {', '.join(draft_backends(view))}"


@pytest.mark.stock_failure(AssertionError, r"the draft runs (trtllm_mla|cutedsl_mla|flashmla)")
@pytest.mark.parametrize(
    ("flags", "arch", "memory", "expected"),
    [
        ({"attention_backend": "trtllm_mla", "attn_dp_size": 8}, "sm120", RTX_PRO_6000, "flashinfer"),
        ({"attention_backend": "flashmla"}, "sm90", H200, "fa3"),
        ({"decode_attention_backend": "cutedsl_mla"}, "sm100", B200, "trtllm_mha"),
        ({"page_size": 32, "attention_backend": "trtllm_mla"}, "sm100", B200, "trtllm_mha"),
    ],
)
def test_so_it_has_under_a_chosen_target_backend(
    flags: dict[str, Any], arch: str, memory: int, expected: str, tmp_path: Path
) -> None:
    view = resolve(arch, memory, **speculative(tmp_path, "deepseek-v3", "eagle3-7168", **flags))
    assert draft_backends(view) == {expected}, f"the draft runs {', '.join(sorted(draft_backends(view), reverse=True))}"


@pytest.mark.parametrize("explicit", ["triton", "flashinfer"])
def test_an_explicit_backend_wins(explicit: str, tmp_path: Path) -> None:
    flags = {"speculative_draft_attention_backend": explicit}
    view = resolve("sm100", B200, **speculative(tmp_path, "deepseek-v3", "eagle3-7168", **flags))
    assert view.speculative_draft_attention_backend == explicit


@pytest.mark.parametrize(
    ("target", "draft", "algorithm", "arch", "memory"),
    [
        ("kimi-k2.5-int4", "kimi-eagle3-mla", "EAGLE3", "sm100", B200),  # a draft with the target's MLA
        ("deepseek-v3", None, "EAGLE", "sm100", B200),  # NextN layers of the target
        ("deepseek-v3.2", None, "EAGLE", "sm120", RTX_PRO_6000),
        ("kimi-k2.5-int4", "eagle3-7168", "EAGLE3", "sm120", RTX_PRO_6000),  # triton reads both caches
        ("glm-4.6-nvfp4", "eagle3-5120", "EAGLE3", "sm100", B200),  # no MLA anywhere
        ("minimax-m2", "eagle3-3072", "EAGLE3", "sm120", RTX_PRO_6000),
    ],
)
def test_others_still_run_the_targets_backend(
    target: str, draft: str | None, algorithm: str, arch: str, memory: int, tmp_path: Path
) -> None:
    view = resolve(arch, memory, **speculative(tmp_path, target, draft, algorithm))
    assert view.speculative_draft_attention_backend is None
