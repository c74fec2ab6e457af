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

With a private folder (keys that the engine reads from a file) it also takes the keys out of the engine's output on its
way to the log, and removes the folder at the end.

Usage: keeper.py CONTROL_FD STATUS_FD GRACE_SECONDS PRIVATE_FOLDER COMMAND...   (no folder: an empty word)
Status lines: ``pid N`` once, ``exit N`` at the end (negative: ended by that signal), ``error TEXT`` if it cannot start.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

KILL_ALL = 255
REDACTED = b"<redacted>"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05


def main(arguments: list[str]) -> int:
    """Start the engine, keep it, report how it ended."""
    control, status, grace, private = int(arguments[0]), int(arguments[1]), float(arguments[2]), arguments[3]
    wakeup = _prepare()
    try:
        output = _Redacted(_secrets(private)) if private else None
        engine = subprocess.Popen(
            arguments[4:],
            stdin=subprocess.DEVNULL,
            stdout=output.entrance if output else None,
            stderr=output.entrance if output else None,
            process_group=0,
            preexec_fn=_die_with_parent(os.getpid()),
        )
        if output:
            output.start()
        _report(status, f"pid {engine.pid}")
        code = _Keeper(engine.pid, control, wakeup, grace).run()
        if output:
            output.finish()
    except (OSError, subprocess.SubprocessError) as error:
        _report(status, f"error {error}")
        return 1
    finally:
        if private:
            shutil.rmtree(private, ignore_errors=True)
    _report(status, f"exit {code}")
    return 0


def _secrets(private: str) -> list[bytes]:
    path = Path(private) / "redact.json"
    found = [str(value).encode() for value in json.loads(path.read_bytes())]
    path.unlink()
    return found


class Redactor:
    """Replaces words in a stream that comes in pieces; holds back no more than what may begin one of them."""

    def __init__(self, words: list[bytes]) -> None:
        self.words = sorted(filter(None, words), key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self.words)) or b"(?!)")
        self._rest = b""

    def feed(self, piece: bytes, *, last: bool = False) -> bytes:
        """Return what can go out after a piece has come in."""
        data = self._rest + piece
        out, at = b"", 0
        while True:
            hold = len(data) if last else self._hold(data, at)
            found = self._pattern.search(data, at)
            if found is None or found.start() >= hold:
                break
            out += data[at : found.start()] + REDACTED
            at = found.end()
        self._rest = data[hold:]
        return out + data[at:hold]

    def _hold(self, data: bytes, at: int) -> int:
        """Return where the longest end of ``data[at:]`` begins that is the beginning of a word."""
        longest = min(max(map(len, self.words), default=0) - 1, len(data) - at)
        for size in range(longest, 0, -1):
            if any(len(word) > size and word.startswith(data[len(data) - size :]) for word in self.words):
                return len(data) - size
        return len(data)


class _Redacted:
    """The engine's output on its way to the log, which is this process's own output.

    :ivar entrance: file descriptor that the engine writes to.
    """

    def __init__(self, words: list[bytes]) -> None:
        self._redactor = Redactor(words)
        self._exit, self.entrance = os.pipe()
        # A daemon: a writer that nobody can kill must not keep this process.
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Go on until the last writer has closed the pipe; this process is none from now on."""
        os.close(self.entrance)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the rest."""
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            piece = os.read(self._exit, 1 << 16)
            data = memoryview(self._redactor.feed(piece, last=not piece))
            while data:
                try:
                    data = data[os.write(1, data) :]
                except OSError:  # a full disk must not stop the engine: what cannot be written is dropped
                    break
            if not piece:
                return


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
