"""The doctor on a host with 8 RTX PRO 6000 that is well, with one fault at a time, and on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sglang_bw.cli import cli
from sglang_bw.errors import DoctorError, DoctorWarningError, GpuSelectionError
from sglang_bw.fork.environment import Environment
from sglang_bw.fork.verify import inspect_environment
from sglang_bw.host import doctor, link_load, nvml
from sglang_bw.host.doctor import Diagnosis
from sglang_bw.host.finding import Finding, Verdict, numbers
from sglang_bw.host.gpus import parts
from sglang_bw.host.link_load import UnderLoad
from tests.host import fake_binary
from tests.host.fake_host import GIB, MIB, REDIRECTS, Board, Host, all_boards, process, put
from tests.launch.serving import write_tree

PACKAGES = {
    "torch": "2.14.1",
    "nvidia-cuda-runtime": "13.0.96",
    "nvidia-nccl-cu13": "2.30.7",
    "sglang-kernel": "0.4.10",
}


def make_environment(root: Path, *, kernels: tuple[str, ...] = ("sm_90", "sm_100f", "sm_120a")) -> Environment:
    """An environment with a patched engine, its kernel package, and everything that compiles."""
    site = write_tree(root / "site")
    for name, version in PACKAGES.items():
        put(site, f"{name.replace('-', '_')}-{version}.dist-info/RECORD", "")
    put(site, "sgl_kernel/__init__.py", "")
    for variant in ("sm90", "sm100"):
        fake_binary.write(site / "sgl_kernel" / variant / "common_ops.abi3.so", *kernels)
    fake_binary.write(site / "sgl_kernel" / "flash_ops.abi3.so", "sm_80", "sm_90a")
    put(site, "torch/__init__.py", "")
    fake_binary.write(site / "torch/lib/libtorch_cuda.so", "sm_90", "sm_120")
    for program in ("ninja", "nvcc", "c++", "dmesg"):
        put(root, f"bin/{program}", f"#!/bin/sh\necho '{program}: release 13.0, V13.0.88'\n")
        (root / "bin" / program).chmod(0o755)
    put(root, "base/include/python3.12/Python.h", "")
    return Environment(
        executable=root / "bin" / "python", implementation="cpython", version=(3, 12, 3), system="linux",
        machine="x86_64", libc=("glibc", "2.39"), free_threaded=False, prefix=root, base_prefix=root / "base",
        purelib=site, stdlib=root / "base/lib", sys_path=(str(site),),
    )  # fmt: skip


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    made = make_environment(tmp_path / "env")
    monkeypatch.setattr(Environment, "probe", classmethod(lambda _cls, _python=None: made))
    return made


Examine = Callable[..., Diagnosis]


@pytest.fixture
def examine(environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examine:
    def run(host: Host, *, gpus: str = "", under: UnderLoad | None = None) -> Diagnosis:
        monkeypatch.setattr(link_load, "measure", lambda _uuid: under or UnderLoad(5, 16, 55.3))
        host.environ = {"PATH": str(environment.executable.parent), **host.environ}
        root = tmp_path / f"root{len(list(tmp_path.iterdir()))}"
        root.mkdir()
        library = host.nvml()
        found = doctor.examine(host.system(root), library, gpus=gpus)
        assert library.connected == 0
        return found

    return run


def the(diagnosis: Diagnosis, name: str, group: str = "") -> Finding:
    found = [item for item in diagnosis.findings if item.name == name and item.group.startswith(group)]
    assert found, sorted({item.name for item in diagnosis.findings})
    return found[0]


def test_a_host_that_is_well_has_nothing_to_fix(examine: Examine) -> None:
    found = examine(Host())
    assert [item for item in found.findings if item.verdict in (Verdict.FAIL, Verdict.WARN)] == []
    assert found.error(strict=True) is None
    assert "8x NVIDIA RTX PRO 6000 Blackwell Server Edition (sm120, 95.6 GiB each)" in the(found, "boards").says
    assert the(found, "PCIe link").says.startswith("GPU 0-7: Gen5 x16 under load, able to do Gen5 x16, 55 GB/s")
    assert "16 pairs SYS" in the(found, "topology").says
    assert "4 GPUs on NUMA node 0, 4 GPUs on NUMA node 1" in the(found, "topology").says
    assert "28 pairs" in the(found, "peer-to-peer").says
    assert "128 GiB" in the(found, "BAR1").says
    assert "iommu=off" in the(found, "IOMMU").says
    assert "no redirection on the 8 bridges" in the(found, "ACS").says
    assert "sm_120a" in the(found, "kernel objects").says
    assert "FlashAttention 3" in the(found, "backends without code here").says
    matrix = found.between.matrix()
    assert matrix[0] == ["", *(f"GPU{index}" for index in range(8)), "NUMA"]
    assert matrix[1] == ["GPU0", "X", "NODE", "NODE", "NODE", "SYS", "SYS", "SYS", "SYS", "0"]
    assert matrix[8][-1] == "1"


def change(**fields: Any) -> Callable[[Host], None]:
    return lambda host: [setattr(host, name, value) for name, value in fields.items()] and None


def one_board(index: int, **fields: Any) -> Callable[[Host], None]:
    def alter(host: Host) -> None:
        host.boards[index] = replace(host.boards[index], **fields)

    return alter


FAULTS = [
    # what is wrong, the finding, how bad, what it says, what its fix says
    ("old driver", change(driver="575.57.08"), "driver", "fail", "needs 580", "driver 580 or newer"),
    (
        "driver and library differ",
        change(fails_to_start="Driver/library version mismatch"),
        "driver",
        "fail",
        "8 NVIDIA GPUs on the bus",
        "reboot",
    ),
    ("no driver", change(fails_to_start="Driver Not Loaded"), "driver", "fail", "not loaded", "modprobe nvidia"),
    (
        "GPUs kept from a container",
        change(fails_to_start="Driver Not Loaded", container=True),
        "driver",
        "not seen",
        "none handed to this container",
        "--gpus all",
    ),
    (
        "memory held",
        one_board(3, used=90 * GIB, processes=[process(2**22 + 1, 90 * GIB)]),
        "free memory",
        "warn",
        "GPU 3: 5.6 of 95.6 GiB free",
        f"kill {2**22 + 1}",
    ),
    ("memory held by nobody visible", one_board(3, used=90 * GIB), "free memory", "warn", "cannot see", "fuser"),
    ("power limit", all_boards(limit=300_000), "power limit", "warn", "300 W, board default 600 W", "-pl 600"),
    ("ECC errors", one_board(2, ecc=3), "memory errors", "fail", "GPU 2: 3 uncorrectable", "nvidia-smi -r -i 2"),
    ("rows to remap", one_board(2, pending=1), "memory errors", "fail", "GPU 2", "nvidia-smi -r -i 2"),
    ("prohibited", one_board(1, mode=2), "compute mode", "fail", "prohibited", "-c DEFAULT"),
    ("exclusive", one_board(1, mode=3), "compute mode", "warn", "exclusive process", "-c DEFAULT"),
    ("MIG", one_board(1, mig=(1, 1)), "MIG", "warn", "GPU 1", "-mig 0"),
    ("too few lanes", one_board(5, width=8, busy=90), "PCIe link", "warn", "GPU 5: Gen5 x8", "riser"),
    ("an old slot", all_boards(most_generation=4, generation=4, busy=90), "PCIe link", "warn", "could do Gen5", "slot"),
    ("slow under load", all_boards(generation=1, busy=90), "PCIe link", "warn", "Gen1 x16 under load", "pcie_aspm=off"),
    ("thermal", all_boards(reasons=0x40), "clocks", "warn", "thermal (hardware)", "air"),
    ("power brake", all_boards(reasons=0x88), "clocks", "warn", "power brake", "cables"),
    ("persistence", all_boards(persistent=0), "persistence", "warn", "GPU 0-7: off", "nvidia-smi -pm 1"),
    (
        "different boards",
        one_board(7, name="NVIDIA GeForce RTX 5090", memory=32 * GIB),
        "boards",
        "warn",
        "different",
        "--gpus",
    ),
    ("more memory on one", one_board(7, memory=190 * GIB, bar1=256 * GIB), "boards", "warn", "different", "--gpus"),
    ("no peer-to-peer", change(p2p=3), "peer-to-peer", "warn", "28 of 28 pairs cannot (28x topology)", "ForceP2P=0x11"),
    ("small window", all_boards(bar1=256 * MIB), "BAR1", "fail", "256 MiB", "Resizable BAR"),
    ("IOMMU translates", change(iommu="DMA-FQ", cmdline="x amd_iommu=on"), "IOMMU", "warn", "DMA-FQ", "iommu=off"),
    ("IOMMU mode closed", change(iommu=""), "IOMMU", "not seen", "closed", "root"),
    (
        "IOMMU passes through",
        change(iommu="identity", cmdline="iommu=pt"),
        "IOMMU",
        "ok",
        "passes through",
        "NCCL_CUMEM_ENABLE=1",
    ),
    (
        "ACS redirects",
        change(acs=REDIRECTS),
        "ACS",
        "warn",
        "CmpltRedir, ReqRedir on 8 of 8",
        "setpci -s $b ECAP_ACS+6.w=0000",
    ),
    ("ACS closed to the user", change(config_bytes=64), "ACS", "not seen", "8 bridges", "sudo"),
    ("docker's shared memory", change(shm=64 * MIB), "/dev/shm", "fail", "64 MiB", "--shm-size=32g"),
    ("little shared memory", change(shm=GIB), "/dev/shm", "warn", "1.0 GiB", "--shm-size=32g"),
    ("locked memory", change(memlock=64 << 10), "ulimit -l", "warn", "64 KiB", "memlock"),
    ("little host memory", change(mem_total=64 * GIB), "host memory", "warn", "64 GiB", "128 GiB"),
    ("little memory for the container", change(cgroup=96 * GIB), "host memory", "warn", "may use 96 GiB", "128 GiB"),
    ("reserved huge pages", change(hugepages=65536), "hugepages", "warn", "128 GiB", "vm.nr_hugepages=0"),
    ("governor", change(governor="schedutil"), "CPU governor", "warn", "schedutil", "scaling_governor"),
    ("NUMA balancing", change(balancing=1), "NUMA balancing", "warn", "2 nodes", "kernel.numa_balancing=0"),
    (
        "power saving",
        change(aspm="default performance [powersave]"),
        "PCIe power saving",
        "warn",
        "powersave",
        "pcie_aspm",
    ),
    ("uneven sockets", one_board(3, node=1), "NUMA balance", "warn", "3 GPUs on NUMA node 0", "--gpus"),
    ("virtual machine", change(virtual=True), "real topology", "not seen", "virtual machine", ""),
    ("graph file", change(environ={"NCCL_GRAPH_FILE": ""}), "NCCL_GRAPH_FILE=", "warn", "XML", "unset NCCL_GRAPH_FILE"),
    ("p2p level", change(environ={"NCCL_P2P_LEVEL": "4"}), "NCCL_P2P_LEVEL=4", "warn", "how far", "NCCL_P2P_LEVEL=SYS"),
    ("tree", change(environ={"NCCL_ALGO": "Tree"}), "NCCL_ALGO=Tree", "warn", "Ring", "unset NCCL_ALGO"),
    (
        "invented accept length",
        change(environ={"SGLANG_SIMULATE_ACC_LEN": "3"}),
        "SGLANG_SIMULATE_ACC_LEN=3",
        "warn",
        "accept length",
        "unset",
    ),
    (
        "expandable segments",
        change(environ={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "warn",
        "allocator",
        "unset",
    ),
    ("no compiler", change(environ={"CXX": "no-such-compiler"}), "C++ compiler", "fail", "no-such-compiler", "g++"),
    ("no nvcc", change(environ={"CUDA_HOME": "/no/such/cuda"}), "nvcc", "fail", "not found", "CUDA_HOME"),
]


@pytest.mark.parametrize(
    ("fault", "name", "verdict", "says", "fix"), [pytest.param(*row[1:], id=row[0]) for row in FAULTS]
)
def test_one_fault_is_named_with_its_cost_and_its_cure(
    examine: Examine, fault: Callable[[Host], None], name: str, verdict: str, says: str, fix: str
) -> None:
    host = Host()
    fault(host)
    found = examine(host)
    items = [item for item in found.findings if item.name == name and item.verdict.value == verdict]
    assert len(items) == 1, [item for item in found.findings if item.name == name]
    assert says in items[0].says
    assert fix in items[0].fix
    others = {item.name for item in found.findings if item.verdict in (Verdict.FAIL, Verdict.WARN)} - {name}
    assert others <= {"BAR1"}  # no peer-to-peer through a small window: both are said
    if verdict in ("fail", "warn"):
        assert items[0].costs
        assert isinstance(found.error(strict=True), DoctorError if verdict == "fail" else DoctorWarningError)
        assert (found.error() is None) == (verdict == "warn")


def test_an_idle_link_is_not_called_slow(examine: Examine) -> None:
    """It falls to Gen1 when nothing moves; under load it is what counts."""
    host = Host()
    all_boards(generation=1)(host)
    assert "Gen5 x16 under load" in the(examine(host), "PCIe link").says
    found = the(examine(host, under=UnderLoad(problem="cuInit failed with CUDA error 999")), "PCIe link")
    assert found.verdict is Verdict.UNSEEN
    assert "Gen1 x16 idle" in found.says
    assert "cuInit" in found.says
    assert the(examine(host, under=UnderLoad(1, 16, 3.1)), "PCIe link").verdict is Verdict.WARN


def test_a_gpu_that_somebody_uses_is_not_put_to_work(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    host.boards[0] = Board(processes=[process(2**22 + 1, GIB)])
    host.boards[1] = Board(busy=7)
    host.boards[2] = Board(used=60 * GIB)
    asked: list[str] = []
    examine(host)  # sets the stand-in that is replaced here
    between = examine(host).between
    monkeypatch.setattr(link_load, "measure", lambda uuid: asked.append(uuid) or UnderLoad(5, 16, 55.0))
    assert set(doctor._loaded(between, lambda _line: None)) == {3, 4, 5, 6, 7}
    assert len(asked) == 5


@pytest.mark.parametrize(
    ("name", "value", "path"),
    [("p2p topology", lambda a, b: 10 if a // 2 == b // 2 else 50, "PIX"), ("host bridge", lambda *_: 30, "PHB")],
)
def test_paths_are_those_of_the_driver(examine: Examine, name: str, value: Any, path: str) -> None:
    assert examine(Host(level=value)).between.matrix()[1][2] == path


def test_nvlink_is_counted_and_nothing_is_said_of_pcie(examine: Examine) -> None:
    host = Host()
    all_boards(name="NVIDIA B200", capability=(10, 0), nvlinks=18, memory=180 * GIB, bar1=256 * GIB)(host)
    host.iommu = "DMA"
    found = examine(host)
    assert found.between.matrix()[1][8] == "NV18"
    assert "28 pairs NV18 (18 NVLinks)" in the(found, "topology").says
    assert the(found, "IOMMU").verdict is Verdict.OK


def test_what_a_board_does_not_tell_is_not_seen_and_no_error(examine: Examine) -> None:
    """A DGX Spark refuses most questions: memory is the host's, there is one GPU, no window and no power limit."""
    names = [name for name in dir(Host().nvml()) if name.startswith("nvmlDeviceGet")]
    kept = {"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlDeviceGetUUID"}
    kept |= {"nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetPciInfo"}
    host = Host(boards=[Board(name="NVIDIA GB10", capability=(12, 1))], refused=frozenset(set(names) - kept))
    found = examine(host)
    assert "memory shared with the processor" in the(found, "boards").says
    assert the(found, "power limit").verdict is Verdict.UNSEEN
    assert the(found, "PCIe link").verdict is Verdict.UNSEEN
    assert not [item for item in found.findings if item.name == "BAR1"]
    kernels = the(found, "kernel objects")
    assert [item.name for item in found.findings if item.verdict in (Verdict.FAIL, Verdict.WARN)] == ["kernel objects"]
    assert kernels.verdict is Verdict.FAIL  # sm_120a code does not run on sm_121
    assert "nothing for sm121" in kernels.says


