from __future__ import annotations

import re
import tomllib
from itertools import product
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from sglang_bw.errors import BadWheelError, InstallError, LintError, UnknownBaseError
from sglang_bw.fork import locks
from sglang_bw.fork.locks import DEVICES, LEFT_OUT, MACHINES, PYTHONS, Lock, Locked
from sglang_bw.fork.series import bases
from tests.fork.target import write_wheel

CHECKOUT = Path(__file__).resolve().parents[2]
PATCHES = CHECKOUT / "patches"
BASE = "0.5.23"
FOLDER = PATCHES / BASE / locks.FOLDER

ALL = [pytest.param(*names, id="-".join(names)) for names in product(DEVICES, PYTHONS, MACHINES)]

# Packages that hold or compile kernels for a GPU, and those that only drive them.
KERNELS = re.compile(
    r"sglang-kernel|sgl-.*|flashinfer.*|flash-attn.*|quack-kernels|humming-kernels|tilelang|nvidia-cutlass.*|kernels.*"
    r"|nvidia-mathdx|cuda-tile|cuda-python|nvshmem4py.*|torch-memory-saver|deepseek-.*|nccl4py|torchcodec"
)


def load(device: str, python: str, machine: str) -> Lock:
    return Lock.load(PATCHES, BASE, device, python, machine)


def applies(requirement: Requirement, python: str, machine: str) -> bool:
    here = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "extra": "",
    }
    return requirement.marker is None or Marker(str(requirement.marker)).evaluate(here)


def test_there_is_one_for_each_device_python_and_machine_and_no_other() -> None:
    expected = {f"{device}-{python}-{machine}.txt" for device, python, machine in product(DEVICES, PYTHONS, MACHINES)}
    assert {path.name for path in FOLDER.glob("*.txt")} == expected
    assert len(expected) == 12


@pytest.mark.parametrize(("device", "python", "machine"), ALL)
def test_every_package_is_pinned_with_hashes_and_none_twice(device: str, python: str, machine: str) -> None:
    packages = load(device, python, machine).packages
    assert len(packages) > 100
    assert all(package.hashes for package in packages)
    assert len({package.name for package in packages}) == len(packages)


@pytest.mark.parametrize(("device", "python", "machine"), ALL)
def test_no_index_and_no_address(device: str, python: str, machine: str) -> None:
    """Where packages come from is the user's own setting; a URL requirement would get around it."""
    text = locks.lock_path(PATCHES, BASE, device, python, machine).read_text()
    assert not re.search(r"://|--(extra-)?index-url|--find-links|--trusted-host| @ ", text)


@pytest.mark.parametrize(("device", "python", "machine"), ALL)
def test_the_engines_own_pins_hold(device: str, python: str, machine: str) -> None:
    """Whatever the engine's METADATA asks for has the version it asks for; cuda.in is that list."""
    wanted = [r for r in locks.read_input(FOLDER / "cuda.in") if applies(r, python, machine)]
    found = {package.name: package.version for package in load(device, python, machine).packages}
    checked = 0
    for requirement in wanted:
        version = found.get(canonicalize_name(requirement.name))
        assert version is not None or device == "cpu", f"{requirement} is not in the lock"
        if version is not None:
            assert requirement.specifier.contains(version, prereleases=True), f"{requirement}: {version}"
            checked += 1
    assert checked > 45


@pytest.mark.parametrize(("device", "python", "machine"), ALL)
def test_what_the_input_asks_for_is_there(device: str, python: str, machine: str) -> None:
    found = {package.name: package.version for package in load(device, python, machine).packages}
    for requirement in locks.read_input(FOLDER / f"{device}.in"):
        if applies(requirement, python, machine):
            assert requirement.specifier.contains(found[canonicalize_name(requirement.name)], prereleases=True)


@pytest.mark.parametrize(("python", "machine"), list(product(PYTHONS, MACHINES)))
def test_cpu_locks_hold_no_kernel_packages(python: str, machine: str) -> None:
    names = {package.name for package in load("cpu", python, machine).packages}
    assert not [name for name in names if KERNELS.fullmatch(name)]
    assert [name for name in {p.name for p in load("cuda", python, machine).packages} if KERNELS.fullmatch(name)]
    assert {"torch", "triton", "transformers", "xgrammar"} <= names


@pytest.mark.parametrize(("device", "python", "machine"), ALL)
def test_outlines_is_left_out_where_it_has_no_wheel(device: str, python: str, machine: str) -> None:
    names = {package.name for package in load(device, python, machine).packages}
    assert ("outlines" in names) == (python != "3.13")
    assert "sglang" not in names


