"""The process between `serve` and the engine: when `serve` is gone, however it went, no engine is left.

Run as a script, on its own, with the interpreter of the tool; it imports nothing of the package. It starts the
engine and keeps it until one of these happens:

- the engine ends: whatever it left behind is killed, and its exit code is reported;
- the control pipe closes, because `serve` ended or was killed: the engine gets SIGTERM, and SIGKILL after a grace;
- `serve` writes a byte: a signal number is passed on to the engine, ``KILL_ALL`` ends everything now.

Why a process of its own: nothing in a process survives its SIGKILL. Why a subreaper: the engine's schedulers and
tokenizers are reparented to this process when their parent dies, so none can hide. Why a session of its own: the
terminal's Ctrl-C and hang-up reach `serve` alone, which passes them on once. If this process itself is killed, the
kernel kills the engine (PR_SET_PDEATHSIG), and SGLang's own children ask for the same.

Usage: keeper.py CONTROL_FD STATUS_FD GRACE_SECONDS COMMAND...
Status lines: ``pid N`` once, ``exit N`` at the end (negative: ended by that signal), ``error TEXT`` if it cannot start.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

KILL_ALL = 255
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05


def main(arguments: list[str]) -> int:
    """Start the engine, keep it, report how it ended."""
    control, status, grace = int(arguments[0]), int(arguments[1]), float(arguments[2])
    wakeup = _prepare()
    try:
        engine = subprocess.Popen(
            arguments[3:], stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_die_with_parent(os.getpid())
        )
    except (OSError, subprocess.SubprocessError) as error:
        _report(status, f"error {error}")
        return 1
    _report(status, f"pid {engine.pid}")
    code = _Keeper(engine.pid, control, wakeup, grace).run()
    _report(status, f"exit {code}")
    return 0


def _prepare() -> int:
    """Become a subreaper; return a file descriptor that is readable after a child has ended."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Handlers rather than SIG_IGN, which the engine would inherit; an ignored SIGHUP (nohup) stays ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


class _Keeper:
    """Waits for the engine and for orders."""

    def __init__(self, engine: int, control: int, wakeup: int, grace: float) -> None:
        self.engine = engine
        self.control = control
        self.wakeup = wakeup
        self.grace = grace
        self.code: int | None = None

    def run(self) -> int:
        """Return the engine's exit code, negative for a signal, when nothing of it is left."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ, self._obey)
            selector.register(self.wakeup, selectors.EVENT_READ, lambda: _drain(self.wakeup))
            while not self._reap():
                for key, _ in selector.select():
                    key.data()
        self._sweep()
        return self.code if self.code is not None else 1

    def _reap(self) -> bool:
        """Collect every ended child, adopted ones included; tell whether the engine was or is among them."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self.engine:
                    self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def _obey(self) -> None:
        orders = os.read(self.control, 64)
        if not orders:
            self._stop()
        for order in orders:
            if order == KILL_ALL:
                self._sweep()
            else:
                self._signal(order)

    def _stop(self) -> None:
        """End the engine: politely first, so that it can free what it holds."""
        self._signal(signal.SIGTERM)
        if not _until(self._reap, self.grace):
            self._sweep()

    def _signal(self, number: int) -> None:
        # The engine cannot have been reaped by anyone else, so the pid is still its own.
        if self.code is None:
            os.kill(self.engine, number)

    def _sweep(self) -> None:
        """Kill every descendant, until there is none."""

        def nobody_left() -> bool:
            left = psutil.Process().children(recursive=True)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._reap()
            return not left

        _until(nobody_left, seconds=60)


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _drain(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(descriptor, 512):
            pass


def _report(status: int, line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(status, f"{line}\n".encode())


def _die_with_parent(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)  # loaded before the fork: little is safe after it

    def apply() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(1)

    return apply


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
