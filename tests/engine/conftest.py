"""Real servers on the patched engine, each started once for the whole session, all at once.

Three of them, all of the recipe ``tiny``: ``chain`` (the recipe as it is) and ``tree`` (topk 4, 8 draft tokens) come
from ``sglang-bw serve``; ``baseline`` is the line that ``serve --no-spec --dry-run`` prints, pasted into a shell.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from sglang_bw import models
from tests.conftest import EngineTrees, engine_environment
from tests.launch.serving import alive, free_port, until

START_S = 300.0  # 20 s on an idle machine
TOKENS = 64
SERVE = [sys.executable, "-m", "sglang_bw", "serve", "tiny", "--device", "cpu"]

Answer = dict[str, Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move what uses the shared servers behind everything else, and what ends them behind that."""

    def place(item: pytest.Item) -> int:
        shares = bool(_servers(item))
        if shares:
            item.add_marker("alone")
        return shares + (item.get_closest_marker("last") is not None)

    items.sort(key=place)


def _servers(item: pytest.Item) -> set[str]:
    """Return the names of the shared servers that a test asks for; elsewhere `tree` is something else."""
    here = item.path.parent == Path(__file__).parent
    return SHARED.keys() & set(getattr(item, "fixturenames", ())) if here else set()


@dataclass
class RunningServer:
    """A server that answers.

    :ivar process: what the test started: `serve`, or the pasted line's shell.
    :ivar events: the JSON lines of `serve`, by event.
    """

    process: subprocess.Popen[str]
    url: str
    log: Path
    events: dict[str, dict[str, Any]]

    def family(self) -> list[int]:
        return [self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children(recursive=True))]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal to what the test started; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)

    def generate(self, prompt: str, tokens: int = TOKENS) -> Answer:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        response = httpx.post(
            f"{self.url}/generate", json={"text": prompt, "sampling_params": sampling}, timeout=120, trust_env=False
        )
        response.raise_for_status()
        answer: Answer = response.json()
        return answer

    def generate_all(self, prompts: list[str], *, concurrent: int) -> list[Answer]:
        with ThreadPoolExecutor(concurrent) as pool:
            return list(pool.map(self.generate, prompts))

    def most_at_once(self) -> int:
        """Return the largest decode batch that the engine has logged."""
        return max(map(int, re.findall(r"Decode batch.*#running-req: (\d+)", self.log.read_text())), default=0)


def tool_environment(tree: Path) -> dict[str, str]:
    environ = engine_environment(tree)
    del environ["PYTHONPATH"], environ["SGLANG_USE_CPU_ENGINE"]  # `serve` has to set both
    return environ


def start_serve(tree: Path, scratch: Path, *arguments: str) -> tuple[subprocess.Popen[str], int, Path]:
    """Start `serve tiny` on a free port; its JSON lines go to scratch/out.json."""
    port, log = free_port(), scratch / "engine.log"
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    command = [*SERVE, "--engine-tree", str(tree), "--port", str(port), "--log", str(log), "--json"]
    process = subprocess.Popen(
        [*command, *arguments[:cut], *arguments[cut:]],
        stdin=subprocess.DEVNULL,
        stdout=(scratch / "out.json").open("w"),
        stderr=(scratch / "err.txt").open("w"),
        env=tool_environment(tree),
        text=True,
    )
    return process, port, log


def _events(scratch: Path) -> dict[str, dict[str, Any]]:
    lines = (scratch / "out.json").read_text().splitlines(keepends=True)
    return {event["event"]: event for event in map(json.loads, (line for line in lines if line.endswith("\n")))}


Ready = Callable[[], RunningServer]


@contextlib.contextmanager
def _starting(tree: Path, scratch: Path, *arguments: str) -> Iterator[Ready]:
    """Start `serve tiny` and yield what waits until it is ready."""
    process, port, log = start_serve(tree, scratch, *arguments)

    def ready() -> RunningServer:
        until(lambda: "warm-up" in _events(scratch) or process.poll() is not None, START_S, "the engine is ready")
        assert process.poll() is None, (scratch / "err.txt").read_text()
        events = _events(scratch)
        assert events["ready"]["url"] == f"http://127.0.0.1:{port}"
        return RunningServer(process, events["ready"]["url"], log, events)

    try:
        yield ready
    finally:
        _end(process)


def _serving(tree: Path, scratch: Path, *arguments: str) -> Iterator[RunningServer]:
    with _starting(tree, scratch, *arguments) as ready:
        yield ready()


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Sixteen prompts that training never saw."""
    lines = models.TINY_PROMPTS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:16]]


@contextlib.contextmanager
def _chain(tree: Path, scratch: Path) -> Iterator[Ready]:
    with _starting(tree, scratch, "--", "--decode-log-interval", "4") as ready:
        yield ready


@contextlib.contextmanager
def _tree(tree: Path, scratch: Path) -> Iterator[Ready]:
    flags = ["--speculative-eagle-topk=4", "--speculative-num-draft-tokens", "8", "--decode-log-interval", "4"]
    flags.append("--enable-metrics")  # `watch` looks at one server with metrics, and at one without
    with _starting(tree, scratch, "--", *flags) as ready:
        yield ready


@contextlib.contextmanager
def _baseline(tree: Path, scratch: Path) -> Iterator[Ready]:
    """The printed `sglang serve` line, run by a shell with an `sglang` on its PATH."""
    port, log = free_port(), scratch / "engine.log"
    line = subprocess.run(
        [*SERVE, "--no-spec", "--dry-run", "--engine-tree", str(tree), "--port", str(port)],
        capture_output=True,
        text=True,
        check=True,
        env=tool_environment(tree),
    ).stdout
    script = scratch / "bin" / "sglang"
    script.parent.mkdir()
    script.write_text(f'#!{sys.executable}\nfrom sglang.cli.main import main\nif __name__ == "__main__":\n    main()\n')
    script.chmod(0o755)
    environ = tool_environment(tree)
    environ["PATH"] = os.pathsep.join([str(script.parent), environ["PATH"]])
    process = subprocess.Popen(
        ["bash", "-c", f"exec env {line}"],
        stdin=subprocess.DEVNULL,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        env=environ,
        text=True,
    )

    def ready() -> RunningServer:
        until(lambda: "fired up" in log.read_text() or process.poll() is not None, START_S, "the baseline is ready")
        assert process.poll() is None, log.read_text()[-2000:]
        return RunningServer(process, f"http://127.0.0.1:{port}", log, {})

    try:
        yield ready
    finally:
        _end(process)


SHARED = {"chain": _chain, "tree": _tree, "baseline": _baseline}


@pytest.fixture(scope="session")
def starting(
    request: pytest.FixtureRequest, engine_trees: EngineTrees, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Ready]]:
    """Start every shared server that a test of the session asks for: one start by itself leaves a core idle."""
    asked = set().union(*map(_servers, request.session.items))
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(start(engine_trees.patched, tmp_path_factory.mktemp(name)))
            for name, start in SHARED.items()
            if name in asked
        }


@pytest.fixture(scope="session")
def chain(starting: dict[str, Ready]) -> RunningServer:
    return starting["chain"]()


@pytest.fixture(scope="session")
def tree(starting: dict[str, Ready]) -> RunningServer:
    return starting["tree"]()


@pytest.fixture(scope="session")
def baseline(starting: dict[str, Ready]) -> RunningServer:
    return starting["baseline"]()


def assert_gone(pids: list[int], seconds: float = 20) -> None:
    until(lambda: not any(map(alive, pids)), seconds, "every process of the engine is gone")
