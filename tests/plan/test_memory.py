from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bw.errors import CheckpointError
from sglang_bw.host.boards import Board, find
from sglang_bw.plan import fraction, kv, memory, overhead, releases
from sglang_bw.plan.config import read_shape
from sglang_bw.plan.estimate import estimate
from sglang_bw.plan.settings import EngineSettings, from_resolved, parallel_of
from sglang_bw.plan.shapes import ModelShape, Parallel
from sglang_bw.plan.split import Loading, rank_bytes
from tests.patches.model_shapes import DRAFTS, TARGETS, eagle3_draft

GIB = 1 << 30
PRO = find("RTX PRO 6000")
KIMI, QWEN, GLM5, LLAMA = (read_shape(TARGETS[n]) for n in ("kimi-k2.5-int4", "qwen3.5", "glm-5", "llama-3.3-70b"))
QWEN4 = read_shape(TARGETS["qwen3.5-nvfp4"])
MHA_DRAFT, MLA_DRAFT = read_shape(eagle3_draft(7168)), read_shape(DRAFTS["kimi-eagle3-mla"])


def settings(
    version: str = "0.5.23", target: ModelShape = KIMI, draft: ModelShape | None = None, tp: int = 8, **asked: Any
) -> EngineSettings:
    return fraction.restate(asked, target, draft, PRO, Parallel(tp=tp), releases.parse(version))


@pytest.mark.parametrize(
    ("version", "draft", "counted", "held"),
    [
        # The MHA draft takes 2 x 8 heads x 128 x 2 B at TP8; upstream counts one more layer of the target's latent.
        ("0.5.23", MHA_DRAFT, 1152, 4096),
        ("0.5.23+bw.1", MHA_DRAFT, 4096, 4096),
        # This draft's config says "num_nextn_predict_layers": 0, which upstream takes for no layers.
        ("0.5.23", MLA_DRAFT, 0, 1152),
        ("0.5.23+bw.1", MLA_DRAFT, 1152, 1152),
        # Before 0.5.14 nothing was counted.
        ("0.5.12", MHA_DRAFT, 0, 4096),
    ],
)
def test_what_each_engine_counts_for_a_draft(version: str, draft: ModelShape, counted: int, held: int) -> None:
    cell = kv.cell(KIMI, draft, Parallel(tp=8), settings(version, draft=draft, speculative_algorithm="EAGLE3"))
    assert (cell.full, cell.draft, cell.draft_held) == (70272, counted, held)
    assert cell.unpriced == held - counted


@pytest.mark.parametrize(
    ("target", "dtype", "tp", "cell"),
    [
        (KIMI, "fp8_e4m3", 8, 35136),
        (KIMI, "nvfp4", 8, 61 * (288 + 36)),
        (LLAMA, "bf16", 2, 80 * 4 * 256 * 2),
        (LLAMA, "mxfp8", 2, 80 * (4 * 256 + 4 * 256 // 32)),
        (LLAMA, "auto", 16, 80 * 1 * 256 * 2),
        (QWEN, "fp8_e5m2", 4, 7680),
        (GLM5, "bf16", 8, 100152),
    ],
)
def test_bytes_of_a_token(target: ModelShape, dtype: str, tp: int, cell: int) -> None:
    assert kv.cell(target, None, Parallel(tp=tp), settings(target=target, tp=tp, kv_cache_dtype=dtype)).full == cell


def test_an_mtp_head_costs_a_layer_of_its_target() -> None:
    made = settings("0.5.15", GLM5, speculative_algorithm="NEXTN", kv_cache_dtype="fp8_e4m3")
    cell = kv.cell(GLM5, None, Parallel(tp=8), made)
    assert (cell.full, cell.full + cell.draft) == (55224, 55932)  # as field data has them


def test_unknown_kv_dtypes_and_unpriced_models() -> None:
    with pytest.raises(CheckpointError, match="is no KV cache dtype") as raised:
        kv.cell(KIMI, None, Parallel(tp=8), settings(kv_cache_dtype="fp7"))
    assert "fp8_e4m3" in raised.value.hint
    with pytest.raises(CheckpointError, match="compresses its KV cache"):
        kv.cell(read_shape(TARGETS["deepseek-v4"]), None, Parallel(tp=8), settings())


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (Parallel(tp=8, ep=3), "ep 3 does not divide tp 8"),
        (Parallel(tp=0), "tp 0 is not a positive number"),
        (Parallel(tp=7), "64 attention heads do not divide by 7"),
        (Parallel(tp=5, ep=5), "384 experts do not divide by ep 5"),
        (Parallel(tp=8, pp=62), "pp 62 is more than the 61 layers"),
    ],
)
def test_sizes_that_contradict_the_model(parallel: Parallel, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        memory.ledger(KIMI, None, PRO, parallel, settings())
    if parallel.ep > 1:
        with pytest.raises(CheckpointError, match="ep 2, but the model has no experts"):
            Parallel(tp=8, ep=2).check(LLAMA)


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5, math.nan, math.inf])
def test_fractions_that_make_no_sense(value: float) -> None:
    with pytest.raises(CheckpointError, match="mem_fraction_static"):
        settings(mem_fraction_static=value)


