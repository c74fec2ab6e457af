"""All-reduces under torchrun with gloo: real processes, right sums, and what happens to those that do not answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

import sglang_bw
from sglang_bw.cli.probe import probe
from sglang_bw.errors import AllReduceError, OutputError, ProbeError
from sglang_bw.host import probes
from sglang_bw.launch.probe import sizes, variants
from sglang_bw.launch.probe.allreduce import Failure, Latency, Result
from sglang_bw.launch.probe.torchrun import Job
from sglang_bw.plan.speculation.probe import allreduce
from tests.launch.serving import alive, until
from tests.probe.test_rounds import HOST

COMMAND = [sys.executable, "-m", "sglang_bw", "probe", "allreduce", "--device", "cpu"]


def _run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=300, check=False, **more)


@pytest.mark.engine
def test_gloo_at_a_recipes_sizes(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = _run("tiny", "--gpus", "3", "--rows", "1,4,16", "--repetitions", "120", "--json", "--out", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert json.loads(file.read_text())["latencies"] == found["latencies"]
    assert found["complete"]
    assert found["hidden"] == 192
    assert [row["bytes"] for row in found["latencies"]] == [384, 1536, 6144]
    assert all(0 < row["microseconds"] <= row["microseconds_p90"] for row in found["latencies"])
    assert {row["repetitions"] for row in found["latencies"]} == {120}
    read = allreduce(file, calls=2, hidden=192, backend="gloo")
    assert read.seconds(4) == pytest.approx(2e-6 * found["latencies"][1]["microseconds"])


@pytest.mark.engine
def test_a_rank_that_stops_is_noticed_and_nothing_is_left(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [*COMMAND, "--hidden", "64", "--gpus", "2", "--rows", "1", "--out", str(file), "--timeout", "20"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    words = [*command, "--repetitions", "1000000"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environ)
    ranks = _ranks(process.pid)
    until(lambda: any('"start"' in told.read_text() for told in tmp_path.glob("*/gloo.jsonl")), 60, "it has begun")
    psutil.Process(ranks[0]).send_signal(signal.SIGSTOP)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 67, said
    assert "gloo hung" in said
    left = json.loads(probes.partial(file).read_text())
    assert (left["failures"][0]["kind"], left["complete"]) == ("hung", False)
    assert not file.exists()
    until(lambda: not any(map(alive, ranks)), 30, "every rank is gone")


@pytest.mark.engine
def test_no_rank_outlives_a_killed_probe(tmp_path: Path) -> None:
    command = [*COMMAND, "--hidden", "64", "--gpus", "2", "--rows", "1", "--out", str(tmp_path / "found.json")]
    process = subprocess.Popen([*command, "--repetitions", "1000000"], stderr=subprocess.DEVNULL)
    ranks = _ranks(process.pid)
    process.kill()
    process.wait()
    until(lambda: not any(map(alive, ranks)), 60, "every rank is gone")


def _ranks(pid: int) -> list[int]:
    """Wait for the ranks of a probe, until they are connected."""
    found: list[int] = []

    def connected() -> bool:
        family = psutil.Process(pid).children(recursive=True)
        found[:] = [process.pid for process in family if "RANK" in _environment(process) and "-c" in process.cmdline()]
        return len(found) == 2 and all(_connections(pid) for pid in found)

    until(connected, 120, "both ranks are connected")
    return found


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _connections(pid: int) -> int:
    """Connections to other ranks; the first one of each is to torchrun's store."""
    try:
        return sum(c.status == "ESTABLISHED" for c in psutil.Process(pid).net_connections("tcp")) > 1
    except psutil.Error:
        return False


# The programs end by os._exit, as the tool's own ranks do: gloo's worker threads may still hold a finished tensor, and
# one that asks for the interpreter while it shuts down ends the process with SIGABRT.
_CHECK = """
import os, sys, torch, torch.distributed as dist
from sglang_bw.launch.probe.ranks.communicators import Ranks, make
from sglang_bw.launch.probe.ranks.measure import Check
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ranks = Ranks(0, 1, torch.device("cpu"), dist.group.WORLD, dist.group.WORLD, 0)
right = make("torch", ranks)
calls = 0
def sometimes(tensor):
    global calls
    calls += 1
    if calls % 10 == 0:
        tensor[1, 3] += 1
    return right.reduce(tensor)
check, told = Check(ranks, right, (4, 8)), []
print(check.wrong(right.reduce, 200, told.append), check.wrong(sometimes, 50, told.append), told)
class Wrong:
    def reduce(self, tensor):
        return right.reduce(tensor) * 2
try:
    Check(ranks, Wrong(), (4, 8)).wrong(right.reduce, 3, told.append)
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.engine
def test_a_wrong_element_is_found() -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(sglang_bw.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", _CHECK], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    counted, reference = done.stdout.splitlines()
    assert counted == "0 5 [100, 200, 50]"
    assert "not the exact one in 3 of 3" in reference


_SIZES = """
import json, os, torch, torch.distributed as dist
from sglang_bw.launch.probe.ranks.communicators import AbsentError, Ranks, Way, make
from sglang_bw.launch.probe.ranks.main import _size
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ranks = Ranks(0, 1, torch.device("cpu"), dist.group.WORLD, dist.group.WORLD, 0)
right = make("torch", ranks)
def small(tensor):
    if tensor.shape[0] == 4:
        raise AbsentError("not so large")
    return right.reduce(tensor)
