"""The cause line, on logs as SGLang 0.5.23 writes them (shortened)."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_bw.launch.cause import KILLED, cause
from sglang_bw.ledger.failure import classify

STAMP = "[2026-11-29 17:14:56] "
FRAMES = '  File "scheduler.py", line 568, in __init__\n    self.init_model_worker()\n    ^^^^^^^^^^^^\n'
SCHEDULER = STAMP + "Scheduler hit an exception: Traceback (most recent call last):\n" + FRAMES
SIGQUIT = STAMP + "Received sigquit from a child process. It usually means the child failed.\n"
HARMLESS = STAMP + "Ignore import error when loading sglang.srt.models.inkling: No module named 'cutlass'\n"
DIRECT = "\nThe above exception was the direct cause of the following exception:\n\n"
WHILE = "\nDuring handling of the above exception, another exception occurred:\n\n"
PARENT = "Traceback (most recent call last):\n" + FRAMES + "EOFError\n"


def died(code: int) -> str:
    """Return what the parent of a scheduler says that is gone."""
    return (
        f"{PARENT}{WHILE}Traceback (most recent call last):\n{FRAMES}"
        f"RuntimeError: Rank 0 scheduler died during initialization (exit code: {code}). If exit code is -9 (SIGKILL), "
        "a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.\n"
    )


def crashed(code: int) -> str:
    """Return what the engine's watchdog says of a scheduler that is gone."""
    return f"{STAMP}Subprocess scheduler_0 (pid=4711) crashed with exit code {code}. Triggering SIGQUIT...\n"


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
        pytest.param(
            HARMLESS + died(-9),
            f"Rank 0 scheduler died during initialization (exit code: -9): {KILLED}",
            id="a scheduler is killed",
        ),
        pytest.param(
            HARMLESS + died(-11),
            "Rank 0 scheduler died during initialization (exit code: -11)",
            id="a scheduler dies without a word",
        ),
        pytest.param(
            "Fatal Python error: Segmentation fault\n\nThread 0x1\n" + HARMLESS + died(-11),
            "Fatal Python error: Segmentation fault",
            id="a crash in C, and its parent",
        ),
        pytest.param(
            SCHEDULER + "ValueError: root\n" + died(-9), "ValueError: root", id="an announced one beside a killed one"
        ),
        pytest.param(
            HARMLESS + "/usr/bin/python3.11: No module named sglang\n",
            "/usr/bin/python3.11: No module named sglang",
            id="no engine",
        ),
        pytest.param(HARMLESS, "", id="a model that is not installed"),
        pytest.param(STAMP + "Load weight begin\n", "", id="nothing to see"),
        pytest.param("", "", id="empty"),
    ],
)
def test_cause(tmp_path: Path, log: str, expected: str) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    assert cause(path) == expected


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        pytest.param(HARMLESS, KILLED, id="no word"),
        pytest.param("", KILLED, id="empty"),
        pytest.param(
            "Traceback (most recent call last):\n" + FRAMES + "ImportError: a kernel\n", KILLED, id="an older warning"
        ),
        pytest.param(HARMLESS + PARENT, KILLED, id="an echo"),
        pytest.param(SCHEDULER + "ValueError: root\n" + SIGQUIT, "ValueError: root", id="an announced one"),
        pytest.param(
            HARMLESS + crashed(-9) + SIGQUIT,
            f"Subprocess scheduler_0 (pid=4711) crashed with exit code -9: {KILLED}",
            id="it has killed itself because a scheduler was killed",
        ),
        pytest.param(
            crashed(-11), "Subprocess scheduler_0 (pid=4711) crashed with exit code -11", id="a scheduler has crashed"
        ),
        pytest.param(
            "Fatal Python error: Segmentation fault\n" + SIGQUIT,
            "Fatal Python error: Segmentation fault",
            id="a crash in C",
        ),
    ],
)
def test_cause_of_an_engine_that_sigkill_ended(tmp_path: Path, log: str, expected: str) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    assert cause(path, killed=True) == expected


@pytest.mark.parametrize(("code", "expected"), [(-9, "out-of-memory-host"), (-11, "other")])
def test_the_class_of_a_scheduler_that_died(tmp_path: Path, code: int, expected: str) -> None:
    path = tmp_path / "log"
    path.write_text(HARMLESS + died(code))
    assert classify(cause(path)) == expected
    assert classify(died(code)) == expected


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