def test_the_parts_of_a_pipeline_and_of_attention_groups() -> None:
    inventory = estimate(KIMI)
    whole = rank_bytes(inventory, KIMI, Parallel(), Loading())
    stages = [rank_bytes(inventory, KIMI, Parallel(pp=4), Loading(), stage) for stage in range(4)]
    vision = sum(size for slot, size in inventory.bytes.items() if "vision" in slot.role.value)
    assert sum(stages) == pytest.approx(whole + 3 * vision, rel=1e-6)  # every stage builds the tower
    grouped = rank_bytes(inventory, KIMI, Parallel(tp=8, dp=8), Loading())
    divided = rank_bytes(inventory, KIMI, Parallel(tp=8), Loading())
    attention = sum(
        size for slot, size in inventory.bytes.items() if slot.role.value in ("attention", "latent up-projection")
    )
    assert grouped > divided + attention * 7 / 8


def test_online_quantization_shrinks_the_linear_layers_only() -> None:
    bare = estimate(LLAMA)
    wide = rank_bytes(bare, LLAMA, Parallel(tp=2), Loading())
    shrunk = rank_bytes(bare, LLAMA, Parallel(tp=2), Loading(online="fp8"))
    tables = 2 * LLAMA.vocab * LLAMA.hidden * 2 // 2
    assert shrunk == pytest.approx(tables + (wide - tables) / 2, rel=0.01)


def test_a_context_that_was_asked_for_must_fit() -> None:
    made = memory.ledger(KIMI, None, PRO, Parallel(tp=8), settings(), context=131072)
    assert made.verdict == "does not fit"
    assert made.least_fraction is not None
    again = replace(made.settings, mem_fraction_static=made.least_fraction)
    fits = memory.ledger(KIMI, None, PRO, Parallel(tp=8), again, context=131072)
    assert fits.kv_tokens >= 131072
    assert fits.requests >= 1
    less = replace(again, mem_fraction_static=made.least_fraction - 0.001)
    assert memory.ledger(KIMI, None, PRO, Parallel(tp=8), less, context=131072).kv_tokens < 131072


def test_known_free_memory_wins() -> None:
    made = memory.ledger(
        KIMI, None, PRO, Parallel(tp=8), settings("0.5.9", kv_cache_dtype="bf16"),
        free_start=int(94.14 * GIB), free_after_load=int(21.82 * GIB),
    )  # fmt: skip
    assert made.kv_tokens == pytest.approx(4578, rel=0.02)


def test_weights_that_are_larger_than_the_board() -> None:
    made = memory.ledger(KIMI, None, find("RTX 5090"), Parallel(tp=8), settings())
    assert made.verdict == "does not fit"
    assert "the weights alone take" in made.reasons[0]
    assert made.kv_tokens == made.requests == 0
    assert made.least_fraction is None


