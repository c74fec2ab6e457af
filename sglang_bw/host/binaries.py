"""Findings about compiled kernels: whether the shared objects in the engine's environment have code for these GPUs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sglang_bw.fork.environment import Environment, dist_infos, name_and_version
from sglang_bw.host import elf, fatbin
from sglang_bw.host.drivers import cuda_major
from sglang_bw.host.fatbin import Target
from sglang_bw.host.finding import Finding, Group, listed
from sglang_bw.host.gpus import Gpu

_GROUP = Group("Kernels")
KERNEL_DISTRIBUTIONS = ("sglang-kernel", "sgl-kernel")
_OBJECT = "common_ops"
# What a server can do without: it chooses these backends for other architectures only, or by a flag.
_OPTIONAL = {
    "flash_ops": "FlashAttention 3",
    "flashmla_ops": "FlashMLA",
    "infllm_ops": "InfLLM",
    "spatial_ops": "SM split",
}


@dataclass(frozen=True)
class Binary:
    """A shared object with kernels: what it has code for, the libraries it needs, why it could not be read."""

    path: Path
    targets: frozenset[Target] = frozenset()
    needed: tuple[str, ...] = ()
    problem: str = ""

    @classmethod
    def read(cls, path: Path) -> Binary:
        """Read a file; one that is broken has a ``problem``."""
        try:
            with elf.opened(path) as opened:
                needed = tuple(opened.needed())
            return cls(path, fatbin.targets(path), needed)
        except OSError as error:
            return cls(path, problem=error.strerror or str(error))
        except elf.BadElfError as error:
            return cls(path, problem=str(error))

    @property
    def stem(self) -> str:
        """``common_ops`` of ``common_ops.abi3.so``."""
        return self.path.name.partition(".")[0]

    @property
    def cuda(self) -> int:
        """Major release of the CUDA runtime that it is linked to, 0 when it is not."""
        found = next((match[1] for name in self.needed if (match := re.match(r"libcudart\.so\.(\d+)", name))), "0")
        return int(found)

    def runs_on(self, gpu: Gpu) -> bool:
        """Tell whether it has code for a GPU."""
        return any(target.runs_on(gpu.capability) for target in self.targets)


def findings(environment: Environment, boards: tuple[Gpu, ...], requires: list[str]) -> Iterator[Finding]:
    """Yield what there is to say about the kernel package and torch.

    :param requires: what the engine's metadata requires, a requirement a line.
    """
    folder = _package(environment, "sgl_kernel")
    if folder is None or not any(name in environment.installed for name in KERNEL_DISTRIBUTIONS):
        says = "the environment has no sglang-kernel"
        if boards:
            yield _GROUP.fail(
                "kernel wheel",
                says,
                costs="the engine runs on the CPU only",
                fix=_install(environment, " --device cuda"),
            )
        else:
            yield _GROUP.unseen(
                "kernel wheel", f"{says}; needed on a GPU only", fix=_install(environment, " --device cuda")
            )
    else:
        yield from _versions(environment, requires)
        yield from _kernels(environment, folder, boards)
    torch = _package(environment, "torch")
    library = torch / "lib" / "libtorch_cuda.so" if torch else None
    if library and library.is_file():
        yield from _judge(environment, Binary.read(library), boards, "torch")


def _install(environment: Environment, options: str = "") -> str:
    return f"`sglang-bw install --python {environment.executable}{options}`"


def _package(environment: Environment, package: str) -> Path | None:
    folders = (Path(entry, package) for entry in environment.sys_path)
    return next((folder for folder in folders if (folder / "__init__.py").is_file()), None)


def requirements(environment: Environment, distribution: str) -> list[str]:
    """Return the ``Requires-Dist`` lines of an installed distribution."""
    for info in dist_infos(environment.sys_path):
        if name_and_version(info)[0] == distribution and (info / "METADATA").is_file():
            text = (info / "METADATA").read_text(encoding="utf-8", errors="replace")
            head = text.partition("\n\n")[0]
            return [line.partition(": ")[2] for line in head.splitlines() if line.startswith("Requires-Dist: ")]
    return []


def _versions(environment: Environment, requires: list[str]) -> Iterator[Finding]:
    """Yield whether the packages with kernels are of the releases that the engine was built with."""
    wanted: dict[str, Requirement] = {}
    for text in requires:
        with contextlib.suppress(InvalidRequirement):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted[canonicalize_name(requirement.name)] = requirement
    for name in (*KERNEL_DISTRIBUTIONS, "flashinfer-python"):
        version = environment.installed.get(name)
        if version is None:
            continue
        # A local part names the CUDA that it was built for; the release decides.
        if name in wanted and not wanted[name].specifier.contains(version.partition("+")[0], prereleases=True):
            yield _GROUP.fail(
                _title(name),
                f"{name} {version}, but the engine needs {wanted[name]}",
                costs="the engine refuses to start, or calls operators that are not there",
                fix=_install(environment),
            )
        else:
            yield _GROUP.ok(_title(name), f"{name} {version}")


def _title(name: str) -> str:
    return "kernel wheel" if name in KERNEL_DISTRIBUTIONS else "FlashInfer"


def _kernels(environment: Environment, folder: Path, boards: tuple[Gpu, ...]) -> Iterator[Finding]:
    capabilities = sorted({gpu.capability for gpu in boards}) or [(0, 0)]
    for path in dict.fromkeys(_chosen(folder, capability) for capability in capabilities):
        if path is None:
            yield _GROUP.fail(
                "kernel objects",
                f"{folder} has no {_OBJECT} to load",
                costs="the engine dies at its first import",
                fix=_install(environment),
            )
        else:
            yield from _judge(environment, Binary.read(path), boards, "kernel objects")
    optional = [Binary.read(path) for path in sorted(folder.glob("*.so")) if path.name.partition(".")[0] in _OPTIONAL]
    absent = [binary for binary in optional if binary.targets and not all(binary.runs_on(gpu) for gpu in boards)]
    if boards and absent:
        names = listed([f"{_OPTIONAL[binary.stem]} (has {_names(binary)})" for binary in absent], 6)
        yield _GROUP.ok("backends without code here", f"{names}: not to be chosen with --attention-backend")
    yield from (_broken(environment, binary, "kernel objects") for binary in optional if binary.problem)


def _chosen(folder: Path, capability: tuple[int, int]) -> Path | None:
    """Return the object that the package loads: sm90's on an H100 or H200, else sm100's, else its only one."""
    for place in (folder / ("sm90" if capability == (9, 0) else "sm100"), folder):
        if found := sorted(place.glob(f"{_OBJECT}.*so")):
            return found[0]
    return None


def _judge(environment: Environment, binary: Binary, boards: tuple[Gpu, ...], name: str) -> Iterator[Finding]:
    says = f"{binary.stem} of {binary.path.parent.name}/ has {_names(binary)}"
    unfit = sorted({gpu.arch for gpu in boards if not binary.runs_on(gpu)})
    major = cuda_major(environment.installed)
    if binary.problem:
        yield _broken(environment, binary, name)
    elif unfit:
        yield _GROUP.fail(
            name,
            f"{says}, nothing for {', '.join(unfit)}",
            costs="`no kernel image is available for execution on the device`",
            fix=f"{_install(environment)}, or a wheel built for {unfit[0]}",
        )
    elif binary.cuda and major and binary.cuda != major:
        yield _GROUP.fail(
            name,
            f"{says}, linked to CUDA {binary.cuda}; torch is on CUDA {major}",
            costs="`undefined symbol`, or libcudart.so is not found, at the first import",
            fix=_install(environment),
        )
    else:
        yield _GROUP.ok(name, f"{says}, linked to CUDA {binary.cuda}" if binary.cuda else says)


def _broken(environment: Environment, binary: Binary, name: str) -> Finding:
    return _GROUP.fail(
        name,
        f"{binary.path}: {binary.problem}",
        costs="it cannot be loaded",
        fix=f"{_install(environment)}; check the disk",
    )


def _names(binary: Binary) -> str:
    return ", ".join(map(str, sorted(binary.targets))) or "no GPU code"
