from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sglang_bw.cli import cli
from sglang_bw.errors import KernelError, NotInstalledError
from sglang_bw.host import kernels
from sglang_bw.host.arch import ARCHS
from sglang_bw.host.kernel_probe import cubin
from tests.conftest import EngineTrees, engine_trees_of
from tests.host import fake_tree

SM120 = ARCHS["sm120"]
# Real compiles, with the Triton that comes with the engine's dependencies.
needs_triton = pytest.mark.engine


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def experts(tree: Path, arch: str = "sm120") -> kernels.Report:
    return kernels.check(ARCHS[arch], tree=tree, parts=("moe",))


def with_experts(report: kernels.Report) -> list[kernels.Checked]:
    return [row for row in report.checked if row.name.startswith("experts")]


@needs_triton
@pytest.mark.parametrize(
    ("arch", "knows_small_boards", "shared"),
    [
        pytest.param("sm120", False, 147_456, id="over on a small board"),
        pytest.param("sm121", False, 147_456, id="over on the other small board"),
        pytest.param("sm120", True, 49_152, id="a configuration for small boards fits"),
    ],
)
def test_shared_memory_is_what_the_engine_would_ask_for(
    tmp_path: Path, arch: str, knows_small_boards: bool, shared: int
) -> None:
    report = experts(fake_tree.write(tmp_path, fake_tree.FP8, knows_small_boards=knows_small_boards), arch)
    fp8 = [kernel for row in with_experts(report) if "fp8" in row.name for kernel in row.kernels]
    assert {kernel.shared_bytes for kernel in fp8} == {shared}
    assert all(0 < kernel.registers <= 255 for kernel in fp8)
    bad = {kernel.shared_bytes for _, kernel in report.bad()}
    assert bad == ({shared} if shared > ARCHS[arch].shared_memory else set())
    assert isinstance(report.error(), KernelError) == bool(bad)
    others = [kernel for row in with_experts(report) if "fp8" not in row.name for kernel in row.kernels]
    assert others
    assert all(kernel.fits(report.arch) for kernel in others)


@needs_triton
def test_large_boards_do_not_get_the_small_configuration(tmp_path: Path) -> None:
    report = experts(fake_tree.write(tmp_path, fake_tree.FP8, knows_small_boards=True), "sm90")
    fp8 = [kernel for row in with_experts(report) if "fp8" in row.name for kernel in row.kernels]
    assert {kernel.num_stages for kernel in fp8} == {4}
    assert not list(report.bad())


@needs_triton
def test_a_kernel_that_does_not_compile_is_told_and_the_next_one_still_checked(tmp_path: Path) -> None:
    report = experts(fake_tree.write(tmp_path, fake_tree.BROKEN))
    first = with_experts(report)[0]
    assert [kernel.kernel for kernel in first.kernels] == ["broken", "fused_moe_kernel"]
    assert "this_is_not_defined" in first.kernels[0].error
    assert first.kernels[1].fits(SM120)
    assert "do not compile: broken" in str(report.error())


@needs_triton
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        pytest.param(fake_tree.RAISES, "ValueError: the layer is not ready", id="raises"),
        pytest.param(fake_tree.CANNOT_BE_IMPORTED, "No module named 'a_package_that_is_missing'", id="import error"),
    ],
)
def test_what_cannot_be_run_is_no_success(tmp_path: Path, source: str, problem: str) -> None:
    report = experts(fake_tree.write(tmp_path, source))
    rows = with_experts(report)
    assert rows
    assert all(problem in row.problem for row in rows)
    assert "could not be checked" in str(report.error())


@needs_triton
def test_a_compiler_that_dies_is_told_and_the_rest_still_checked(tmp_path: Path) -> None:
    report = experts(fake_tree.write(tmp_path, fake_tree.DIES_ONCE))
    died = [row for row in with_experts(report) if row.problem]
    assert [row.problem for row in died] == ["the compiler was killed by SIGABRT"]
    assert all(row.kernels for row in with_experts(report) if row is not died[0])
    assert f"could not be checked: 1, first {died[0].name}" in str(report.error())


@needs_triton
def test_a_compiler_that_dies_every_time_ends_the_check(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="SIGABRT"):
        experts(fake_tree.write(tmp_path, fake_tree.DIES))


@needs_triton
def test_what_the_release_does_not_have_is_no_fault(tmp_path: Path) -> None:
    report = experts(fake_tree.write(tmp_path, fake_tree.NOT_THERE))
    assert all("fused_experts_impl" in row.absent for row in with_experts(report))
    assert report.error() is not None, "an engine of which nothing at all could be compiled is not fit"


