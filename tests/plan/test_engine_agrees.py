"""The restated formulas against the installed engine's own code, run with the shapes of large models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_bw.host.boards import Board
from sglang_bw.plan import fraction, kv, releases
from sglang_bw.plan.config import read_shape
from sglang_bw.plan.settings import EngineSettings
from sglang_bw.plan.shapes import Parallel
from tests.patches.model_shapes import DRAFTS, TARGETS, eagle3_draft

ROOT = Path(__file__).parents[2]
CHAIN = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
BOARDS = {"sm120": 97887, "sm100": 183359, "sm90": 143771}


def defaults(
    target: str, arch: str = "sm120", memory: int | None = None, draft: str = "", **flags: Any
) -> dict[str, Any]:
    found = {"ask": "defaults", "arch": arch, "memory_mib": memory or BOARDS[arch], "target": target, "flags": flags}
    return found | ({"draft": draft} if draft else {})


def pool(target: str, budget: float, page: int = 1, draft: str = "", **flags: Any) -> dict[str, Any]:
    found = {"ask": "pool", "target": target, "budget_gib": budget, "page_size": page, "flags": flags}
    return found | ({"draft": draft} if draft else {})


CASES = [
    defaults("kimi-k2.5-int4", tp_size=8),
    defaults("kimi-k2.5-int4", tp_size=8, draft="eagle3-7168", **CHAIN),
    defaults("kimi-k2.5-int4", "sm100", tp_size=8),
    defaults("llama-3.3-70b", memory=32607, tp_size=8),
    defaults("llama-3.3-70b", memory=32607, tp_size=2),
    defaults("llama-3.3-70b", memory=46068, tp_size=2),
    defaults("llama-3.3-70b", "sm90", tp_size=1),
    defaults("glm-4.6-nvfp4", "sm100", tp_size=8, max_running_requests=64),
    defaults("qwen3.5-nvfp4", tp_size=4),
    defaults("qwen3-moe-fp8", tp_size=4, chunked_prefill_size=4096, cuda_graph_max_bs_decode=32),
    defaults("minimax-m2", tp_size=4, disable_cuda_graph=True),
    pool("kimi-k2.5-int4", 12.5, 64, tp_size=8),
    pool("kimi-k2.5-int4", 12.5, 64, "eagle3-7168", tp_size=8, **CHAIN),
    pool("kimi-k2.5-int4", 12.5, 64, "kimi-eagle3-mla", tp_size=8, **CHAIN),
    pool("kimi-k2.5-int4", 9.0, 1, tp_size=8, kv_cache_dtype="fp8_e4m3"),
    pool("glm-4.6", 40.0, 16, "eagle3-5120", tp_size=8, **CHAIN),
    pool("glm-5", 20.5, 64, tp_size=8),
    pool("minimax-m2", 20.0, 1, tp_size=4),
    pool("minimax-m2", 20.0, 1, tp_size=16),
    pool("qwen3.5", 12.5, 1, tp_size=4),
    pool("llama-3.3-70b", 30.0, 1, "eagle3-8192", tp_size=2, **CHAIN),
]


def name(case: dict[str, Any]) -> str:
    flags = "-".join(str(value) for key, value in case["flags"].items() if not key.startswith("speculative"))
    return "-".join([case["ask"], case["target"], case.get("draft", ""), case.get("arch", ""), flags])


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The engine's own numbers, all from one process."""
    file = tmp_path_factory.mktemp("engine") / "cases.json"
    file.write_text(json.dumps(CASES))
    command = [sys.executable, "-m", "tests.plan.engine_facts", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(answers) == len(CASES)
    return answers


@pytest.mark.engine
@pytest.mark.parametrize("number", range(len(CASES)), ids=[name(case) for case in CASES])
def test_the_engine_comes_to_the_same(number: int, answers: list[dict[str, Any]]) -> None:
    case = CASES[number]
    ours = our_defaults(case) if case["ask"] == "defaults" else our_pool(case)
    assert ours == answers[number]


def shapes(case: dict[str, Any]) -> tuple[Any, Any]:
    draft = case.get("draft", "")
    config = eagle3_draft(int(draft[7:])) if draft.startswith("eagle3-") else DRAFTS.get(draft)
    return read_shape(TARGETS[case["target"]]), read_shape(config) if config else None


def our_defaults(case: dict[str, Any]) -> dict[str, Any]:
    target, draft = shapes(case)
    board = Board("the board", case["arch"], case["memory_mib"])
    parallel = Parallel(tp=case["flags"]["tp_size"])
    made = fraction.restate(case["flags"], target, draft, board, parallel, installed())
    return {
        "mem_fraction_static": pytest.approx(made.mem_fraction_static, abs=1e-9),
        "chunked_prefill_size": made.chunked_prefill_size,
        "decode_max_bs": made.decode_max_bs or fraction.tier(case["memory_mib"], parallel.tp, installed())[1],
        "prefill_graph": made.prefill_graph,
        "max_running_requests": made.max_running_requests,
    }


def our_pool(case: dict[str, Any]) -> dict[str, Any]:
    target, draft = shapes(case)
    flags = case["flags"]
    settings = EngineSettings(
        release=installed(),
        mem_fraction_static=0.5,
        kv_cache_dtype=flags.get("kv_cache_dtype", "bf16"),
        page_size=case["page_size"],
        algorithm=flags.get("speculative_algorithm"),
        draft_tokens=flags.get("speculative_num_draft_tokens", 0),
    )
    made = kv.pool(case["budget_gib"] * 2**30, target, draft, Parallel(tp=flags["tp_size"]), settings)
    return {
        "cell": pytest.approx(made.cell.priced(settings.swa_ratio)),
        "tokens": made.tokens,
        "slots": made.states.slots if made.states else None,
    }


def installed() -> releases.Release:
    from importlib import metadata

    return releases.parse(metadata.version("sglang"))
