"""Weights and KV tokens from the headers of large models against what published logs say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from sglang_bw.host.boards import find
from sglang_bw.plan import checkpoint, fraction, memory, overhead, releases
from sglang_bw.plan.config import read_shape
from sglang_bw.plan.estimate import estimate
from sglang_bw.plan.shapes import Parallel
from sglang_bw.plan.split import Loading, rank_bytes, tables_bytes
from tests.patches.model_shapes import TARGETS, eagle3_draft
from tests.plan import synthetic

GIB = 1 << 30

Tensors = Callable[[], Iterable[synthetic.Entry]]


def unquantized_attention(name: str) -> dict[str, Any]:
    """A configuration whose quantization leaves out what the published files leave out."""
    config = TARGETS[name]
    ignored = ["lm_head", "*self_attn*", "*linear_attn*", "*shared_expert*", "mtp*"]
    return {**config, "quantization_config": {**config["quantization_config"], "ignore": ignored}}


FP8_CHANNELS = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
    "ignore": ["lm_head"],
}
GLM47 = {**TARGETS["glm-4.6"], "quantization_config": FP8_CHANNELS}
QWEN35 = unquantized_attention("qwen3.5-nvfp4")

# Weights per GPU in GiB: the difference of the free memory that the engine logs around the load. Sources: the logs of
# magik6k/glm-kimi-sm120-rtx6000bw (Kimi, GLM), InferenceX's scripts (Qwen3.5), rtx6kpro's minimax-m25.md (MiniMax).
LOGGED = [
    pytest.param(TARGETS["kimi-k2.5-int4"], lambda: synthetic.kimi(synthetic.int4), 8, 72.33, id="kimi-k2.5-int4"),
    pytest.param(
        TARGETS["kimi-k2.5-nvfp4"], lambda: synthetic.kimi(synthetic.nvfp4, vision=False), 8, 73.87, id="kimi-k2-nvfp4"
    ),
    pytest.param(GLM47, synthetic.glm47, 8, 41.90, id="glm-4.7-fp8"),
    pytest.param(QWEN35, synthetic.qwen35, 4, 56.12, id="qwen3.5-397b-nvfp4"),
    pytest.param(TARGETS["minimax-m2"], synthetic.minimax, 4, 53.75, id="minimax-m2.5-fp8"),
]


@pytest.mark.parametrize(("config", "tensors", "tp", "logged"), LOGGED)
def test_headers_and_estimate_against_logs(
    config: dict[str, Any], tensors: Tensors, tp: int, logged: float, tmp_path: Path
) -> None:
    model = checkpoint.read(str(synthetic.write(tmp_path / "model", config, tensors())))
    assert model.inventory.measured
    parallel = Parallel(tp=tp)
    held = rank_bytes(model.inventory, model.shape, parallel, Loading()) + overhead.LOADER_REST
    assert held / GIB == pytest.approx(logged, rel=0.05)
    if model.shape.mtp_layers and tp == 4:
        # With the MTP head, which brings an embedding and an output head of its own: 60.17 GiB are logged.
        head = rank_bytes(model.inventory, model.shape, parallel, Loading(), part="mtp")
        tables = sum(tables_bytes(model.shape, parallel, Loading()))
        assert (head + tables) / GIB == pytest.approx(60.17 - 56.12, rel=0.05)
    guessed = rank_bytes(estimate(model.shape), model.shape, parallel, Loading()) + overhead.LOADER_REST
    assert guessed == pytest.approx(held, rel=0.02)


def test_kv_tokens_from_headers_alone(tmp_path: Path) -> None:
    """GLM-4.7-FP8 on 8 RTX PRO 6000: 864,247 tokens in the log."""
    model = checkpoint.read(str(synthetic.write(tmp_path / "model", GLM47, synthetic.glm47())))
    made = planned(model, 8, "0.5.9", kv_cache_dtype="bf16")
    assert made.settings.mem_fraction_static == 0.848  # as the log prints it
    assert made.kv_tokens == pytest.approx(864_247, rel=0.05)


def planned(model: checkpoint.Checkpoint, gpus: int, version: str, **asked: Any) -> memory.MemoryLedger:
    board = find("RTX PRO 6000")
    parallel = Parallel(tp=gpus, ep=asked.pop("ep_size", 1))
    draft = read_shape(eagle3_draft(7168)) if asked.get("speculative_algorithm") else None
    settings = fraction.restate(asked, model.shape, draft, board, parallel, releases.parse(version))
    weights = memory.Weights(model.inventory, estimate(draft) if draft else None)
    return memory.ledger(model.shape, draft, board, parallel, settings, weights=weights)


def test_the_first_system(tmp_path: Path) -> None:
    """Kimi-K2.5 INT4 on 8 RTX PRO 6000, SGLang 0.5.9: what the days were lost to."""
    entries = synthetic.kimi(synthetic.int4)
    model = checkpoint.read(str(synthetic.write(tmp_path / "model", TARGETS["kimi-k2.5-int4"], entries)))
    divided = planned(model, 8, "0.5.9")
    assert divided.settings.mem_fraction_static == pytest.approx(0.7714564, abs=1e-6)
    assert divided.free_after_load / GIB == pytest.approx(21.7, abs=0.4)
    assert divided.verdict == "tight"

    apart = {"ep_size": 8, "moe_a2a_backend": "flashinfer"}
    experts = planned(model, 8, "0.5.9", **apart)
    assert experts.free_after_load / GIB == pytest.approx(16.3, abs=0.4)
    assert experts.verdict == "does not fit"
    assert experts.least_fraction is not None
    assert 0.80 < experts.least_fraction < 0.85
    assert "--mem-fraction-static" in experts.reasons[0]

    higher = planned(model, 8, "0.5.9", mem_fraction_static=0.90, **apart)
    assert higher.verdict == "fits"
    assert higher.kv_tokens > 90_000

    speculative = planned(model, 8, "0.5.9", speculative_algorithm="EAGLE3")
    assert speculative.settings.mem_fraction_static == pytest.approx(0.75235, abs=1e-4)
    assert speculative.verdict == "does not fit"