def test_lost_gpus_are_counted(examine: Examine) -> None:
    class Lost(type(Host().nvml())):  # type: ignore[misc]
        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            if index == 4:
                raise self.NVMLError("GPU is lost")
            return index

    gpus = nvml.read(Lost(Host()))
    assert len(gpus.boards) == 7
    assert gpus.problem == "1 of 8 GPUs do not answer"


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        ("0-3", [0, 1, 2, 3]),
        ("6, 2", [6, 2]),
        ("0,2-3,7", [0, 2, 3, 7]),
        ("GPU-00000005", [5]),
        ("gpu-00000005-1111-2222-3333-444455556666", [5]),
        ("", list(range(8))),
    ],
)
def test_gpus_are_chosen_by_number_range_and_uuid(wanted: str, indices: list[int]) -> None:
    chosen = nvml.read(Host().nvml()).only(wanted)
    assert [gpu.index for gpu in chosen.boards] == indices
    assert all({pair.first, pair.second} <= set(indices) for pair in chosen.pairs)
    assert len(chosen.pairs) == len(indices) * (len(indices) - 1) // 2


@pytest.mark.parametrize("wanted", ["8", "0-8", "3-1", "0,0", "x", ",", "GPU-", "GPU-0", "GPU-ffff", "-1", "0-", "1e3"])
def test_a_wrong_choice_is_refused(wanted: str) -> None:
    with pytest.raises(GpuSelectionError) as error:
        nvml.read(Host().nvml()).only(wanted)
    assert error.value.hint
    assert error.value.exit_code == 62


