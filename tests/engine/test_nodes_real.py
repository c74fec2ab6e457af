"""Two nodes on one machine: the same command twice, with rank 0 and 1, tensor parallelism over gloo between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.conftest import EngineTrees
from tests.engine.conftest import _end, tool_environment
from tests.launch.serving import free_port, until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

START_S = 900.0
# torch from PyPI brings NCCL, and with it the engine would look for a GPU for every group of ranks.
NO_NCCL = {"SGLANG_NCCL_SO_PATH": os.devnull}


def test_two_nodes_serve_one_model(engine_trees: EngineTrees, tmp_path: Path) -> None:
    head = f"127.0.0.1:{free_port()}"
    cores = sorted(os.sched_getaffinity(0))
    # Without it the engine wants a NUMA node for each rank.
    bind = f"{cores[0]}|{cores[-1]}"
    nodes: list[tuple[subprocess.Popen[str], int]] = []
    try:
        for rank in (0, 1):
            port = free_port()
            command = [sys.executable, "-m", "sglang_bw", "serve", "tiny", "--device", "cpu", "--json"]
            command += ["--engine-tree", str(engine_trees.patched), "--port", str(port), "--no-warmup"]
            command += ["--log", str(tmp_path / f"engine-{rank}.log"), "--startup-timeout", str(START_S)]
            command += ["--nodes", "2", "--node-rank", str(rank), "--head", head, "--", "--tp-size", "2"]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=(tmp_path / f"out-{rank}.txt").open("w"),
                stderr=(tmp_path / f"err-{rank}.txt").open("w"),
                env={**tool_environment(engine_trees.patched), "SGLANG_CPU_OMP_THREADS_BIND": bind, **NO_NCCL},
                text=True,
            )
            nodes.append((process, port))

        def ready(rank: int) -> bool:
            assert nodes[rank][0].poll() is None, (tmp_path / f"err-{rank}.txt").read_text()
            return '"ready"' in (tmp_path / f"out-{rank}.txt").read_text()

        until(lambda: ready(0) and ready(1), START_S, "both nodes are ready")
        log = (tmp_path / "engine-1.log").read_text()
        assert "TP1" in log
        assert "TP0" not in log
        url = f"http://127.0.0.1:{nodes[0][1]}"
        info = httpx.get(f"{url}/server_info", timeout=60, trust_env=False).json()
        assert (info["tp_size"], info["nnodes"]) == (2, 2)
        prompt = "At the end of the winter, Lena left the meadow with"
        body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}}
        answer = httpx.post(f"{url}/generate", json=body, timeout=240, trust_env=False).json()
        assert answer["meta_info"]["completion_tokens"] == 32
        # The draft, on both ranks, guesses what the target says: a wrong sum over the ranks would show here.
        assert answer["meta_info"]["spec_verify_ct"] < 16
        assert httpx.get(f"http://127.0.0.1:{nodes[1][1]}/health", timeout=60, trust_env=False).status_code == 200
        assert json.loads((tmp_path / "out-1.txt").read_text().splitlines()[0])["event"] == "ready"
    finally:
        for process, _ in nodes:
            _end(process)
