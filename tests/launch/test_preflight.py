"""What `serve` asks of the host's GPUs, on a described host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from sglang_bw.cli import cli, host_checks
from sglang_bw.errors import BwError, GpuBusyError, GpuSelectionError, ToolchainError
from sglang_bw.host import nvml
from sglang_bw.launch import engine as engines
from sglang_bw.launch import preflight
from sglang_bw.launch.command import Command
from sglang_bw.recipes import flags
from tests.host.fake_host import GIB, Board, Host, process
from tests.host.test_doctor import make_environment
from tests.launch.serving import free_port


def command(*tokens: str) -> Command:
    return Command(flags.parse(("--model-path", "org/model", *tokens)), {}, "cuda")


def indices(host: Host, *tokens: str, visible: str | None = None) -> list[int]:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return [gpu.index for gpu in preflight.used(command(*tokens), nvml.read(host.nvml()), environ)]


def test_the_gpus_of_a_launch_follow_from_its_sizes() -> None:
    assert indices(Host()) == [0]
    assert indices(Host(), "--tp", "4") == [0, 1, 2, 3]
    assert indices(Host(), "--tp-size", "2", "--pp-size", "2", "--base-gpu-id", "4") == [4, 5, 6, 7]
    assert indices(Host(), "--tp", "16", "--nnodes", "2") == list(range(8))
    assert indices(Host(), "--tp", "2", visible="6,7") == [6, 7]
    assert indices(Host(), "--tp", "2", visible="GPU-00000005,GPU-00000001") == [5, 1]
    assert indices(Host(), "--tp", "2", visible="MIG-11111111-2222") == []


@pytest.mark.parametrize(
    ("tokens", "visible", "says"),
    [
        (("--tp", "16"), None, "needs 16 GPUs (tp-size 16), and 8 can be used"),
        (("--tp", "4"), "0-2".replace("-", ",1,"), "needs 4 GPUs (tp-size 4), and 3 can be used (CUDA_VISIBLE_DEVICES"),
        ((), "9", "GPU 9 is not on this machine"),
        ((), "", "needs 1 GPUs (one engine), and 0 can be used (CUDA_VISIBLE_DEVICES is set and empty)"),
        (("--tp", "2"), " ", "0 can be used (CUDA_VISIBLE_DEVICES is set and empty)"),
    ],
)
def test_too_few_gpus_are_refused(tokens: tuple[str, ...], visible: str | None, says: str) -> None:
    with pytest.raises(GpuSelectionError) as error:
        indices(Host(), *tokens, visible=visible)
    assert says in error.value.message
    assert error.value.hint


def problems(host: Host, tmp_path: Path, *tokens: str, change: Callable[[Path], None] | None = None) -> list[object]:
    environment = make_environment(tmp_path / "env")
    if change:
        change(tmp_path / "env")
    here = nvml.read(host.nvml())
    host.environ = {"PATH": str(environment.executable.parent), **host.environ}
    system = host.system(tmp_path / "root")
    launch = command(*tokens)
    return list(preflight.problems(launch, preflight.used(launch, here, {}), here, system, environment))


def test_a_host_that_is_well_has_no_problem(tmp_path: Path) -> None:
    assert problems(Host(), tmp_path, "--tp", "8") == []


def test_memory_that_somebody_holds_is_named_with_its_holder(tmp_path: Path) -> None:
    host = Host()
    host.boards[3] = Board(used=90 * GIB, processes=[process(2**22 + 1, 90 * GIB)])
    (error,) = problems(host, tmp_path, "--tp", "8")
    assert isinstance(error, GpuBusyError)
    assert f"GPU 3: 5.6 of 95.6 GiB free, held by pid {2**22 + 1} (" in error.message
    assert f"kill {2**22 + 1}" in error.hint


def test_memory_of_a_gpu_that_is_not_used_does_not_matter(tmp_path: Path) -> None:
    host = Host()
    host.boards[3] = Board(used=90 * GIB)
    assert problems(host, tmp_path, "--tp", "2") == []


def test_a_pool_of_a_fixed_size_may_share_a_gpu(tmp_path: Path) -> None:
    host = Host(boards=[Board(used=90 * GIB)])
    assert problems(host, tmp_path, "--max-total-tokens", "16384") == []


def test_what_the_first_start_compiles_with_must_be_there(tmp_path: Path) -> None:
    def remove(root: Path) -> None:
        (root / "bin/ninja").unlink()
        (root / "base/include/python3.12/Python.h").unlink()

    (error,) = problems(Host(environ={"CUDA_HOME": "/no/such"}, driver="550.90.07"), tmp_path, change=remove)
    assert isinstance(error, ToolchainError)
    for part in ("driver 550.90.07", "nvcc: not found", "ninja: not found", "Python.h is not there"):
        assert part in error.message
    for part in ("CUDA_HOME", "pip install ninja", "python3.12-dev"):
        assert part in error.hint


def test_an_nvcc_that_does_not_know_the_gpu(tmp_path: Path) -> None:
    def old(root: Path) -> None:
        (root / "bin/nvcc").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.6, V12.6.20'\n")

    (error,) = problems(Host(), tmp_path, change=old)
    assert isinstance(error, ToolchainError)
    assert "CUDA 12.6 does not know sm120" in error.message
    assert "12.8 or newer" in error.hint


def test_gpus_become_what_cuda_reads() -> None:
    here = nvml.read(Host().nvml())
    assert preflight.visible("0-3") == {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert preflight.visible("4-5,1", here)["CUDA_VISIBLE_DEVICES"] == "4,5,1"
    assert preflight.visible("GPU-00000005", here)["CUDA_VISIBLE_DEVICES"] == "GPU-00000005-1111-2222-3333-444455556666"
    assert preflight.visible("MIG-1234", here)["CUDA_VISIBLE_DEVICES"] == "MIG-1234"
    for wrong in ("0,GPU-00000005", "12", "a", "3-1"):
        with pytest.raises(GpuSelectionError):
            preflight.visible(wrong, here)


def test_dry_run_shows_them_without_a_gpu() -> None:
    done = CliRunner().invoke(cli, ["serve", "tiny", "--device", "cuda", "--gpus", "2-3", "--dry-run"])
    assert done.exception is None, done.output
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=2,3 " in done.output


def test_gpus_on_a_cpu_are_a_wrong_usage() -> None:
    done = CliRunner().invoke(cli, ["serve", "tiny", "--device", "cpu", "--gpus", "0"])
    assert done.exit_code == 2
    assert "--gpus goes with --device cuda" in done.output


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ((), GpuBusyError, "GPU 0: 5.6 of 95.6 GiB free"),
        (("--gpus", "9"), GpuSelectionError, "GPU 9 is not on this machine; GPUs here: 2: 0 to 1"),
        (("--", "--tp", "4"), GpuSelectionError, "needs 4 GPUs"),
        (("--gpus", "1"), None, ""),
    ],
)
def test_serve_refuses_before_it_starts(
    fake_tree: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    error: type[BwError] | None,
    says: str,
) -> None:
    """The refusals reach the command line; the one that is let through gets as far as the start."""
    host = Host(boards=[Board(used=90 * GIB), Board()])
    monkeypatch.setattr(nvml, "load", host.nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(preflight.toolchain, "findings", lambda *_: ())
    monkeypatch.setattr(preflight.drivers, "findings", lambda *_: ())
    started: list[dict[str, str]] = []

    def start(_command: Command, _python: Path, environ: dict[str, str], *_: object) -> None:
        started.append(environ)
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_bw.cli.foreground.server.start", start)
    common = ["--device", "cuda", "--engine-tree", str(fake_tree), "--port", str(free_port()), "--draft", str(model)]
    done = CliRunner().invoke(cli, ["serve", str(model), *common, *options])
    if error is None:
        assert started[0]["CUDA_VISIBLE_DEVICES"] == "1"
        assert started[0]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    else:
        assert not started
        assert isinstance(done.exception, error), done.output
        assert says in done.exception.message
        if not isinstance(done.exception, GpuSelectionError) or "needs" in says:
            assert "--force goes on all the same" in done.exception.hint


def test_force_goes_on_and_says_what_it_let_through(fake_tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine = engines.find(None, fake_tree)
    here = nvml.read(Host(boards=[Board(used=90 * GIB)]).nvml())
    launch = command("--tp", "2", "--load-format", "dummy")
    with pytest.raises(GpuSelectionError):
        host_checks.check(launch, here, engine, {}, force=False)
    host_checks.check(launch, here, engine, {}, force=True)
    said = capfd.readouterr().err.replace("\n", " ")
    assert "warning: the launch needs 2 GPUs" in said


def test_programs_of_the_engines_environment_come_first(fake_tree: Path) -> None:
    engine = engines.find(None, fake_tree)
    assert str(engine.probed.executable.parent) in engine.environment()["PATH"].split(":")