def test_alternatives_are_full_ledgers() -> None:
    made = settings("0.5.23", draft=MHA_DRAFT, speculative_algorithm="EAGLE3")
    tried = memory.alternatives(KIMI, MHA_DRAFT, PRO, Parallel(tp=8), made)
    by_title = {alternative.title: alternative for alternative in tried}
    assert set(by_title) >= {"FP8 KV cache", "experts apart (EP)", "without speculation", "graphs up to 64"}
    assert all(alternative.ledger or alternative.problem for alternative in tried)
    ours = memory.ledger(KIMI, MHA_DRAFT, PRO, Parallel(tp=8), made)
    graphs = by_title["graphs up to 64"].ledger
    assert graphs is not None
    assert graphs.settings.mem_fraction_static > ours.settings.mem_fraction_static  # the default follows
    without = by_title["without speculation"].ledger
    assert without is not None
    assert without.free_after_load > ours.free_after_load
    assert without.least_fraction is not None
    assert ours.least_fraction is not None
    assert without.least_fraction < ours.least_fraction


def test_a_ledger_is_plain_json() -> None:
    made = memory.ledger(
        QWEN4, None, PRO, Parallel(tp=8), settings(target=QWEN4, speculative_algorithm="NEXTN", max_running_requests=16)
    )
    data = json.loads(json.dumps(made.to_json()))
    assert data["weights"] == "estimate from config.json"
    assert {line["name"] for line in data["lines"]} >= {
        "weights target", "weights draft", "KV pool target", "linear-attention states", "request table", "CUDA graphs",
        "multimodal caches", "activations and workspaces",
    }  # fmt: skip
    assert data["kv_tokens"] == made.kv_tokens > 0


def test_lines_add_up() -> None:
    made = memory.ledger(KIMI, None, PRO, Parallel(tp=8), settings(mem_fraction_static=0.9))
    load = sum(line.bytes for line in made.lines if line.group == "load")
    pool = sum(line.bytes for line in made.lines if line.group == "pool")
    slack = sum(line.bytes for line in made.lines if line.group == "slack")
    assert made.free_start - load == made.free_after_load
    assert made.free_start == pytest.approx(load + pool + slack + made.left, abs=made.cell.full + 1024)


def test_settings_of_the_engine() -> None:
    effective = {
        "mem_fraction_static": 0.85,
        "kv_cache_dtype": "fp8_e4m3",
        "tp_size": 8,
        "attn_dp_size": 4,
        "speculative_algorithm": "NEXTN",
        "speculative_num_draft_tokens": 4,
        "model_path": "m",
        "speculative_draft_model_path": "m",
        "cuda_graph_config": {"decode": {"backend": "full", "max_bs": 48}, "prefill": {"backend": "disabled"}},
        "dsa_prefill_backend": "flashinfer_sparse_mla",
        "dsa_decode_backend": "flashinfer_sparse_mla",
    }
    made = from_resolved(effective, releases.parse("0.5.23+bw.1"), context=4096)
    assert (made.decode_max_bs, made.prefill_graph, made.draft_is_mtp, made.sparse_scaled) == (48, False, True, True)
    assert (made.algorithm, made.context_length, made.source, made.release.patched) == ("EAGLE", 4096, "engine", True)
    assert parallel_of(effective) == Parallel(tp=8, dp=4)


def test_a_policy_that_chooses_steps_has_buffers_for_each() -> None:
    adaptive = {"speculative_adaptive": True, "speculative_adaptive_policy": "goodput"}
    effective = {
        "mem_fraction_static": 0.85,
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": 3,
        "speculative_num_draft_tokens": 4,
        "speculative_draft_model_path": "draft",
        "attention_backend": "flashinfer",
        "cuda_graph_config": {"decode": {"backend": "full", "max_bs": 16}},
    }

    def buffers(target: ModelShape, **more: object) -> int:
        made = from_resolved(effective | more, releases.parse("0.5.23+bw.5"), context=1000)
        return overhead.speculative_graph_buffers(target, made)

    dense = replace(KIMI, latent=None)
    assert from_resolved(effective | adaptive, releases.parse("0.5.23+bw.5")).choices == (0, 1, 3)
    # Verify and draft-extend of 4 rows; two of the draft's three steps have backends, its buffer has three.
    assert buffers(dense) == 16 * 1000 * (2 * 4 * 5 + 3 * 4)
    # The same of 1 and 2 rows; decode graphs of one and a catch-up of 16.
    assert buffers(dense, **adaptive) == 16 * 1000 * ((2 * (1 + 2 + 4) + 1 + 16) * 5 + 3 * 4)
    assert buffers(KIMI) == buffers(dense, attention_backend="triton") == 0
    assert buffers(dense, decode_attention_backend="triton") == 0
    fixed, chosen = (from_resolved(effective | more, releases.parse("0.5.23+bw.5")) for more in ({}, adaptive))
    assert (overhead.draft_upkeep(KIMI, fixed, 8), overhead.draft_upkeep(KIMI, chosen, 8)) == (0, 8 * 16 * 3 * 7168 * 2)


