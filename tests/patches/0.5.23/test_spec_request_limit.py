"""The request limit of a speculative run is known before memory is reserved for its CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.patches.model_shapes import model_config
from tests.patches.resolver import B200, RTX_PRO_6000, resolve

DRAFT_OF = {
    "deepseek-v3": "eagle3-7168",
    "kimi-k2.5-int4": "eagle3-7168",
    "glm-4.6-nvfp4": "eagle3-5120",
    "minimax-m2": "eagle3-3072",
}
STOCK_GRAPHS = r"decode graphs to 512, but requests to (48|256)"


def speculative(parent: Path, target: str = "deepseek-v3", algorithm: str = "EAGLE3", **flags: Any) -> dict[str, Any]:
    arguments = {"model_path": model_config(parent, target), "tp_size": 8, "speculative_algorithm": algorithm}
    if algorithm in ("EAGLE3", "STANDALONE"):
        arguments["speculative_draft_model_path"] = model_config(parent, DRAFT_OF[target])
    return arguments | flags


@pytest.mark.stock_failure(AssertionError, r"mem_fraction_static 0\.644")
def test_memory_for_graphs_of_requests_that_never_run_is_not_reserved(tmp_path: Path) -> None:
    view = resolve("sm120", RTX_PRO_6000, **speculative(tmp_path, attn_dp_size=8))
    assert view.mem_fraction_static >= 0.82, f"mem_fraction_static {view.mem_fraction_static}"
    assert view.cuda_graph_config.decode.max_bs == max(view.cuda_graph_config.decode.bs) == 48


@pytest.mark.stock_failure(AssertionError, STOCK_GRAPHS)
@pytest.mark.parametrize(("arch", "memory"), [("sm120", RTX_PRO_6000), ("sm100", B200)])
@pytest.mark.parametrize("target", list(DRAFT_OF))
def test_graphs_end_at_the_request_limit(target: str, arch: str, memory: int, tmp_path: Path) -> None:
    assert_graphs_end_at_the_limit(resolve(arch, memory, **speculative(tmp_path, target)), 48)


@pytest.mark.stock_failure(AssertionError, STOCK_GRAPHS)
@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN", "nextn", "STANDALONE", "NGRAM"])
def test_every_algorithm_with_a_default_has_it_in_time(algorithm: str, tmp_path: Path) -> None:
    assert_graphs_end_at_the_limit(
        resolve("sm120", RTX_PRO_6000, **speculative(tmp_path, algorithm=algorithm)),
        48,
    )


@pytest.mark.stock_failure(AssertionError, STOCK_GRAPHS)
def test_the_default_of_a_model_wins(tmp_path: Path) -> None:
    steps = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    view = resolve("sm100", B200, **speculative(tmp_path, "deepseek-v4", "EAGLE", **steps))
    assert_graphs_end_at_the_limit(view, 256)


def assert_graphs_end_at_the_limit(view: Any, limit: int) -> None:
    graphs, requests = view.cuda_graph_config.decode.max_bs, view.max_running_requests
    assert requests == limit
    assert graphs == requests, f"decode graphs to {graphs}, but requests to {requests}"


def test_an_explicit_limit_wins(tmp_path: Path) -> None:
    view = resolve("sm120", RTX_PRO_6000, **speculative(tmp_path, max_running_requests=200))
    assert_graphs_end_at_the_limit(view, 200)


def test_explicit_graph_sizes_win(tmp_path: Path) -> None:
    view = resolve("sm120", RTX_PRO_6000, **speculative(tmp_path, cuda_graph_max_bs_decode=128))
    assert view.cuda_graph_config.decode.max_bs == 128
    assert view.max_running_requests == 48


@pytest.mark.parametrize(("arch", "memory"), [("sm120", RTX_PRO_6000), ("sm100", B200), ("sm90", 143_771)])
def test_a_run_without_speculation_is_as_before(arch: str, memory: int, tmp_path: Path) -> None:
    view = resolve(arch, memory, model_path=model_config(tmp_path, "deepseek-v3"), tp_size=8, attn_dp_size=8)
    assert view.max_running_requests is None
    assert view.cuda_graph_config.decode.max_bs == 512


def test_a_plugin_algorithm_keeps_its_own_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative import spec_registry
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    class Guess(spec_registry.CustomSpecAlgo):
        def handle_server_args(self, server_args: Any) -> None:
            server_args.max_running_requests = 7

    monkeypatch.setattr(spec_registry, "_REGISTRY", dict(spec_registry._REGISTRY))
    SpeculativeAlgorithm.register("GUESS", supports_overlap=True, spec_class=Guess)(lambda _args: object)
    view = resolve("sm120", RTX_PRO_6000, **speculative(tmp_path, algorithm="GUESS"))
    assert view.max_running_requests == 7