@pytest.mark.parametrize("wanted", ["0,0", "1-3,2", "0,00", "GPU-ab,gpu-AB"])
def test_a_gpu_named_twice_is_refused_where_none_is_here(wanted: str) -> None:
    with pytest.raises(GpuSelectionError, match="is named twice"):
        parts(wanted)


def test_numbers_are_joined_to_ranges() -> None:
    assert numbers([3, 0, 1, 2, 6]) == "0-3, 6"
    assert numbers([]) == ""


def test_facts_are_all_in_the_json(examine: Examine) -> None:
    whole = json.loads(json.dumps(examine(Host(iommu="DMA")).as_json()))
    assert whole["verdict"] == "warn"
    assert whole["counts"]["warn"] == 1
    assert whole["gpus"][0]["bus"] == "0000:01:00.0"
    assert whole["gpus"][0]["memory_clock"] == 12481
    assert len(whole["pairs"]) == 28
    assert {row["name"] for row in whole["variables"]} >= {"NCCL_P2P_LEVEL", "NCCL_GRAPH_FILE", "CUDA_VISIBLE_DEVICES"}
    assert all(row["does"] for row in whole["variables"])


# The engine and its kernels.


def kernels_of(examine: Examine, environment: Environment) -> Finding:
    return the(examine(Host()), "kernel objects")


