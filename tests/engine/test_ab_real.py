"""`ab` on real engines: the tiny pair on the CPU, with and without speculation, started by it or already running."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sglang_bw.ledger.record import RunRecord
from sglang_bw.ledger.runfile import read
from tests.conftest import CHECKOUT, EngineTrees
from tests.engine.conftest import RunningServer, _serving, tool_environment
from tests.launch.serving import free_port

pytestmark = pytest.mark.engine
PROXY = CHECKOUT / "tests" / "experiment" / "pace_proxy.py"


def ab(record: Path, tree: Path, *arguments: str, codes: tuple[int, ...] = (0,)) -> RunRecord:
    command = [sys.executable, "-m", "sglang_bw", "ab", "--record", str(record), "--prompts", "tiny", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=tool_environment(tree))
    assert done.returncode in codes, done.stdout + done.stderr
    return read(record)


def test_two_running_servers(
    chain: RunningServer, baseline: RunningServer, engine_trees: EngineTrees, tmp_path: Path
) -> None:
    """Everything that the real API gives arrives: ids, usage, accept length, histogram, KV use, what differs."""
    servers = ["--url", baseline.url, "--url", chain.url]
    load = ["--count", "6", "--max-tokens", "32", "--rounds", "4", "--concurrency", "1,4", "--ignore-eos"]
    run = ab(tmp_path / "run.jsonl", engine_trees.patched, *servers, *load, codes=(0, 74))
    assert run.outcome
    assert run.outcome.failure is None
    for ratio in run.outcome.ratios:
        assert ratio.b.accept_length
        assert ratio.b.accept_length >= 2.5
        assert len(ratio.b.histogram) == 4
        assert ratio.a.accept_length is None
        assert ratio.round_cost
        assert ratio.value > 1  # half the machine away, a verify pass still saves more than two decode steps
    assert {row.output_tokens for block in run.blocks for row in block.rows} == {32}
    assert run.outcome.outputs
    assert (run.outcome.outputs.compared, run.outcome.outputs.different) == (12, 0)
    assert run.difference["speculative_num_steps"] == (None, 3)
    assert "port" not in run.difference
    assert [arm.kv_tokens for arm in run.arms] == [16384, 16384]
    assert [arm.graphs for arm in run.arms] == [False, False]
    assert any(block.kv_use is not None for block in run.blocks)


def test_a_prompt_beyond_the_context(chain: RunningServer, engine_trees: EngineTrees, tmp_path: Path) -> None:
    servers = ["--url", chain.url, "--url", chain.url]
    run = ab(tmp_path / "run.jsonl", engine_trees.patched, *servers, "--prompts", "long", codes=(72,))
    assert run.outcome
    assert run.outcome.failure == "prompts"


@contextlib.contextmanager
def behind_a_proxy(server: RunningServer, factor: float, token: int, other: int) -> Iterator[str]:
    """Yield the address of a server that takes ``factor`` times as long, and says one token for another."""
    port = server.url.rpartition(":")[2]
    command = [sys.executable, str(PROXY), port, str(factor), str(token), str(other)]
    proxy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert proxy.stdout
        yield f"http://127.0.0.1:{proxy.stdout.readline().strip()}"
    finally:
        proxy.kill()
        proxy.wait()


def test_a_planted_difference_is_found(chain: RunningServer, engine_trees: EngineTrees, tmp_path: Path) -> None:
    """B is A, but says 102 (an f) for every 101 (an e)."""
    with behind_a_proxy(chain, 1.0, 101, 102) as behind:
        servers = ["--url", chain.url, "--url", behind]
        load = ["--max-tokens", "24", "--count", "4", "--rounds", "2"]
        run = ab(tmp_path / "run.jsonl", engine_trees.patched, *servers, *load, codes=(0, 74))
    assert run.outcome
    assert run.outcome.outputs
    assert run.outcome.outputs.different >= 1
    assert run.outcome.outputs.unsteady == 0
    first = run.outcome.outputs.first
    assert first
    assert (first.unit, first.a.split()[0], first.b.split()[0]) == ("token", "101", "102")
    assert "101" not in first.before.split()


@pytest.mark.slow
def test_both_arms_are_started_checked_and_stopped(engine_trees: EngineTrees, tmp_path: Path) -> None:
    port = free_port()
    arguments = ["tiny", "--no-spec", "--device", "cpu", "--port", str(port), "--one-at-a-time"]
    tree = ["--engine-tree", str(engine_trees.patched)]
    load = ["--count", "4", "--max-tokens", "24", "--rounds", "2"]
    run = ab(tmp_path / "run.jsonl", engine_trees.patched, *arguments, *tree, *load, codes=(0, 74))
    assert [arm.speculation for arm in run.arms] == [None, "EAGLE3, 3 steps, topk 1, 4 draft tokens"]
    assert [block.arm for block in run.blocks] == ["A", "B", "B", "A"]
    assert run.arms[0].engine.tree
    assert len(run.arms[0].engine.patches) > 20
    for arm in run.arms:
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{arm.url}/health", timeout=2, trust_env=False)


@pytest.fixture(scope="module")
def twin(engine_trees: EngineTrees, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A second server of the same recipe."""
    yield from _serving(engine_trees.patched, tmp_path_factory.mktemp("twin"))


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_a_against_a(chain: RunningServer, twin: RunningServer, engine_trees: EngineTrees, tmp_path: Path) -> None:
    """Twenty experiments without an effect: at least 17 intervals contain 1, half of them within 5 %."""
    script = [sys.executable, str(CHECKOUT / "scripts" / "null_experiments.py"), "--out", str(tmp_path)]
    load = ["--load", "--count 12 --max-tokens 48 --within 4% --budget 150s"]  # other programs may be running
    done = subprocess.run(
        [*script, "--url", chain.url, "--url", twin.url, *load],
        capture_output=True,
        text=True,
        env=tool_environment(engine_trees.patched),
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_planted_slowdown_is_found(chain: RunningServer, engine_trees: EngineTrees, tmp_path: Path) -> None:
    """B is A with time stretched by 10 %: half a minute on idle cores."""
    with behind_a_proxy(chain, 1 / 0.9, 101, 101) as behind:
        servers = ["--url", chain.url, "--url", behind]
        load = ["--max-tokens", "48", "--count", "8", "--within", "3%", "--budget", "300s"]
        run = ab(tmp_path / "run.jsonl", engine_trees.patched, *servers, *load, codes=(0, 74))
    assert run.outcome
    (ratio,) = run.outcome.ratios
    assert ratio.verdict == "slower"
    assert ratio.low < 0.9 < ratio.high or abs(ratio.value - 0.9) < 0.03
