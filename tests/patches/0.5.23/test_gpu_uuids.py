"""GPUs named by UUID in CUDA_VISIBLE_DEVICES keep custom all-reduce."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patches.cpu_package import put_stand_in

UUIDS = [f"GPU-{i}{i}{i}{i}aaaa-1111-2222-3333-444455556666" for i in range(8)]
NO_NUMBER = pytest.mark.stock_failure(ValueError, r"^invalid literal for int\(\) with base 10: 'GPU-")
NAMES = pytest.mark.parametrize(
    "visible",
    [
        pytest.param([UUIDS[5], UUIDS[2]], id="whole"),
        pytest.param([UUIDS[5][:10], UUIDS[2][:10]], id="abbreviated"),
    ],
)


@pytest.fixture(autouse=True)
def board(monkeypatch: pytest.MonkeyPatch) -> None:
    put_stand_in(monkeypatch)
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: UUIDS)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


class Group:
    """The communication calls of a group of two ranks of which the other one owns physical GPU 7."""

    Backend = SimpleNamespace(NCCL="nccl")

    def __getattr__(self, name: str) -> Any:
        return {
            "get_backend": lambda _: "gloo",
            "get_rank": lambda group: 0,
            "get_world_size": lambda group: 2,
            "all_gather": self.all_gather,
        }[name]

    def all_gather(self, gathered: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        gathered[0].copy_(mine)
        gathered[1].fill_(7)


def physical_ids(monkeypatch: pytest.MonkeyPatch, index: int) -> list[int]:
    """Return the physical GPUs whose links custom all-reduce asks about, for the rank on visible GPU ``index``."""
    from sglang.srt.distributed.device_communicators import custom_all_reduce_utils as utils

    asked: list[list[int]] = []
    monkeypatch.setattr(utils, "dist", Group())
    monkeypatch.setattr(utils, "in_the_same_node_as", lambda *_, **__: [True, True])
    monkeypatch.setattr(utils, "is_full_nvlink", lambda ids, _: asked.append(ids) or True)
    monkeypatch.setattr(utils, "can_p2p", lambda *_: True)
    assert utils.can_use_custom_all_reduce_with_nvlink(object(), torch.device(f"cuda:{index}"), [2, 4], "custom")
    return asked[0]


@NO_NUMBER
@NAMES
def test_custom_all_reduce_asks_about_the_right_gpus(visible: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(visible))
    assert physical_ids(monkeypatch, 0) == [5, 7]
    assert physical_ids(monkeypatch, 1) == [2, 7]


@pytest.mark.parametrize(("visible", "physical"), [("5,2", [5, 2]), ("5, 2", [5, 2]), ("", [0, 1]), (None, [0, 1])])
def test_numbers_mean_what_they_did(visible: str | None, physical: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [physical_ids(monkeypatch, index)[0] for index in (0, 1)] == physical


@NO_NUMBER
@NAMES
def test_the_fabric_query_finds_its_gpu(visible: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.utils import cuda_vmm_utils

    class FoundError(Exception):
        pass

    def handle(index: int) -> None:
        raise FoundError(index)

    monkeypatch.setattr(cuda_vmm_utils, "pynvml", SimpleNamespace(nvmlDeviceGetHandleByIndex=handle))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(visible))
    with pytest.raises(FoundError) as found:
        cuda_vmm_utils._gpu_fabric_clique(torch.device("cuda:0"))
    assert found.value.args == (5,)
