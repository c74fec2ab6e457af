"""No CUDA graphs, and no memory for them, above the request limit of a launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.patches.engine_059 import resolve
from tests.patches.model_shapes import model_config
from tests.patches.resolver import B200, H200, RTX_PRO_6000

DRAFT_OF = {"deepseek-v3": "eagle3-7168", "kimi-k2.5-int4": "eagle3-7168", "glm-4.6": "eagle3-5120"}
STOCK_GRAPHS = r"graphs to 512, but requests to \d+"


def launch(parent: Path, target: str, **flags: Any) -> dict[str, Any]:
    arguments = {"model_path": model_config(parent, target), "tp_size": 8}
    if flags.get("speculative_algorithm") in ("EAGLE3", "STANDALONE"):
        arguments["speculative_draft_model_path"] = model_config(parent, DRAFT_OF[target])
    return arguments | flags


def assert_graphs_end_at_the_limit(args: Any, limit: int) -> None:
    graphs, requests = args.cuda_graph_max_bs, args.max_running_requests
    assert requests == limit
    assert graphs == requests, f"graphs to {graphs}, but requests to {requests}"
    assert max(args.cuda_graph_bs) == limit


@pytest.mark.stock_failure(AssertionError, r"mem_fraction_static 0\.639")
def test_memory_for_graphs_of_requests_that_never_run_is_not_reserved(tmp_path: Path) -> None:
    flags = launch(tmp_path, "deepseek-v3", speculative_algorithm="EAGLE3", dp_size=8, enable_dp_attention=True)
    args = resolve("sm120", RTX_PRO_6000, **flags)
    assert args.mem_fraction_static >= 0.82, f"mem_fraction_static {args.mem_fraction_static}"


@pytest.mark.stock_failure(AssertionError, STOCK_GRAPHS)
@pytest.mark.parametrize(("arch", "memory"), [("sm120", RTX_PRO_6000), ("sm100", B200), ("sm90", H200)])
@pytest.mark.parametrize("target", list(DRAFT_OF))
def test_a_speculative_run_knows_its_default_in_time(target: str, arch: str, memory: int, tmp_path: Path) -> None:
    args = resolve(arch, memory, **launch(tmp_path, target, speculative_algorithm="EAGLE3"))
    assert_graphs_end_at_the_limit(args, 48)


@pytest.mark.stock_failure(AssertionError, STOCK_GRAPHS)
@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN", "STANDALONE", "NGRAM"])
def test_so_does_every_algorithm(algorithm: str, tmp_path: Path) -> None:
    args = resolve("sm120", RTX_PRO_6000, **launch(tmp_path, "deepseek-v3", speculative_algorithm=algorithm))
    assert_graphs_end_at_the_limit(args, 48)


@pytest.mark.stock_failure(AssertionError, STOCK_GRAPHS)
@pytest.mark.parametrize("limit", [1, 48, 100, 500])  # 100 is none of the sizes that the engine generates
@pytest.mark.parametrize("algorithm", [None, "EAGLE3"])
def test_an_explicit_limit_caps_the_graphs(algorithm: str | None, limit: int, tmp_path: Path) -> None:
    flags = launch(tmp_path, "kimi-k2.5-int4", speculative_algorithm=algorithm, max_running_requests=limit)
    assert_graphs_end_at_the_limit(resolve("sm120", RTX_PRO_6000, **flags), limit)


@pytest.mark.parametrize("flags", [{"cuda_graph_max_bs": 100}, {"cuda_graph_bs": [1, 7, 100]}])
def test_explicit_graphs_win(flags: dict[str, Any], tmp_path: Path) -> None:
    speculative = launch(tmp_path, "deepseek-v3", speculative_algorithm="EAGLE3", **flags)
    args = resolve("sm120", RTX_PRO_6000, **speculative)
    assert args.max_running_requests == 48
    assert args.cuda_graph_max_bs == 100
    assert args.cuda_graph_bs == flags.get("cuda_graph_bs", args.cuda_graph_bs)


@pytest.mark.parametrize(("arch", "memory"), [("sm120", RTX_PRO_6000), ("sm100", B200), ("sm90", H200)])
@pytest.mark.parametrize("limit", [None, 4096])
def test_without_a_lower_limit_nothing_changes(limit: int | None, arch: str, memory: int, tmp_path: Path) -> None:
    args = resolve(arch, memory, **launch(tmp_path, "glm-4.6", max_running_requests=limit))
    assert args.max_running_requests == limit
    assert args.cuda_graph_max_bs == max(args.cuda_graph_bs) == 512