def test_a_kernel_wheel_for_other_gpus_is_named(examine: Examine, environment: Environment) -> None:
    fake_binary.write(environment.purelib / "sgl_kernel/sm100/common_ops.abi3.so", "sm_90a", "sm_100f")
    found = kernels_of(examine, environment)
    assert found.verdict is Verdict.FAIL
    assert "has sm_90a, sm_100f, nothing for sm120" in found.says
    assert "no kernel image is available" in found.costs
    assert "sglang-bw install --python" in found.fix


def test_a_kernel_wheel_for_another_cuda_is_named(examine: Examine, environment: Environment) -> None:
    path = environment.purelib / "sgl_kernel/sm100/common_ops.abi3.so"
    fake_binary.write(path, "sm_120a", needed=("libcudart.so.12",))
    found = kernels_of(examine, environment)
    assert found.verdict is Verdict.FAIL
    assert "linked to CUDA 12; torch is on CUDA 13" in found.says


def test_a_truncated_kernel_object_is_named(examine: Examine, environment: Environment) -> None:
    path = environment.purelib / "sgl_kernel/sm100/common_ops.abi3.so"
    path.write_bytes(path.read_bytes()[:-70])
    found = kernels_of(examine, environment)
    assert found.verdict is Verdict.FAIL
    assert "cut short" in found.says