@needs_triton
def test_json_and_exit_code(tmp_path: Path) -> None:
    tree = fake_tree.write(tmp_path, fake_tree.FP8)
    command = [sys.executable, "-m", "sglang_bw", "doctor", "kernels", "--tree", str(tree), "--part", "moe"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 36
    report = json.loads(done.stdout)
    assert (report["shared_memory_limit"], report["engine"]) == (101_376, "0.0.1")
    found = {kernel["shared_bytes"] for row in report["checked"] for kernel in row["kernels"] if not kernel["fits"]}
    assert found == {147_456}
    table = subprocess.run(command, capture_output=True, text=True, check=False)
    assert table.returncode == 36
    assert re.search(r"^OVER +fused_moe_kernel .* 147,456 ", table.stdout, re.MULTILINE)
    assert "need more than 101,376 bytes of shared memory: fused_moe_kernel" in table.stderr


def test_an_environment_without_an_engine(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "empty").mkdir()
    if importlib.util.find_spec("sglang"):
        pytest.skip("this environment has an engine")
    with pytest.raises(NotInstalledError):
        kernels.check(SM120, tree=tmp_path / "empty")


def test_a_tree_without_an_engine(tmp_path: Path) -> None:
    with pytest.raises(NotInstalledError, match="has no sglang/ in it"):
        kernels.check(SM120, tree=tmp_path)


def test_help_names_the_architectures() -> None:
    text = CliRunner().invoke(cli, ["doctor", "kernels", "--help"]).output
    assert "sm120" in text
    assert "sm90" in text


@needs_triton
def test_registers_and_local_memory_are_those_ptxas_prints(tmp_path: Path) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    # Many live values, and few registers allowed: the compiler has to spill.
    source = tmp_path / "spilling.py"
    source.write_text(
        "import triton, triton.language as tl\n"
        "@triton.jit\n"
        "def spilling(x, y, B: tl.constexpr):\n"
        "    o = tl.arange(0, B)\n"
        "    a = tl.load(x + o[:, None] * B + o[None, :])\n"
        "    b = tl.load(y + o[:, None] * B + o[None, :])\n"
        "    tl.store(x + o[:, None] * B + o[None, :], tl.dot(a, b) + a.to(tl.float32) * b)\n"
    )
    spec = importlib.util.spec_from_file_location("spilling", source)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    signature = {"x": "*fp16", "y": "*fp16", "B": "constexpr"}
    made = triton.compiler.ASTSource(fn=module.spilling, signature=signature, constexprs={(2,): 128})
    compiled = triton.compile(made, target=GPUTarget("cuda", 120, 32), options={"num_warps": 4, "maxnreg": 64})
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
    command = [str(ptxas), "-v", "--gpu-name=sm_120a", str(ptx), "-o", str(tmp_path / "kernel.cubin")]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    frame = re.search(r"(\d+) bytes stack frame", log)
    assert registers
    assert frame
    assert int(frame[1]) > 0, "the kernel does not spill: choose a larger one"
    assert cubin.usage((tmp_path / "kernel.cubin").read_bytes()) == cubin.Usage(int(registers[1]), int(frame[1]))


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x7fELF\x02\x01", id="cut"),
        pytest.param(b"MZ" + bytes(200), id="another format"),
        pytest.param(b"\x7fELF\x02\x01" + bytes(58), id="no sections"),
    ],
)
def test_what_is_no_cubin_is_an_error(damaged: bytes) -> None:
    with pytest.raises(ValueError, match=r"ELF|register"):
        cubin.usage(damaged)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("kind", ["stock", "patched"])
def test_everything_of_the_engine_fits_on_sm120(engine_trees: EngineTrees, kind: str) -> None:
    report = kernels.check(SM120, tree=getattr(engine_trees, kind))
    assert report.error() is None
    assert not [row.name for row in report.checked if row.absent]
    assert {row.family for row in report.checked} == set(kernels.PARTS)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(("kind", "over"), [("stock", {147_456}), ("patched", set())])
def test_the_fp8_experts_of_0_5_9_fit_on_sm120_once_patched(kind: str, over: set[int]) -> None:
    report = kernels.check(SM120, tree=getattr(engine_trees_of("0.5.9"), kind), parts=("moe",))
    bad = list(report.bad())
    assert {kernel.shared_bytes for _, kernel in bad} == over
    assert all("fp8" in row.name and "8192 tokens" in row.name for row, _ in bad)
    assert not [row.problem for row in report.checked if row.problem]
    assert any("fp8 channel, 8192 tokens" in row.name and row.kernels for row in report.checked)
