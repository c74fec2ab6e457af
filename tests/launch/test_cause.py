"""The cause line, on logs as SGLang 0.5.23 writes them (shortened)."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_bw.launch.cause import cause

STAMP = "[2026-11-29 17:14:56] "
FRAMES = '  File "scheduler.py", line 568, in __init__\n    self.init_model_worker()\n    ^^^^^^^^^^^^\n'
SCHEDULER = STAMP + "Scheduler hit an exception: Traceback (most recent call last):\n" + FRAMES
SIGQUIT = STAMP + "Received sigquit from a child process. It usually means the child failed.\n"
DIRECT = "\nThe above exception was the direct cause of the following exception:\n\n"
PARENT = "Traceback (most recent call last):\n" + FRAMES + "EOFError\n"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        pytest.param(
            SCHEDULER + "AssertionError: weight (128, 384) into parameter (64, 192)\n\n" + SIGQUIT,
            "AssertionError: weight (128, 384) into parameter (64, 192)",
            id="a scheduler fails",
        ),
        pytest.param(
            SCHEDULER + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n" + SIGQUIT + PARENT,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            id="its parent then fails because of it",
        ),
        pytest.param(
            PARENT + SCHEDULER + "ValueError: root\n",
            "ValueError: root",
            id="the parent was quicker",
        ),
        pytest.param(
            SCHEDULER
            + "KeyError: 12\n"
            + DIRECT
            + "Traceback (most recent call last):\n"
            + FRAMES
            + "Exception: Capture cuda graph failed\n",
            "Exception: Capture cuda graph failed (from KeyError: 12)",
            id="a chain shows both ends",
        ),
        pytest.param(
            "Traceback (most recent call last):\n" + FRAMES + "ModuleNotFoundError: No module named 'sgl_kernel'\n",
            "ModuleNotFoundError: No module named 'sgl_kernel'",
            id="the import fails",
        ),
        pytest.param(
            "usage: sglang serve [-h] --model-path MODEL_PATH\nsglang serve: error: unrecognized arguments: --x 3\n",
            "sglang serve: error: unrecognized arguments: --x 3",
            id="a flag that does not exist",
        ),
        pytest.param(
            '[rank0]: Traceback (most recent call last):\n[rank0]:   File "x.py"\n[rank0]: RuntimeError: NCCL\n',
            "RuntimeError: NCCL",
            id="rank marks",
        ),
        pytest.param(
            "Traceback (most recent call last):\n"
            + FRAMES
            + "RuntimeError: Error(s) in loading state_dict for X:\n\tsize mismatch for a\n",
            "RuntimeError: Error(s) in loading state_dict for X: size mismatch for a",
            id="a message that goes on in the next line",
        ),
        pytest.param(
            STAMP + "[Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use\n",
            "[Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use",
            id="the port is taken meanwhile",
        ),
        pytest.param(
            "Fatal Python error: Segmentation fault\n\nThread 0x1\n",
            "Fatal Python error: Segmentation fault",
            id="a crash in C",
        ),
        pytest.param(
            "Traceback (most recent call last):\n"
            + FRAMES
            + "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error.\n",
            "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error.",
            id="a model that the hub does not know",
        ),
        pytest.param(
            "Loading: 10%\rLoading: 20%\r" + SCHEDULER + "OSError: x\n", "OSError: x", id="behind a progress bar"
        ),
        pytest.param(STAMP + "Load weight begin\n", "", id="nothing to see"),
        pytest.param("", "", id="empty"),
    ],
)
def test_cause(tmp_path: Path, log: str, expected: str) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    assert cause(path) == expected


def test_only_this_engines_part_of_the_log_counts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(SCHEDULER + "ValueError: of yesterday\n")
    offset = path.stat().st_size
    with path.open("a") as file:
        file.write("Load weight begin\n")
    assert cause(path, offset=offset) == ""


def test_long_lines_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(SCHEDULER + "ValueError: " + "x" * 9000 + "\n")
    assert len(cause(path)) == 500