def test_the_object_is_chosen_as_the_package_does(examine: Examine, environment: Environment) -> None:
    """sm90's on an H200, sm100's everywhere else: a wrong one in the other folder does not matter."""
    fake_binary.write(environment.purelib / "sgl_kernel/sm90/common_ops.abi3.so", "sm_90a")
    assert kernels_of(examine, environment).verdict is Verdict.OK
    host = Host(boards=[Board(name="NVIDIA H200", capability=(9, 0))])
    assert "of sm90/ has sm_90a" in the(examine(host), "kernel objects").says


def test_a_kernel_wheel_of_another_release_is_named(examine: Examine, environment: Environment) -> None:
    metadata = next(environment.purelib.glob("sglang-*.dist-info")) / "METADATA"
    metadata.write_text(
        metadata.read_text() + "Requires-Dist: sglang-kernel==0.4.9\nRequires-Dist: not ( valid\n\nText.\n"
    )
    found = the(examine(Host()), "kernel wheel")
    assert found.verdict is Verdict.FAIL
    assert "sglang-kernel 0.4.10, but the engine needs sglang-kernel==0.4.9" in found.says


def test_an_old_torch_has_no_code_for_the_gpu(examine: Examine, environment: Environment) -> None:
    fake_binary.write(environment.purelib / "torch/lib/libtorch_cuda.so", "sm_80", "sm_90")
    found = the(examine(Host()), "torch", "Kernels")
    assert found.verdict is Verdict.FAIL
    assert "nothing for sm120" in found.says


