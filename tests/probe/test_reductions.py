"""What a plan takes of a stored or a named result of `probe allreduce`, and what it says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sglang_bw.cli.plan import plan
from sglang_bw.host import fingerprint, nvml, probes
from sglang_bw.launch.probe.rounds import Point, Result
from tests.host.fake_host import NAME, Host

RECIPE = "kimi-k2.5-int4-eagle3"
HERE = ("--gpus", f"8x{NAME}")
ENV = {"NCCL_P2P_LEVEL": "SYS", "NCCL_IB_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


@pytest.fixture(autouse=True)
def _a_host_with_eight_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(nvml, "load", Host().nvml)


def result(**changes: Any) -> dict[str, Any]:
    rows = [
        {"rows": rows, "bytes": rows * 14336, "graph": graph, "microseconds": 30.0 + graph, "backend": "nccl"}
        for rows in (1, 4, 16, 64, 256)
        for graph in (False, True)
    ]
    facts = {"probe": "allreduce", "complete": True, "gpus": 8, "hidden": 7168, "device": "cuda"}
    return {**facts, "backends": {"nccl": ENV}, "latencies": rows, **changes}


def store(found: dict[str, Any]) -> Path:
    place = probes.place("allreduce", fingerprint.take().key, "8x7168", "cuda")
    probes.write(place, found)
    return place


def planned(*words: str) -> dict[str, Any]:
    ran = CliRunner().invoke(plan, ["--no-resolve", "--json", RECIPE, *words], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    made: dict[str, Any] = json.loads(ran.stdout)
    return made


def notes(made: dict[str, Any]) -> list[str]:
    return [note for note in made["notes"] if "all-reduces" in note or "otherwise" in note]


def cells(made: dict[str, Any]) -> Any:
    return made["speculation"]["cells"]


def test_a_stored_result_counts_as_a_named_one(tmp_path: Path) -> None:
    before = planned(*HERE)
    place = store(result())
    after, named = planned(*HERE), planned(*HERE, "--probe-allreduce", str(place))
    assert notes(before) == []
    assert notes(after) == [f"all-reduces: measured here, {place}"]
    assert notes(named) == []
    assert cells(after) == cells(named) != cells(before)


def test_times_in_graphs_count(tmp_path: Path) -> None:
    store(result())
    mixed = cells(planned(*HERE))
    store(result(latencies=[row for row in result()["latencies"] if row["graph"]]))
    assert cells(planned(*HERE)) == mixed


def test_a_plan_for_other_gpus_or_with_other_parts_gets_none() -> None:
    store(result())
    assert notes(planned("--gpus", "8xB200")) == []
    assert notes(planned(*HERE, "--no-spec")) == []
    assert notes(planned("--gpus", f"16x{NAME}")) == []
    assert notes(planned(*HERE, "--force", "--", "--tp-size", "4")) == []


def test_a_measured_round_has_them_already() -> None:
    store(result())
    host = fingerprint.take()
    whole = Result(host, RECIPE, "", "cuda", complete=True)
    whole.plain[4] = Point(4, 1.0, 0.010, 0.0, False)
    whole.rounds[3, 4] = [Point(4, 1.0, 0.025, 0.0, True), Point(4, 4.0, 0.025, 0.0, True)]
    probes.write(probes.place("round", host.key, RECIPE, "cuda"), whole.as_json())
    assert notes(planned(*HERE)) == []


@pytest.mark.parametrize(
    ("found", "why"),
    [
        pytest.param(result(complete=False), "is not complete", id="not complete"),
        pytest.param(result(latencies=[]), "is not a result", id="empty"),
        pytest.param(result(hidden=4096), "hidden 4096 in place of 7168", id="another size"),
        pytest.param(result(backends={"nccl": {}}), "NCCL_P2P_LEVEL unset in place of SYS", id="another environment"),
        pytest.param(
            result(latencies=[{"bytes": 14336, "microseconds": 1.0, "backend": "custom"}]),
            "no latencies of nccl",
            id="way",
        ),
        pytest.param({}, "is not a result", id="nothing"),
    ],
)
def test_one_that_cannot_be_used_is_passed_over(found: dict[str, Any], why: str) -> None:
    before = planned(*HERE)
    store(found)
    after = planned(*HERE)
    (note,) = notes(after)
    assert note.startswith("the all-reduces measured here are not used: ")
    assert why in note
    assert cells(after) == cells(before)


def test_one_that_cannot_be_read_is_passed_over() -> None:
    place = store(result())
    place.write_text("{")
    (note,) = notes(planned(*HERE))
    assert "is not a result" in note
    place.unlink()
    place.symlink_to(place.parent)
    assert notes(planned(*HERE)) == []


@pytest.mark.parametrize(
    ("changes", "differ"),
    [
        ({"gpus": 4}, ["gpus 4 in place of 8"]),
        ({"hidden": 4096, "device": "cpu"}, ["hidden 4096 in place of 7168", "device cpu in place of cuda"]),
        ({"backends": {"nccl": {**ENV, "NCCL_ALGO": "Ring"}}}, ["NCCL_ALGO Ring in place of unset"]),
        ({}, []),
    ],
)
def test_a_named_one_of_another_launch_is_used_with_a_warning(
    tmp_path: Path, changes: dict[str, Any], differ: list[str]
) -> None:
    file = tmp_path / "found.json"
    file.write_text(json.dumps(result(**changes)))
    made = planned("--probe-allreduce", str(file))
    assert all("all-reduce probe" in json.dumps(cell) for cell in cells(made))
    said = f"warning: {file} was measured otherwise: {', '.join(differ)}"
    assert notes(made) == ([said] if differ else [])


def test_a_hand_made_one_gets_no_warning(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    rows = [{"bytes": rows * 14336, "microseconds": 30.0} for rows in (1, 4, 16, 64, 256)]
    file.write_text(json.dumps({"latencies": rows, "gpus": None}))
    assert notes(planned("--probe-allreduce", str(file))) == []
