"""FlashInfer all-reduce fusion on SM12x: never an error, and the kernel that exists when it is asked for by name."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.model_shapes import model_config
from tests.patches.resolver import B200, H200, RTX_5090, RTX_PRO_6000, machine, resolved_args

REFUSED = pytest.mark.stock_failure(ValueError, r"^FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs\.$")


def backend_in_use(arch: str, memory: int, folder: Path, **flags: Any) -> str | None:
    """Return the backend that the workspace is made for, as the runner asks for it before it captures graphs."""
    with machine(arch, memory):
        from sglang.srt.arg_groups.overrides import resolved_view
        from sglang.srt.layers import flashinfer_comm_fusion

        arguments = {"model_path": model_config(folder, "qwen3-moe"), "tp_size": 8} | flags
        resolved = resolved_view(resolved_args(**arguments))
        comm = SimpleNamespace(flashinfer_allreduce_fusion_backend=resolved.flashinfer_allreduce_fusion_backend)
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(flashinfer_comm_fusion, "get_exec", lambda: SimpleNamespace(comm=comm))
            patches.setattr(flashinfer_comm_fusion, "get_parallel", lambda: SimpleNamespace(nnodes=resolved.nnodes))
            return flashinfer_comm_fusion.resolve_flashinfer_allreduce_fusion_backend()


@REFUSED
@pytest.mark.parametrize("backend", ["auto", "mnnvl", "cutedsl"])
@pytest.mark.parametrize(("arch", "memory"), [("sm120", RTX_PRO_6000), ("sm120", RTX_5090), ("sm121", RTX_PRO_6000)])
def test_the_server_starts_without_fusion(
    arch: str, memory: int, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert backend_in_use(arch, memory, tmp_path, flashinfer_allreduce_fusion_backend=backend) is None
    said = [record.getMessage() for record in caplog.records if "not available on SM12X" in record.getMessage()]
    assert len(said) == 1
    assert f"({backend})" in said[0]
    assert "--flashinfer-allreduce-fusion-backend trtllm" in said[0]


@REFUSED
def test_the_old_flag_starts_without_fusion(tmp_path: Path) -> None:
    assert backend_in_use("sm120", RTX_PRO_6000, tmp_path, enable_flashinfer_allreduce_fusion=True) is None


@REFUSED
def test_trtllm_by_name_is_used(tmp_path: Path) -> None:
    flags = {"flashinfer_allreduce_fusion_backend": "trtllm"}
    assert backend_in_use("sm120", RTX_PRO_6000, tmp_path, **flags) == "trtllm"


@REFUSED
def test_two_nodes_go_without(tmp_path: Path) -> None:
    flags = {"flashinfer_allreduce_fusion_backend": "trtllm", "nnodes": 2, "node_rank": 0, "dist_init_addr": "a:1"}
    assert backend_in_use("sm120", RTX_PRO_6000, tmp_path, **flags) is None


@pytest.mark.stock_failure(AssertionError, "^the layers do not use the fusion that was asked for")
def test_the_layers_use_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine("sm120", RTX_PRO_6000):
        from sglang.srt.layers.layer_boundary.residual import add_norm

        comm = SimpleNamespace(flashinfer_allreduce_fusion_backend="trtllm")
        monkeypatch.setattr(add_norm, "_is_sm120_supported", True, raising=False)
        monkeypatch.setattr(add_norm, "_is_flashinfer_available", True)
        for name in ("is_dp_attention_enabled", "uses_cutedsl_ar_fusion", "is_flashinfer_allreduce_unavailable"):
            monkeypatch.setattr(add_norm, name, lambda: False)
        monkeypatch.setattr(add_norm, "get_exec", lambda: SimpleNamespace(comm=comm))
        assert add_norm.flashinfer_ar_fusion_applies(4), "the layers do not use the fusion that was asked for"
        comm.flashinfer_allreduce_fusion_backend = None
        assert not add_norm.flashinfer_ar_fusion_applies(4)


@pytest.mark.parametrize(
    ("arch", "memory", "asked", "used"),
    [
        ("sm120", RTX_PRO_6000, None, None),
        ("sm100", B200, "auto", "mnnvl"),
        ("sm100", B200, "cutedsl", "cutedsl"),
        ("sm90", H200, "auto", "trtllm"),
        ("sm90", H200, "trtllm", "trtllm"),
    ],
)
def test_elsewhere_nothing_changes(arch: str, memory: int, asked: str | None, used: str | None, tmp_path: Path) -> None:
    flags = {} if asked is None else {"flashinfer_allreduce_fusion_backend": asked}
    assert backend_in_use(arch, memory, tmp_path, **flags) == used