def reinstall(environment: Environment, *, version: str, origin: dict[str, Any] | None) -> None:
    """Put upstream's in place of the patched engine, with the origin that pip writes down (PEP 610)."""
    info = next(environment.purelib.glob("sglang-*.dist-info"))
    (environment.purelib / "sglang/_bw.json").unlink()
    (info / "RECORD").write_text("sglang/__init__.py,,\n")
    info = info.rename(info.with_name(f"sglang-{version}.dist-info"))
    if origin:
        (info / "direct_url.json").write_text(json.dumps(origin))


@pytest.mark.parametrize(
    ("version", "deps"),
    [
        pytest.param("0.5.23", " --no-deps", id="same release"),
        pytest.param("0.5.12.dev3+g1a2b3c", "", id="another one"),
    ],
)
def test_an_editable_install_as_in_the_images_gets_the_line_that_replaces_it(
    examine: Examine, environment: Environment, version: str, deps: str
) -> None:
    origin = {"url": "file:///sgl-workspace/sglang/python", "dir_info": {"editable": True}}
    reinstall(environment, version=version, origin=origin)
    found = the(examine(Host()), "engine")
    assert found.verdict is Verdict.FAIL
    assert "editable: /sgl-workspace/sglang/python (as in the official SGLang images)" in found.says
    assert f'-m pip install{deps} --find-links dist "sglang==0.5.23+bw.' in found.fix
    assert found.fix.startswith("`sglang-bw build --base 0.5.23 && ")


@pytest.mark.parametrize("origin", [None, {"url": "file:///x", "archive_info": {}}, {"nothing": 1}, ["list"]], ids=str)
def test_a_stock_engine_is_named(examine: Examine, environment: Environment, origin: Any) -> None:
    reinstall(environment, version="0.5.23", origin=origin)
    found = the(examine(Host()), "engine")
    assert found.verdict is Verdict.FAIL
    assert "is upstream's, without the series" in found.says
    assert "sglang-bw install" in found.fix


def test_a_shadowed_engine_is_named(
    examine: Examine, environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "shadow", "sglang/__init__.py", "")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "shadow"))
    found = the(examine(Host()), "engine")
    assert found.verdict is Verdict.FAIL
    assert str(tmp_path / "shadow" / "sglang") in found.says
    assert "PYTHONPATH" in found.fix


def test_an_edited_engine_is_named(examine: Examine, environment: Environment) -> None:
    (environment.purelib / "sglang/launch_server.py").write_text("edited")
    found = the(examine(Host()), "engine")
    assert found.verdict is Verdict.FAIL
    assert "sglang/launch_server.py (edited)" in found.says


def test_a_python_that_no_wheel_fits(
    examine: Examine, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = replace(environment, version=(3, 10, 2))
    monkeypatch.setattr(Environment, "probe", classmethod(lambda _cls, _python=None: old))
    assert the(examine(Host()), "python").verdict is Verdict.FAIL


def test_another_flashinfer_is_named(examine: Examine, environment: Environment) -> None:
    metadata = next(environment.purelib.glob("sglang-*.dist-info")) / "METADATA"
    metadata.write_text(
        metadata.read_text() + "Requires-Dist: flashinfer_python[cu13]==0.7.2\n"
        'Requires-Dist: sglang-kernel==1.0 ; extra == "other"\n\nText.\n'
    )
    put(environment.purelib, "flashinfer_python-0.6.1.dist-info/RECORD", "")
    found = the(examine(Host()), "FlashInfer")
    assert found.verdict is Verdict.FAIL
    assert "flashinfer-python 0.6.1, but the engine needs flashinfer_python[cu13]==0.7.2" in found.says
    assert the(examine(Host()), "kernel wheel").verdict is Verdict.OK


@pytest.mark.parametrize(
    ("log", "verdict", "says"),
    [
        (
            "[1.0] NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
            Verdict.WARN,
            "1 in the kernel's log, the last: Xid",
        ),
        ("[1.0] quiet", Verdict.OK, "none"),
        ("", Verdict.UNSEEN, "closed"),
    ],
)
def test_errors_of_the_driver_are_quoted(
    examine: Examine, environment: Environment, log: str, verdict: Verdict, says: str
) -> None:
    put(environment.prefix, "bin/dmesg", f"#!/bin/sh\necho '{log}'\n" if log else "#!/bin/sh\nexit 1\n")
    found = the(examine(Host()), "Xid errors")
    assert found.verdict is verdict
    assert says in found.says


# What is printed.


@pytest.fixture
def on_fake_host(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Host], CliRunner]:
    def use(host: Host) -> CliRunner:
        host.environ = {"PATH": str(environment.executable.parent), **host.environ}
        system = host.system(tmp_path / "root")
        monkeypatch.setattr("sglang_bw.cli.host.System", lambda: system)
        monkeypatch.setattr(nvml, "load", host.nvml)
        monkeypatch.setattr(link_load, "measure", lambda _uuid: UnderLoad(5, 16, 55.3))
        return CliRunner()

    return use


