"""The PCIe-IPC all-reduce serves every state of adaptive speculation, not only the one the server starts in.

Real: how the runner sizes the workspace before capture, the widths it asks, and the communicator's admission. Stood
in for: FlashInfer's workspace, which needs GPUs, and the parts of a model runner that the sizing reads.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patches.tiny_engine import tiny_engine

HIDDEN = 64
BATCHES = [1, 2, 4, 8]
START, WIDEST = 4, 8  # draft tokens of the starting state and of the candidate with seven steps


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with tiny_engine(tmp_path_factory.mktemp("model")):
        yield


class Workspace:
    """Stands in for FlashInfer's: it takes what fits, as the kernels do."""

    def __init__(self, *, max_numel: int, **_: Any) -> None:
        self.max_numel = max_numel

    def supports(self, values: torch.Tensor) -> bool:
        return values.numel() <= self.max_numel


def communicator() -> Any:
    from sglang.srt.distributed.device_communicators.pcie_ipc_ar import PcieIpcCommunicator

    made = PcieIpcCommunicator.__new__(PcieIpcCommunicator)
    made.disabled, made.max_numel, made._workspace, made._max_rows = False, 0, None, None
    made._build_failed, made._group, made._device, made._world_size = False, None, "cpu", 8
    made._workspace_cls, made._tune = Workspace, lambda _hidden: None
    return made


def target_runner() -> Any:
    """A model runner's own width arithmetic over stand-ins for its parts."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    runner = SimpleNamespace(
        spec_algorithm=SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm),
        is_draft_worker=False,
        server_args=SimpleNamespace(dllm_algorithm=None),
        req_to_token_pool=SimpleNamespace(size=BATCHES[-1]),
        model_config=SimpleNamespace(hidden_size=HIDDEN),
        decode_graph_gather_requirements=lambda: (False, False),
    )
    for name in ("decode_num_tokens_per_req", "max_decode_logits_rows"):
        setattr(runner, name, functools.partial(getattr(ModelRunner, name), runner))
    return runner


@contextlib.contextmanager
def server(folder: Path, *, adaptive: bool, algorithm: str | None = "EAGLE3") -> Iterator[Any]:
    """Publish a speculative configuration and yield the communicator of its group."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig
    from sglang.srt.runtime_context import get_exec, get_parallel, get_spec

    candidates = folder / "adaptive.json"
    candidates.write_text(json.dumps({"1": {"candidate_steps": [1, 3, WIDEST - 1]}}))
    decode = PhaseConfig(backend=Backend.FULL, bs=BATCHES, max_bs=BATCHES[-1])
    comm = communicator()
    with (
        get_exec().graph.override(cuda_graph_config=CudaGraphConfig(decode=decode)),
        get_spec().override(
            speculative_algorithm=algorithm,
            speculative_num_steps=START - 1 if algorithm else None,
            speculative_num_draft_tokens=START if algorithm else None,
            max_speculative_num_draft_tokens=WIDEST if adaptive else None,
            speculative_adaptive=adaptive,
            speculative_adaptive_config=str(candidates) if adaptive else None,
        ),
        pytest.MonkeyPatch.context() as patches,
    ):
        patches.setattr(get_parallel().tp_group, "pcie_ipc_comm", comm)
        yield comm


def prepare() -> None:
    from sglang.srt.model_executor.runner.base_runner import BaseRunner

    runner = SimpleNamespace(model_runner=target_runner())
    runner._widest_decode_rows = functools.partial(BaseRunner._widest_decode_rows, runner)
    BaseRunner._pre_initialize_pcie_ipc_workspace(runner)  # type: ignore[arg-type]


def served(comm: Any, rows: int) -> bool:
    return bool(comm.should_pcie_ipc_ar(torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)))


@pytest.mark.stock_failure(AssertionError, "64 rows go to NCCL, the workspace takes 32")
def test_the_widest_state_is_served(tmp_path: Path) -> None:
    with server(tmp_path, adaptive=True) as comm:
        prepare()
        rows = BATCHES[-1] * WIDEST
        assert served(comm, rows), f"{rows} rows go to NCCL, the workspace takes {comm.max_numel // HIDDEN}"
        assert not served(comm, rows + 1)


@pytest.mark.stock_failure(AssertionError, "64 rows go to NCCL, the workspace takes 32")
def test_a_first_reduction_without_prepare_is_sized_alike(tmp_path: Path) -> None:
    with server(tmp_path, adaptive=True) as comm:
        rows = BATCHES[-1] * WIDEST
        assert served(comm, rows), f"{rows} rows go to NCCL, the workspace takes {comm.max_numel // HIDDEN}"


@pytest.mark.parametrize(("algorithm", "width"), [("EAGLE3", START), (None, 1)])
def test_other_runs_keep_their_size(algorithm: str | None, width: int, tmp_path: Path) -> None:
    with server(tmp_path, adaptive=False, algorithm=algorithm) as comm:
        prepare()
        assert comm.max_numel == BATCHES[-1] * width * HIDDEN
