"""The copy that wakes a link, with a driver that answers; and without one."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import pytest

from sglang_bw.host import link_load, nvml
from tests.host.fake_host import Board, Host


class Waking:
    """A link that is at Gen1 until something has been copied."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.calls: list[str] = []

    def __call__(self, name: str, *arguments: Any) -> None:
        self.calls.append(name)
        if name == "cuDeviceGetByPCIBusId":
            assert arguments[1] == b"0000:02:00.0"
        if name == "cuMemcpyHtoDAsync_v2":
            assert isinstance(arguments[0], ctypes.c_uint64)
            self.host.boards[1].generation = 5


def test_the_link_is_seen_awake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    host = Host(boards=[Board(generation=1), Board(generation=1)])
    library = host.nvml()
    library.nvmlDeviceGetHandleByUUID = lambda uuid: int(uuid[-1])  # type: ignore[attr-defined]
    driver = Waking(host)
    monkeypatch.setattr(nvml, "load", lambda: library)
    monkeypatch.setattr(link_load, "_Cuda", lambda: driver)
    monkeypatch.setattr(link_load, "WARM_UP_S", 0.01)
    monkeypatch.setattr(link_load, "SECONDS", 0.02)
    link_load.main("GPU-1")
    seen = json.loads(capsys.readouterr().out)
    assert seen["generation"] == 5
    assert seen["width"] == 16
    assert seen["GBps"] > 0
    assert driver.calls[:3] == ["cuInit", "cuDeviceGetByPCIBusId", "cuDevicePrimaryCtxRetain"]
    assert host.boards[0].generation == 1


def test_a_gpu_that_cannot_be_reached_is_a_problem_and_no_error() -> None:
    found = link_load.measure("GPU-00000000-0000-0000-0000-000000000000")
    assert found.problem
    assert len(found.problem) <= 120