told = []
job = {"hidden": 8, "repetitions": 5, "graphs": False}
for rows in (2, 4, 8):
    _size(job, ranks, Way(small), right, rows, lambda event, **fields: told.append([event, rows, fields.get("reason")]))
print(json.dumps([event for event in told if event[0] in ("size", "absent")]), flush=True)
os._exit(0)
"""


@pytest.mark.engine
def test_a_size_that_a_way_does_not_take_costs_no_other() -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(sglang_bw.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", _SIZES], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == [["size", 2, None], ["absent", 4, "4 rows eagerly: not so large"], ["size", 8, None]]


def test_dry_run_shows_every_way_and_its_environment() -> None:
    arguments = ["allreduce", "--hidden", "7168", "--gpus", "8", "--device", "cuda", "--dry-run", "--json"]
    run = CliRunner().invoke(probe, arguments)
    assert run.exit_code == 0, run.output
    told = json.loads(run.stdout)
    assert told["backends"]["nccl-ll"]["NCCL_PROTO"] == "LL"
    assert told["backends"]["nccl-p2p-sys"]["NCCL_P2P_LEVEL"] == "SYS"
    assert told["backends"]["nccl-symm-mem"]["NCCL_CUMEM_ENABLE"] == "1"
    # Without a server there is no configuration, which the communicator otherwise reads.
    assert told["backends"]["torch-symm-mem-two-shot"]["SGLANG_OPT_USE_INKLING_CUSTOM_AR"] == "0"
    assert {"nccl", "custom", "pcie-ipc", "torch-symm-mem"} <= told["backends"].keys()
    assert told["rows"] == [1, 2, 4, 8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        pytest.param(["tiny"], "one GPU reduces nothing", id="one GPU"),
        pytest.param(["--hidden", "64", "--gpus", "2", "--backend", "nccl"], "on cpu: gloo", id="unknown way"),
        pytest.param(["owner/model", "--gpus", "2"], "hidden size of owner/model", id="unknown size"),
    ],
)
def test_what_cannot_be_measured(arguments: list[str], text: str) -> None:
    run = CliRunner().invoke(probe, ["allreduce", "--device", "cpu", *arguments])
    assert isinstance(run.exception, ProbeError)
    assert text in str(run.exception)


@pytest.mark.parametrize(
    "arguments", [[], ["--hidden", "64"], ["tiny", "--rows", "0"], ["tiny", "--rows", "1,,2"], ["tiny", "--gpus", "1"]]
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert CliRunner().invoke(probe, ["allreduce", *arguments]).exit_code == 2


def test_gpus_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_bw.launch.device.gpu_count", lambda: 1)
    run = CliRunner().invoke(probe, ["allreduce", "--device", "cuda", "--hidden", "64", "--gpus", "2"])
    assert isinstance(run.exception, ProbeError)
    assert "2 GPUs are needed, 1 can be seen" in run.exception.message


def test_which_error_a_result_is() -> None:
    job = Job("cuda", 2, 64, (1,))
    absent, hung = Failure("custom", "absent", "no"), Failure("torch-symm-mem", "hung", "silent")
    fine = Latency("nccl", 1, 128, True, 5.0, 6.0, 20)
    assert Result(job, HOST, latencies=[fine], failures=[absent]).error() is None
    assert isinstance(Result(job, HOST, failures=[absent]).error(), ProbeError)
    assert isinstance(Result(job, HOST, latencies=[fine], failures=[hung]).error(), AllReduceError)


def test_rows_of_decode_and_verify() -> None:
    wanted = sizes.Sizes(8, 7168, (1, 4), 4)
    assert wanted.rows == (1, 4, 16)
    assert wanted.of(4) == "decode 4, verify 1"
    assert wanted.of(16) == "verify 4"


def test_every_way_has_a_name_of_its_own() -> None:
    names = [variant.name for variant in (*variants.CUDA, *variants.CPU)]
    assert len(set(names)) == len(names)


def test_a_result_that_is_not_whole_leaves_the_whole_one(tmp_path: Path) -> None:
    place = tmp_path / "new" / "result.json"
    probes.store(place, {"complete": True, "number": 1})
    probes.store(place, {"complete": False, "number": 2})
    assert json.loads(place.read_text())["number"] == 1
    assert json.loads(probes.partial(place).read_text())["number"] == 2
    probes.store(place, {"complete": True, "number": 3})
    assert json.loads(place.read_text())["number"] == 3
    assert list(place.parent.iterdir()) == [place]


def test_a_place_is_tried_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"):
        probes.try_out(tmp_path / "file" / "result.json")
    probes.try_out(tmp_path / "result.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