def test_failures_come_first_each_with_its_fix(on_fake_host: Callable[[Host], CliRunner]) -> None:
    host = Host(shm=64 * MIB, acs=REDIRECTS)
    done = on_fake_host(host).invoke(cli, ["doctor"])
    lines = done.output.splitlines()
    assert lines[0].startswith("1 fail, 1 warn, ")
    assert lines[2].startswith("FAIL   Host, /dev/shm: 64 MiB")
    assert lines[3].startswith("       costs  NCCL cannot")
    assert any(line.startswith("       fix    docker:") for line in lines[4:7])
    assert next(index for index, line in enumerate(lines) if line.startswith("WARN")) > 4
    assert lines.index("ok") > next(index for index, line in enumerate(lines) if line.startswith("WARN"))
    assert "GPU0  X     NODE" in done.output
    assert isinstance(done.exception, DoctorError)
    assert "Host: /dev/shm" in done.exception.message


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_the_terminal_but_for_commands(
    on_fake_host: Callable[[Host], CliRunner], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr("sglang_bw.cli.findings.out.width", width)
    host = Host(shm=64 * MIB, acs=REDIRECTS, p2p=3, iommu="DMA")
    done = on_fake_host(host).invoke(cli, ["doctor"])
    long = [line for line in done.output.splitlines() if len(line) > width]
    assert all("`" in line or "/" in line for line in long), long
    whole = "`for b in 0000:00:01.1 0000:01:01.1"
    assert any(whole in line and "ECAP_ACS+6.w=0000; done`" in line for line in done.output.splitlines())


def test_strict_counts_warnings(on_fake_host: Callable[[Host], CliRunner]) -> None:
    runner = on_fake_host(Host(governor="powersave"))
    assert runner.invoke(cli, ["doctor"]).exception is None
    assert isinstance(runner.invoke(cli, ["doctor", "--strict"]).exception, DoctorWarningError)


def test_only_the_gpus_asked_for_are_looked_at(on_fake_host: Callable[[Host], CliRunner]) -> None:
    host = Host()
    one_board(7, ecc=1)(host)
    runner = on_fake_host(host)
    assert isinstance(runner.invoke(cli, ["doctor"]).exception, DoctorError)
    done = runner.invoke(cli, ["doctor", "--gpus", "0-3", "--json"])
    assert done.exception is None
    assert [gpu["index"] for gpu in json.loads(done.output)["gpus"]] == [0, 1, 2, 3]


def test_options_of_the_examination_do_not_go_with_a_subcommand() -> None:
    done = CliRunner().invoke(cli, ["doctor", "--json", "kernels"])
    assert done.exit_code == 2
    assert "do not go with `kernels`" in done.output


@pytest.mark.parametrize("options", [(), ("--json",), ("--no-load",)], ids=str)
def test_this_machine_is_examined_without_a_traceback(options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "sglang_bw", "doctor", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 60), done.stderr
    assert "Traceback" not in done.stderr
    if "--json" in options:
        assert json.loads(done.stdout)["findings"]
    else:
        assert "not seen" in done.stdout.splitlines()[0]


def test_no_binding_is_not_seen(environment: Environment, tmp_path: Path) -> None:
    host = Host(boards=[])
    found = doctor.examine(host.system(tmp_path / "root"), None)
    assert "nvidia-ml-py is not installed" in the(found, "driver").says
    assert found.error() is None
    assert inspect_environment(environment).intact
