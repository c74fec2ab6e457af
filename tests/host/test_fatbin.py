from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_bw.host import elf, fatbin
from sglang_bw.host.fatbin import Target
from tests.host.fake_binary import container, shared_object, write

WHOLE = shared_object(container("sm_90a", "compute_80"), container("sm_100f", "sm_120a"))


def names(path: Path) -> set[str]:
    return set(map(str, fatbin.targets(path)))


def test_reads_every_container_and_the_libraries(tmp_path: Path) -> None:
    path = tmp_path / "common_ops.abi3.so"
    path.write_bytes(WHOLE)
    assert names(path) == {"sm_90a", "compute_80", "sm_100f", "sm_120a"}
    with elf.opened(path) as opened:
        assert opened.needed() == ["libcudart.so.13", "libc.so.6"]


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_agrees_with_what_nvcc_was_asked_for(tmp_path: Path) -> None:
    """The form of the file is nvcc's own: compile for known architectures and read them back."""
    (tmp_path / "k.cu").write_text("__global__ void k(float *a) { a[threadIdx.x] *= 2; }\n")
    asked = {"sm_90a": "90a", "sm_120f": "120f"}
    options = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in asked.values()]
    options += ["-gencode=arch=compute_120a,code=sm_120a"]
    library = tmp_path / "lib.so"
    command = ["nvcc", "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", *options, "k.cu", "-o", str(library)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if "Unsupported gpu architecture" in done.stderr:
        pytest.skip("an nvcc that does not know Blackwell")
    assert done.returncode == 0, done.stderr
    assert names(library) == {*asked, "sm_120a"}
    with elf.opened(library) as opened:
        assert any(name.startswith("libcudart.so.") for name in opened.needed())


@pytest.mark.parametrize(
    ("target", "gpu", "runs"),
    [
        (Target(120, "sass", "a"), (12, 0), True),
        (Target(120, "sass", "a"), (12, 1), False),
        (Target(120, "sass", "f"), (12, 1), True),
        (Target(120, "sass"), (12, 1), True),
        (Target(121, "sass"), (12, 0), False),
        (Target(100, "sass", "f"), (10, 3), True),
        (Target(100, "sass", "f"), (12, 0), False),
        (Target(90, "sass"), (12, 0), False),
        (Target(80, "sass"), (8, 6), True),
        (Target(90, "ptx"), (12, 0), True),
        (Target(90, "ptx", "a"), (12, 0), False),
        (Target(120, "ptx", "f"), (12, 1), True),
        (Target(121, "ptx"), (12, 0), False),
    ],
    ids=str,
)
def test_what_runs_where(target: Target, gpu: tuple[int, int], runs: bool) -> None:
    assert target.runs_on(gpu) is runs


def test_no_device_code_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "plain.so"
    path.write_bytes(shared_object())
    assert fatbin.targets(path) == frozenset()


@pytest.mark.parametrize("data", [b"", b"text", b"\x7fELF\x01\x01" + b"\0" * 90, b"\x7fELF\x02\x01" + b"\xff" * 90])
def test_what_is_no_shared_object_says_so(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(data)
    with pytest.raises(elf.BadElfError):
        fatbin.targets(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(length=st.integers(0, len(WHOLE) - 1))
def test_a_truncated_file_is_never_taken_for_whole(tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut.so"
    path.write_bytes(WHOLE[:length])
    with pytest.raises(elf.BadElfError):
        fatbin.targets(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
@given(at=st.integers(0, len(WHOLE) - 8), value=st.binary(min_size=1, max_size=8))
def test_damage_ends_in_an_answer_or_a_clear_error(tmp_path: Path, at: int, value: bytes) -> None:
    data = bytearray(WHOLE)
    data[at : at + len(value)] = value
    path = tmp_path / "damaged.so"
    path.write_bytes(data)
    try:
        fatbin.targets(path)
        with elf.opened(path) as opened:
            opened.needed()
    except elf.BadElfError:
        pass


def test_a_section_cut_inside_a_container_is_told() -> None:
    data = container("sm_90a", "sm_120a")
    for cut in range(4, len(data)):
        with pytest.raises(elf.BadElfError):
            list(fatbin.containers(data, 0, cut))


def test_write_is_readable(tmp_path: Path) -> None:
    assert names(write(tmp_path / "a" / "b.so", "sm_120")) == {"sm_120"}
