from __future__ import annotations

import os
from pathlib import Path

from sglang_bw.launch.server import default_log
from sglang_bw.launch.startup import LogTail, Phase, Startup

# What 0.5.23 logs, shortened; the CPU run has no graphs, the GPU run captures four kinds.
CPU = """\
[2026-11-29 16:57:25] server_args={'model_path': 'm/target'}
[2026-11-29 16:57:44] Load weight begin. avail mem=18.86 GB
[2026-11-29 16:57:45] Load weight end. elapsed=0.07 s, type=LlamaForCausalLM
[2026-11-29 16:57:45] Load weight begin. avail mem=18.85 GB
[2026-11-29 16:57:46] Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled'
[2026-11-29 16:57:46] INFO:     Application startup complete.
[2026-11-29 16:57:46] INFO:     Uvicorn running on http://127.0.0.1:31711 (Press CTRL+C to quit)
[2026-11-29 16:57:56] The server is fired up and ready to roll!
""".splitlines()
GPU = """\
[2026-11-29 16:57:44 TP0] Load weight begin. avail mem=138.10 GB
[2026-11-29 16:57:45 TP0] Capture target verify CUDA graph begin. backend=full, avail mem=20.00 GB
[2026-11-29 16:57:49 TP0] Capture target verify CUDA graph end. elapsed=4.00 s
[2026-11-29 16:57:49 TP0] Capture draft decode CUDA graph begin. backend=full
[2026-11-29 16:57:50] INFO:     Application startup complete.
[2026-11-29 16:57:56] The server is fired up and ready to roll!
""".splitlines()


def test_two_starts_in_one_second_have_a_log_each() -> None:
    assert default_log("tiny", 30000).stem.endswith(f"-tiny-30000-{os.getpid()}")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def phases(lines: list[str]) -> list[Phase]:
    startup, clock = Startup(clock=(clock := Clock())), clock
    begun = []
    for line in lines:
        clock.now += 1
        begun += startup.feed([line])
    assert sum(startup.seconds.values()) + startup.elapsed(startup.phase) == len(lines)
    return begun


def test_phases_on_a_cpu() -> None:
    assert phases(CPU) == [Phase.LOADING, Phase.WARMUP, Phase.READY]


def test_phases_on_a_gpu() -> None:
    assert phases(GPU) == [Phase.LOADING, Phase.GRAPHS, Phase.WARMUP, Phase.READY]


def test_seconds_of_a_phase() -> None:
    clock = Clock()
    startup = Startup(clock=clock)
    clock.now = 5
    startup.feed(["Load weight begin"])
    clock.now = 7
    assert startup.elapsed(Phase.STARTING) == 5
    assert startup.elapsed(Phase.LOADING) == 2
    assert startup.elapsed() == 7


def test_last_line_has_no_time_stamp() -> None:
    startup = Startup()
    startup.feed(["[2026-11-29 16:57:45 TP0] Load weight end. elapsed=0.07 s"])
    assert startup.last_line == "Load weight end. elapsed=0.07 s"


def test_tail_gives_whole_lines_and_progress_bars(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    tail = LogTail(path, offset=7)
    assert tail.lines() == []
    with path.open("a") as file:
        file.write("one\ntw")
        file.flush()
        assert tail.lines() == ["one"]
        file.write("o\n\n10%\r20%\rhal")
        file.flush()
        assert tail.lines() == ["two", "10%", "20%"]
