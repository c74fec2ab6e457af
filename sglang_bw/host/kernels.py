"""The engine's Triton kernels, compiled for a GPU that need not be there.

The work is done by ``kernel_probe`` in the engine's interpreter; this side starts it, reads its lines and judges.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import platformdirs

import sglang_bw
from sglang_bw.errors import KernelError, NotInstalledError
from sglang_bw.fork.environment import Environment, clean_environ
from sglang_bw.host.arch import SOURCE, Arch

# The tool's package under its own name, and nothing else of the tool's environment on the import path.
_START = """
import sys, types
package = types.ModuleType("sglang_bw")
package.__path__ = [sys.argv[1]]
sys.modules["sglang_bw"] = package
from sglang_bw.host.kernel_probe.main import main
main(sys.argv[2], tuple(sys.argv[3].split(",")), int(sys.argv[4]))
"""
PARTS = ("speculation", "cache", "attention", "moe", "linear")
# How often the check starts again behind a case that killed its process.
_STARTS = 4
NO_BOARD = "a board without tuned configurations"


@dataclass(frozen=True)
class Kernel:
    """A kernel as compiled for one launch; ``kernel_probe.recorder.Launch`` has the units."""

    kernel: str
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    shared_bytes: int
    registers: int
    local_bytes: int
    error: str

    def fits(self, arch: Arch) -> bool:
        """Tell whether it compiles and a block of it can be launched."""
        return not self.error and self.shared_bytes <= arch.shared_memory


@dataclass(frozen=True)
class Checked:
    """A piece of the engine's path and the kernels that it launched.

    :ivar absent: the release does not have it; says what is missing.
    :ivar problem: why it could not be run to its end.
    """

    family: str
    name: str
    shape: str
    kernels: tuple[Kernel, ...]
    absent: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Report:
    """What was compiled for one architecture, by which versions."""

    arch: Arch
    engine: str
    torch: str
    triton: str
    checked: tuple[Checked, ...]

    def bad(self) -> Iterator[tuple[Checked, Kernel]]:
        """Yield kernels that do not compile or need more than the architecture has."""
        for row in self.checked:
            for kernel in row.kernels:
                if not kernel.fits(self.arch):
                    yield row, kernel

    def error(self) -> KernelError | None:
        """Return why this engine is not fit for the architecture, or ``None``."""
        bad = [kernel for _, kernel in self.bad()]
        over = {kernel.kernel for kernel in bad if not kernel.error}
        broken = {kernel.kernel for kernel in bad if kernel.error}
        unchecked = [f"{row.name} ({row.shape})" for row in self.checked if row.problem]
        said = []
        if not any(row.kernels for row in self.checked):
            said.append("none could be compiled: the check does not know this release")
        if over:
            said.append(f"need more than {self.arch.shared_memory:,} bytes of shared memory: {', '.join(sorted(over))}")
        if broken:
            said.append(f"do not compile: {', '.join(sorted(broken))}")
        if unchecked:
            said.append(f"could not be checked: {len(unchecked)}, first {unchecked[0]}")
        if not said:
            return None
        return KernelError(
            f"Triton kernels of sglang {self.engine} on {self.arch.name}: {'; '.join(said)}",
            hint="choose another backend for that layer, or a newer engine: `sglang-bw install`; --json tells it all.",
        )

    def as_json(self) -> dict[str, Any]:
        """Return everything, for programs."""
        return {
            "arch": self.arch.name,
            "shared_memory_limit": self.arch.shared_memory,
            "limit_source": SOURCE,
            "engine": self.engine,
            "torch": self.torch,
            "triton": self.triton,
            "over_or_broken": sum(1 for _ in self.bad()),
            "checked": [
                {
                    "family": row.family,
                    "name": row.name,
                    "shape": row.shape,
                    "absent": row.absent,
                    "problem": row.problem,
                    "kernels": [vars(kernel) | {"fits": kernel.fits(self.arch)} for kernel in row.kernels],
                }
                for row in self.checked
            ],
        }


@dataclass
class _Progress:
    versions: dict[str, str] = field(default_factory=dict)
    rows: list[Checked] = field(default_factory=list)
    current: dict[str, str] = field(default_factory=dict)
    ended: bool = False


def check(
    arch: Arch,
    python: Path | None = None,
    tree: Path | None = None,
    *,
    board: str = "",
    parts: tuple[str, ...] = PARTS,
    tell: Callable[[str], None] = lambda _line: None,
) -> Report:
    """Compile the kernels of an engine for ``arch``.

    :param python: the interpreter of the environment with the engine, or the folder of that environment.
    :param tree: a folder with ``sglang/``, used in place of what is installed.
    :param board: name of the board as torch gives it; the engine takes the tuned MoE configurations of that board.
    :param parts: which of ``PARTS`` to check.
    :param tell: is called with a line whenever something else is being compiled.
    :raises RefusedError: there is no such interpreter.
    :raises NotInstalledError: it has no sglang, or the tree has none.
    :raises KernelError: nothing could be compiled.
    """
    if tree and not (tree / "sglang").is_dir():  # the installed engine would be checked in its place
        raise NotInstalledError(f"{tree} has no sglang/ in it", hint="--tree names the folder that sglang/ lies in.")
    interpreter = Environment.probe(python).executable
    facts = json.dumps(arch.board(board or NO_BOARD))
    package = str(Path(sglang_bw.__file__).parent)
    command = [str(interpreter), "-c", _START, package, facts, ",".join(parts)]
    progress = _Progress()
    for _ in range(_STARTS):
        with tempfile.TemporaryFile("w+") as log:
            code = _read([*command, str(len(progress.rows))], _environment(tree), log, progress, tell)
            if progress.ended:
                return Report(arch, **progress.versions, checked=tuple(progress.rows))
            if not progress.current:
                raise _not_started(log, code)
        # The compiler took the process with it: that is the answer for this case; the others are still to do.
        progress.rows.append(Checked(**progress.current, kernels=(), problem=f"the compiler {_died(code)}"))
        progress.current = {}
    raise KernelError(
        f"the compiler died {_STARTS} times, last at {progress.rows[-1].name}: it {_died(code)}",
        hint="another Triton may not; --python names the environment whose Triton is used.",
    )


def _read(
    command: list[str], environ: dict[str, str], log: IO[str], progress: _Progress, tell: Callable[[str], None]
) -> int:
    with _running(command, environ, log) as child:
        for line in child.stdout or ():
            _take(json.loads(line), progress, tell)
        return child.wait()


@contextmanager
def _running(command: list[str], environ: dict[str, str], log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


def _take(event: dict[str, Any], progress: _Progress, tell: Callable[[str], None]) -> None:
    kind = event.pop("event")
    if kind == "start":
        progress.versions = event
    elif kind == "case":
        progress.current = event
        tell(f"{event['family']}: {event['name']}, {event['shape']}")
    elif kind == "checked":
        kernels = tuple(Kernel(**launch) for launch in event.pop("launches"))
        progress.rows.append(Checked(**progress.current, kernels=kernels, **event))
        progress.current = {}
    else:
        progress.ended = True


def _environment(tree: Path | None) -> dict[str, str]:
    """Return the child's environment: the tree in front, no GPU, Triton's cache among the tool's own files."""
    environ = clean_environ() | {
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_CACHE_DIR": str(Path(platformdirs.user_cache_dir("sglang-bw")) / "triton"),
        "HF_HUB_OFFLINE": "1",
    }
    # These would make the engine believe in another device.
    for name in ("SGLANG_USE_CPU_ENGINE", "TRITON_INTERPRET", "TRITON_DEFAULT_BACKEND"):
        environ.pop(name, None)
    if tree:
        environ["PYTHONPATH"] = os.fspath(tree.resolve())
    return environ


def _not_started(log: IO[str], code: int) -> NotInstalledError | KernelError:
    log.seek(0)
    lines = [line.rstrip() for line in log if line.strip()]
    last = lines[-1] if lines else f"the check {_died(code)} without a word"
    if "No module named 'sglang'" in last:
        return NotInstalledError(
            "the environment has no sglang", hint="`sglang-bw install`, or name one with --python or --tree."
        )
    return KernelError(
        f"the engine cannot be loaded to check its kernels: {last}",
        hint="`sglang-bw verify` tells whether it is intact; its dependencies must be installed, a GPU need not be.",
    )


def _died(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
