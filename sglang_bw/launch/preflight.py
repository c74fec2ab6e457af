"""What a launch needs of this host, looked at before anything is loaded: GPUs, their memory, driver and compilers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sglang_bw.errors import BwError, GpuBusyError, GpuSelectionError, ToolchainError
from sglang_bw.fork.environment import Environment
from sglang_bw.host import drivers, gpus, health, toolchain
from sglang_bw.host.finding import Finding, Verdict, numbers
from sglang_bw.host.gpus import GIB, Gpu, Gpus
from sglang_bw.host.system import System
from sglang_bw.launch.command import Command
from sglang_bw.recipes import flags

_PARALLEL = ("tp-size", "pp-size")


def visible(wanted: str, here: Gpus | None = None) -> dict[str, str]:
    """Return the variables that make the engine use these GPUs and no others.

    Numbers are counted as ``nvidia-smi`` does, which CUDA by itself does not.

    :param wanted: numbers and ranges, or UUIDs, as in ``0-3`` or ``GPU-8f1c...,GPU-77ab...``.
    :param here: the GPUs of this machine; ``None`` when the launch is for another one.
    :raises GpuSelectionError: the text names no GPUs, or some that are not here.
    """
    parts = gpus.parts(wanted)
    by_uuid = [not part.isdigit() for part in parts]
    if any(by_uuid) and not all(by_uuid):
        raise GpuSelectionError("numbers and UUIDs together", hint="CUDA takes one kind only: --gpus 0-3 or UUIDs.")
    if here is not None and not any(map(_is_instance, parts)):
        boards = here.only(wanted).boards
        parts = [gpu.uuid if by_uuid[0] else str(gpu.index) for gpu in boards]
    return {"CUDA_VISIBLE_DEVICES": ",".join(parts), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def used(command: Command, here: Gpus, environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that the engine will use; none when it gets MIG instances, which are not looked at.

    :param environ: with the ``CUDA_VISIBLE_DEVICES`` that the engine will see.
    :raises GpuSelectionError: there are fewer than the parallel sizes need, or one that is named is not here.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted and not _hides_all(wanted) and any(map(_is_instance, gpus.parts(wanted))):
        return ()
    boards = () if _hides_all(wanted) else here.only(wanted).boards if wanted else here.boards
    first = _number(command, "base-gpu-id", 0)
    needed = 1
    for name in _PARALLEL:
        needed *= _number(command, name, 1)
    needed = max(1, needed // _number(command, "nnodes", 1))
    if len(boards) < first + needed:
        raise _too_few(command, needed, len(boards), first, wanted)
    return boards[first : first + needed]


def _too_few(command: Command, needed: int, there: int, first: int, wanted: str | None) -> GpuSelectionError:
    shape = " x ".join(f"{name} {_number(command, name, 1)}" for name in _PARALLEL if flags.has(command.flags, name))
    why = f" (CUDA_VISIBLE_DEVICES={wanted})" if wanted else ""
    hint = f"a smaller size behind `--`: `-- --tp-size {max(1, there - first)}`; or other GPUs: --gpus."
    if _hides_all(wanted):
        why = " (CUDA_VISIBLE_DEVICES is set and empty)"
        hint = "`unset CUDA_VISIBLE_DEVICES`, or name the GPUs: --gpus."
    return GpuSelectionError(
        f"the launch needs {needed} GPUs ({shape or 'one engine'}), and {there} can be used{why}", hint=hint
    )


def _hides_all(wanted: str | None) -> bool:
    """Whether ``CUDA_VISIBLE_DEVICES`` is set and names no GPU, which is not the same as unset."""
    return wanted is not None and not wanted.strip()


def _is_instance(part: str) -> bool:
    return part.upper().startswith("MIG-")


def _number(command: Command, name: str, default: int) -> int:
    text = flags.value(command.flags, name) or ""
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else default


def problems(
    command: Command, boards: tuple[Gpu, ...], here: Gpus, system: System, engine: Environment
) -> Iterator[BwError]:
    """Yield why this host cannot run the launch, each with its exit code; a user may know better.

    :param boards: the GPUs that will be used.
    :param engine: the environment of the engine.
    """
    yield from _held(command, boards)
    findings = [*drivers.findings(system, here, engine.installed), *toolchain.findings(system, engine, boards)]
    failed = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    if failed:
        lines = "; ".join(f"{finding.name}: {finding.says}" for finding in failed)
        yield ToolchainError(f"the first start will fail: {lines}", hint=_fixes(failed))


def _fixes(findings: list[Finding]) -> str:
    return "; ".join(finding.fix for finding in findings if finding.fix)


def _held(command: Command, boards: tuple[Gpu, ...]) -> Iterator[BwError]:
    """Yield which memory is not there; a launch with a pool of a fixed size may share a GPU."""
    if flags.has(command.flags, "max-total-tokens"):
        return
    held = [gpu for gpu in boards if health.is_held(gpu)]
    if held:
        lines = "; ".join(f"GPU {gpu.index}: {health.free(gpu)}" for gpu in held)
        yield GpuBusyError(
            f"GPU memory is held by others: {lines}", hint=f"{health.stop(held[0])}; or other GPUs: --gpus."
        )


def summary(boards: tuple[Gpu, ...]) -> str:
    """Return one line about the GPUs that will be used."""
    names = " and ".join(dict.fromkeys(gpu.name for gpu in boards))
    free = [gpu.free for gpu in boards if gpu.free is not None]
    memory = f", at least {min(free) / GIB:.1f} GiB free on each" if free else ""
    return f"GPU {numbers([gpu.index for gpu in boards])}: {names}{memory}"
