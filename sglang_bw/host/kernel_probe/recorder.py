"""Every Triton launch of a block of code: which kernel, compiled with what, and what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sglang_bw.host.kernel_probe import cubin


@dataclass(frozen=True)
class Launch:
    """One kernel as it was compiled for one launch.

    :ivar constants: the kernel's compile-time arguments, by name.
    :ivar shared_bytes: shared memory of one block; 0 when it does not compile.
    :ivar error: why it does not compile, or an empty string.
    """

    kernel: str
    constants: dict[str, Any]
    num_warps: int = 0
    num_stages: int = 0
    shared_bytes: int = 0
    registers: int = 0
    local_bytes: int = 0
    error: str = ""


@dataclass
class Recorder:
    """Collects launches, each different compilation once."""

    launches: list[Launch] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def add(self, key: str, launch: Launch) -> None:
        """Keep a launch unless one with this key is there."""
        if key not in self._seen:
            self._seen.add(key)
            self.launches.append(launch)


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record the launches within. One that does not compile is recorded, and the code goes on behind it."""
    from triton.runtime.jit import JITFunction

    recorder = Recorder()
    run = JITFunction.run

    def recorded(self: Any, *args: Any, **options: Any) -> Any:
        try:
            compiled = run(self, *args, **options)
        except Exception as error:
            text = _first_lines(error)
            recorder.add(
                f"{self.fn.__name__}: {text}", Launch(self.fn.__name__, _given(self, args, options), error=text)
            )
            return None
        if compiled is not None:
            recorder.add(compiled.hash, _launch(self, compiled))
        return compiled

    JITFunction.run = recorded
    try:
        yield recorder
    finally:
        JITFunction.run = run


def _launch(function: Any, compiled: Any) -> Launch:
    used = cubin.usage(compiled.asm["cubin"])
    constants = {function.arg_names[path[0]]: value for path, value in compiled.src.constants.items()}
    return Launch(
        kernel=function.fn.__name__,
        constants=_plain(constants),
        num_warps=compiled.metadata.num_warps,
        num_stages=compiled.metadata.num_stages,
        shared_bytes=compiled.metadata.shared,
        registers=used.registers,
        local_bytes=used.local_bytes,
    )


def _given(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    named = dict(zip(function.arg_names, args, strict=False)) | options
    constant = {parameter.name for parameter in function.params if parameter.is_constexpr}
    return _plain({name: value for name, value in named.items() if name in constant})


def _plain(constants: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in constants.items()
        if value is not None
    }


def _first_lines(error: Exception, count: int = 6) -> str:
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    return "\n".join([type(error).__name__, *lines[:count]])