# From the research notes: what the formulas give on boards of 32,607, 97,887 and 183,359 MiB.
@pytest.mark.parametrize(
    ("mib", "tp", "version", "algorithm", "expected"),
    [
        (32607, 1, "0.5.9", None, 0.885), (32607, 8, "0.5.9", "EAGLE3", 0.791), (32607, 2, "0.5.23", None, 0.773),
        (97887, 8, "0.5.9", None, 0.848), (97887, 4, "0.5.9", "EAGLE3", 0.833), (97887, 1, "0.5.23", None, 0.858),
        (183359, 8, "0.5.9", "EAGLE3", 0.841), (183359, 8, "0.5.23", None, 0.849),
    ],
)  # fmt: skip
def test_default_fractions(mib: int, tp: int, version: str, algorithm: str | None, expected: float) -> None:
    board = Board("board", "sm120", mib)
    made = fraction.restate(
        {"speculative_algorithm": algorithm}, LLAMA, None, board, Parallel(tp=tp), releases.parse(version)
    )
    assert made.mem_fraction_static == expected


@pytest.mark.parametrize(
    ("version", "numbers", "patched"),
    [
        ("0.5.23+bw.1", (0, 5, 23), True),
        ("v0.5.16-cu130", (0, 5, 16), False),
        ("0.5.15.post1", (0, 5, 15), False),
        ("main", (0, 5, 23), False),
    ],
)
def test_versions(version: str, numbers: tuple[int, int, int], patched: bool) -> None:
    release = releases.parse(version)
    assert (release.version, release.patched) == (numbers, patched)


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    ep=st.sampled_from([1, 2, 4, 8]),
    dp=st.sampled_from([1, 2, 8]),
    pp=st.integers(1, 3),
    fraction_asked=st.floats(0.01, 0.99),
    dtype=st.sampled_from(["auto", "fp8_e4m3", "nvfp4"]),
    page=st.sampled_from([1, 16, 64]),
    mib=st.integers(8_000, 300_000),
    version=st.sampled_from(["0.5.9", "0.5.12", "0.5.14", "0.5.16", "0.5.18", "0.5.23", "0.5.23+bw.1"]),
    algorithm=st.sampled_from([None, "EAGLE", "NGRAM", "STANDALONE", "DFLASH"]),
    target=st.sampled_from([KIMI, QWEN, GLM5, LLAMA]),
)
def test_any_launch_has_a_verdict(
    tp: int, ep: int, dp: int, pp: int, fraction_asked: float, dtype: str, page: int, mib: int, version: str,
    algorithm: str | None, target: ModelShape,
) -> None:  # fmt: skip
    board, parallel = Board("board", "sm120", mib), Parallel(tp, ep, pp, dp)
    asked = {
        "mem_fraction_static": fraction_asked,
        "kv_cache_dtype": dtype,
        "page_size": page,
        "speculative_algorithm": algorithm,
    }
    with suppress(CheckpointError):
        made = memory.ledger(
            target, MHA_DRAFT if algorithm else None, board, parallel,
            fraction.restate(asked, target, MHA_DRAFT if algorithm else None, board, parallel, releases.parse(version)),
        )  # fmt: skip
        assert made.verdict in ("fits", "tight", "does not fit")
        assert bool(made.reasons) == (made.verdict != "fits")
        assert made.kv_tokens % page == 0
        assert made.kv_tokens >= 0
        assert all(line.bytes >= 0 for line in made.lines)