def test_leaving_outlines_out_is_said_in_the_input() -> None:
    assert LEFT_OUT == {"3.13": ("outlines",)}
    assert "outlines is left out on Python 3.13" in (FOLDER / "cuda.in").read_text()


@pytest.mark.parametrize(("device", "python", "machine"), ALL)
def test_the_tool_runs_beside_the_engine(device: str, python: str, machine: str) -> None:
    """The default target is the tool's own environment: the lock must not break the tool."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    needs = {canonicalize_name(r.name): r.specifier for r in map(Requirement, project["dependencies"])}
    for package in load(device, python, machine).packages:
        assert needs.get(package.name, SpecifierSet()).contains(package.version), package


def test_locks_differ_only_where_they_must() -> None:
    """One version of a package over all Pythons and machines of a device."""
    for device in DEVICES:
        versions: dict[str, set[str]] = {}
        for python, machine in product(PYTHONS, MACHINES):
            for package in load(device, python, machine).packages:
                versions.setdefault(package.name, set()).add(package.version)
        assert not {name: found for name, found in versions.items() if len(found) > 1}


@pytest.mark.engine
def test_cuda_in_is_the_metadata_of_the_engine(engine_trees: object) -> None:
    """Read from the stock wheel itself."""
    stock: Path = engine_trees.stock  # type: ignore[attr-defined]
    metadata = next(stock.glob("sglang-*.dist-info/METADATA")).read_bytes()
    assert list(map(Requirement, locks.own_requirements(metadata))) == locks.read_input(FOLDER / "cuda.in")


def test_requirements_of_a_wheel(tmp_path: Path) -> None:
    metadata = b"Name: sglang\nVersion: 1\nRequires-Dist: a==1\nRequires-Dist: outlines==0.1.11\n"
    metadata += b'Requires-Dist: b>2; extra == "x"\nRequires-Dist: sglang[x]; extra == "all"\n'
    metadata += b'Requires-Dist: c; sys_platform == "linux"\n\nRequires-Dist: text\n'
    wheel = write_wheel(tmp_path, "sglang", "1", {"sglang-1.dist-info/METADATA": metadata})
    assert locks.engine_requirements(wheel) == [
        "a==1",
        'outlines==0.1.11 ; python_version < "3.13"',
        'c; sys_platform == "linux"',
    ]


def test_no_wheel(tmp_path: Path) -> None:
    with pytest.raises(BadWheelError):
        locks.engine_requirements(tmp_path / "none.whl")


@pytest.mark.parametrize(
    "line",
    ["six", "six>=1", "six==1.17.0", "six==1.17.0 --hash=md5:00", "-r other.txt", "six @ file:///six.whl", "{{"],
)
def test_line_that_is_not_pinned_with_a_hash_is_an_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "cpu.txt"
    path.write_text(f"good==1 \\\n    --hash=sha256:{'0' * 64}\n{line}\nworse\n")
    with pytest.raises(LintError) as caught:
        locks.parse(path)
    assert len(caught.value.findings) == 2


def test_written_lines_read_back(tmp_path: Path) -> None:
    packages = (Locked("a", "1.0", ("0" * 64, "1" * 64)), Locked("b-c", "2.0+x", ("f" * 64,)))
    path = tmp_path / "lock.txt"
    path.write_text(locks.render(packages))
    assert locks.parse(path) == packages


def test_empty_and_missing_locks(tmp_path: Path) -> None:
    with pytest.raises(UnknownBaseError, match="no dependency lock"):
        Lock.load(tmp_path, BASE, "cpu", "3.11", "x86_64")
    path = locks.lock_path(tmp_path, BASE, "cpu", "3.11", "x86_64")
    path.parent.mkdir(parents=True)
    path.write_text("# nothing\n")
    with pytest.raises(LintError, match="no package"):
        Lock.load(tmp_path, BASE, "cpu", "3.11", "x86_64")


@pytest.mark.parametrize(
    ("installed", "exactly", "locally"),
    [
        ("2.14.1", True, True),
        ("2.14.1+cpu", False, True),
        ("2.14.2", False, False),
        (None, False, False),
        ("unknown", False, False),
    ],
)
def test_what_meets_a_pin(installed: str | None, exactly: bool, locally: bool) -> None:
    torch = Locked("torch", "2.14.1", ())
    assert (torch.is_met(installed), torch.is_met_locally(installed)) == (exactly, locally)


@pytest.mark.parametrize(("python", "machine"), list(product(PYTHONS, MACHINES)))
def test_without_cuda(python: str, machine: str) -> None:
    """Beside a CPU-only torch: triton stays, since the engine imports it on every device."""
    lock = load("cpu", python, machine)
    left = {package.name for package in lock.packages} - {package.name for package in lock.without_cuda()}
    assert {package.name for package in lock.torch()} == {"torch", "torchvision", "torchaudio"} <= left
    assert "triton" not in left
    assert all(name.startswith(("torch", "nvidia-", "cuda-")) for name in left)


def test_torch_is_the_release_the_engine_pins() -> None:
    for names in product(DEVICES, PYTHONS, MACHINES):
        found = {package.name: Version(package.version) for package in load(*names).packages}
        assert (found["torch"], found["torchvision"]) == (Version("2.14.1"), Version("0.29.1"))


OLDER = [(base, name) for base in bases(PATCHES) if base != BASE for name in locks.lock_names(PATCHES, base)]


@pytest.mark.parametrize(("base", "name"), OLDER)
def test_an_older_base_has_what_its_engine_asks_for_and_lets_the_tool_run(base: str, name: str) -> None:
    device, python, machine = name.split("-")
    packages = Lock.load(PATCHES, base, device, python, machine).packages
    found = {package.name: package.version for package in packages}
    assert len(found) == len(packages) > 100
    assert all(package.hashes for package in packages)
    assert "://" not in locks.lock_path(PATCHES, base, device, python, machine).read_text()
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    for requirement in locks.read_input(PATCHES / base / locks.FOLDER / f"{device}.in"):
        if applies(requirement, python, machine):
            assert requirement.specifier.contains(found[canonicalize_name(requirement.name)], prereleases=True)
    for requirement in map(Requirement, project["dependencies"]):
        version = found.get(canonicalize_name(requirement.name))
        assert version is None or requirement.specifier.contains(version), f"{requirement}: {version}"


def test_a_base_has_the_locks_that_are_there_else_all_that_its_inputs_allow(tmp_path: Path) -> None:
    folder = tmp_path / BASE / locks.FOLDER
    folder.mkdir(parents=True)
    assert locks.lock_names(tmp_path, BASE) == []
    (folder / "cuda.in").write_text("torch\n")
    every = [f"cuda-{python}-{machine}" for python, machine in product(PYTHONS, MACHINES)]
    assert locks.lock_names(tmp_path, BASE) == every
    for name in ("cuda-3.12-x86_64", "cuda-3.11-x86_64"):
        (folder / f"{name}.txt").write_text("")
    assert locks.lock_names(tmp_path, BASE) == ["cuda-3.11-x86_64", "cuda-3.12-x86_64"]


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A uv that writes its options into the lock, under what it found there; the registry is out of reach."""
    program = tmp_path / "uv"
    program.write_text(
        '#!/bin/sh\nfor last; do [ "$previous" = --output-file ] && out=$last; previous=$last; done\n'
        'echo "$@" >> "$out"\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(locks, "find_uv", lambda: str(program))
    folder = tmp_path / BASE / locks.FOLDER
    folder.mkdir(parents=True)
    (folder / "cuda.in").write_text("torch\n")
    return folder


def test_one_lock_of_a_release_of_the_past(uv: Path) -> None:
    written = locks.compile_locks(
        uv.parents[1], BASE, names=["cuda-3.12-x86_64"], until="2026-03-01", progress=lambda _: None
    )
    assert written == [uv / "cuda-3.12-x86_64.txt"] == list(uv.glob("*.txt"))
    (asked,) = written[0].read_text().splitlines()
    assert "--exclude-newer 2026-03-01 cuda.in" in asked
    assert "--python-version 3.12 --python-platform x86_64-manylinux_2_34" in asked


def test_a_new_lock_starts_from_the_versions_of_the_first(uv: Path) -> None:
    (uv / "cuda-3.11-x86_64.txt").write_text("first\n")
    locks.compile_locks(uv.parents[1], BASE, names=["cuda-3.12-x86_64"], progress=lambda _: None)
    assert (uv / "cuda-3.12-x86_64.txt").read_text().startswith("first\n")
    assert (uv / "cuda-3.11-x86_64.txt").read_text() == "first\n"
    locks.compile_locks(uv.parents[1], BASE, upgrade=True, progress=lambda _: None)
    first, second = (uv / f"cuda-{python}-x86_64.txt" for python in ("3.11", "3.12"))
    assert "--upgrade" in first.read_text()
    assert second.read_text().startswith(first.read_text())


def test_compiling_needs_uv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(locks, "find_uv", lambda: None)
    with pytest.raises(InstallError, match="uv"):
        locks.compile_locks(tmp_path, BASE, progress=print)
