"""The KV pool of an EAGLE draft is paid for at what the draft's own attention costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.cpu_package import put_stand_in
from tests.patches.model_shapes import model_config

BF16, FP8 = 2, 1
KIMI_LAYERS, KIMI_LATENT = 61, 512 + 64  # elements a token and layer


@contextmanager
def configurator(folder: Path, target: str, draft: str, draft_changes: dict[str, Any], **flags: Any) -> Iterator[Any]:
    """The engine's KV cache configurator of the target, on rank 0, before any pool exists."""
    with pytest.MonkeyPatch.context() as patches:
        put_stand_in(patches)
        import torch
        from sglang.srt.configs.model_config import AttentionArch, ModelConfig
        from sglang.srt.mem_cache import kv_cache_configurator
        from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
            resolve_spec_aux_hidden_state_config,
        )
        from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        reset_context()  # an earlier test may have built groups, whose sizes would stay
        speculative = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
        args = ServerArgs(
            **{
                "model_path": model_config(folder, target),
                "speculative_draft_model_path": model_config(folder, draft, **draft_changes),
                "speculative_algorithm": "EAGLE3",
                "device": "cpu",
                "skip_tokenizer_init": True,
                "mem_fraction_static": 0.5,
                **speculative,
                **flags,
            }
        )
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        algorithm = SpeculativeAlgorithm.from_string(args.speculative_algorithm)
        config = ModelConfig.from_server_args(args)
        layers = config.num_hidden_layers
        patches.setattr(kv_cache_configurator.KVCacheConfigurator, "_resolve_kv_shard", lambda _: None)
        made = kv_cache_configurator.KVCacheConfigurator(
            **dict.fromkeys(needed(kv_cache_configurator.KVCacheConfigurator))
            | {
                "model_config": config,
                "server_args": args,
                "kv_cache_dtype": torch.float8_e4m3fn if flags.get("kv_cache_dtype") == "fp8_e4m3" else torch.bfloat16,
                "model_dtype": torch.bfloat16,
                "page_size": 64,
                "spec_algorithm": algorithm,
                "is_draft_worker": False,
                "spec_aux_config": resolve_spec_aux_hidden_state_config(
                    server_args=args, model_config=config, spec_algorithm=algorithm, is_draft_worker=False
                ),
                "use_mla_backend": config.attention_arch == AttentionArch.MLA,
                "layer_info": SimpleNamespace(
                    num_effective_layers=layers,
                    start_layer=0,
                    end_layer=layers,
                    is_hybrid_swa_mtp_draft=False,
                    swa_attention_layer_ids=[],
                ),
            }
        )
        made.kv_shard_rank, made.kv_shard_size, made.kv_shard_spec, made.kv_shard_group = None, 1, None, None
        try:
            yield made
        finally:
            reset_context()


def needed(configurator_class: type) -> list[str]:
    import dataclasses

    fields = dataclasses.fields(configurator_class)
    return [f.name for f in fields if f.init and f.default is dataclasses.MISSING]


def draft_bytes(folder: Path, target: str, draft: str, *, target_bytes: int, changes: Any = None, **flags: Any) -> int:
    """Return what the draft adds to the bytes of a token."""
    with configurator(folder, target, draft, changes or {}, **flags) as kvc:
        from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

        return DefaultPoolConfigurator(kvc)._cell_size - target_bytes


def kimi(element: int = BF16) -> int:
    return KIMI_LAYERS * KIMI_LATENT * element


@pytest.mark.stock_failure(
    AssertionError, r"^the MHA draft of Kimi-K2.5 costs 4096 B a token, and is paid for with 1152"
)
def test_mha_draft_of_an_mla_target_at_tp8(tmp_path: Path) -> None:
    paid = draft_bytes(tmp_path, "kimi-k2.5-int4", "eagle3-7168", target_bytes=kimi(), tp_size=8)
    assert paid == 4096, f"the MHA draft of Kimi-K2.5 costs 4096 B a token, and is paid for with {paid}"


@pytest.mark.stock_failure(AssertionError, r"^32768 B a token are allocated, 1152 paid for")
def test_with_attention_data_parallelism_every_rank_holds_all_heads(tmp_path: Path) -> None:
    flags = {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}
    paid = draft_bytes(tmp_path, "kimi-k2.5-int4", "eagle3-7168", target_bytes=kimi(), **flags)
    assert paid == 32768, f"32768 B a token are allocated, {paid} paid for"


@pytest.mark.stock_failure(AssertionError, r"^2048 B a token are allocated, 576 paid for")
def test_fp8_kv_halves_the_draft_too(tmp_path: Path) -> None:
    flags = {"tp_size": 8, "kv_cache_dtype": "fp8_e4m3"}
    with pytest.MonkeyPatch.context() as patches:
        from sglang.srt.mem_cache import kv_cache_dtype

        patches.setattr(kv_cache_dtype.current_platform, "is_cpu", lambda: False, raising=False)
        paid = draft_bytes(tmp_path, "kimi-k2.5-int4", "eagle3-7168", target_bytes=kimi(FP8), **flags)
    assert paid == 2048, f"2048 B a token are allocated, {paid} paid for"


@pytest.mark.stock_failure(AssertionError, r"^1152 B a token are allocated, 0 paid for")
def test_an_mla_draft_whose_config_counts_no_mtp_layers(tmp_path: Path) -> None:
    paid = draft_bytes(tmp_path, "kimi-k2.5-int4", "kimi-eagle3-mla", target_bytes=kimi(), tp_size=8)
    assert paid == KIMI_LATENT * BF16, f"1152 B a token are allocated, {paid} paid for"


def test_the_drafts_own_kv_dtype_counts(tmp_path: Path) -> None:
    flags = {"tp_size": 8, "speculative_draft_kv_cache_dtype": "bfloat16"}
    assert draft_bytes(tmp_path, "kimi-k2.5-int4", "eagle3-7168", target_bytes=kimi(), **flags) == 4096


def test_two_layers_cost_twice(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 2}
    paid = draft_bytes(tmp_path, "kimi-k2.5-int4", "eagle3-7168", changes=changes, target_bytes=kimi(), tp_size=8)
    assert paid == 2 * 4096


def test_a_draft_with_less_attention_than_its_target_costs_less(tmp_path: Path) -> None:
    changes = {"num_key_value_heads": 8}
    paid = draft_bytes(tmp_path, "kimi-k2.5-int4", "eagle3-7168", changes=changes, target_bytes=kimi(), tp_size=8)
    assert paid == 512


def test_an_mtp_head_shares_its_targets_size(tmp_path: Path) -> None:
    flags = {"tp_size": 8, "speculative_algorithm": "EAGLE"}
    target = "glm-4.6-nvfp4"
    with configurator(tmp_path, target, target, {}, **flags) as kvc:
        assert kvc.eagle_draft_cell_size_per_token is None


def test_a_gqa_draft_of_a_gqa_target_costs_what_it_did(tmp_path: Path) -> None:
    one_layer = 1 * (128 + 128) * BF16
    assert draft_bytes(tmp_path, "llama-3.3-70b", "eagle3-8192", target_bytes=80 * one_layer, tp_size=8) == one_layer
