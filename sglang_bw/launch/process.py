"""The engine as a child: started under a keeper, its log in a file, signals passed on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from sglang_bw.errors import EngineStartError
from sglang_bw.launch import keeper

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 10.0


class EngineProcess:
    """A running engine, from start to exit code.

    :ivar pid: of the engine itself, not of the keeper.
    :ivar log: the file that gets the engine's output as it comes.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        *,
        private: Path | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """Start the engine.

        :param argv: the whole command.
        :param env: the whole environment of the engine.
        :param log: opened for appending; its directory exists.
        :param private: folder of :mod:`.secret`: its keys are kept out of the log, and it is removed at the end.
        :param grace_s: seconds between SIGTERM and SIGKILL when this process goes away.
        :raises EngineStartError: the command cannot be started.
        """
        self.log = log
        self._private = private
        self._code: int | None = None
        self._text = b""
        control, self._control = os.pipe()
        self._status, status = os.pipe()
        orders = [str(control), str(status), str(grace_s), str(private or "")]
        command = [sys.executable, "-P", str(keeper.__file__), *orders, *argv]
        with log.open("ab") as output, _closing(control, status):
            self._keeper = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(control, status),
                start_new_session=True,
            )
        word, text = self._read_status() or ("", "")
        if word != "pid":
            self._forget()
            reason = text or "its keeper died"
            raise EngineStartError(f"the engine cannot be started: {reason}", hint=f"It was to run {argv[0]}.")
        self.pid = int(text)
        os.set_blocking(self._status, False)

    def poll(self) -> int | None:
        """Return the exit code, negative when a signal ended the engine, or ``None`` while it runs."""
        if self._code is None and (line := self._read_status()) is not None:
            word, text = line
            # No word means that the keeper was killed; the kernel has killed the engine with it.
            self._code = int(text) if word == "exit" else -signal.SIGKILL
            self._keeper.wait()
            self._forget()
            os.close(self._control)
            os.close(self._status)
        return self._code

    def wait(self, timeout_s: float | None = None, *, poll_s: float = 0.1) -> int | None:
        """Wait for the end of the engine; signals still get through. ``None`` after the timeout."""
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        while (code := self.poll()) is None and (deadline is None or time.monotonic() < deadline):
            time.sleep(poll_s)
        return code

    def send(self, number: int) -> None:
        """Pass a signal on to the engine."""
        self._order(number)

    def kill(self) -> None:
        """End the engine and all its descendants at once."""
        self._order(keeper.KILL_ALL)

    def _forget(self) -> None:
        """Remove the keys of an engine that is gone, where its keeper was killed before it could."""
        if self._private:
            shutil.rmtree(self._private, ignore_errors=True)

    def _order(self, byte: int) -> None:
        if self._code is None:
            with contextlib.suppress(BrokenPipeError, OSError):
                os.write(self._control, bytes([byte]))

    def _read_status(self) -> tuple[str, str] | None:
        """Return the next status line as word and text, ``("", "")`` at the end, ``None`` if nothing came yet."""
        while b"\n" not in self._text:
            try:
                chunk = os.read(self._status, 4096)
            except BlockingIOError:
                return None
            if not chunk:
                return "", ""
            self._text += chunk
        line, _, self._text = self._text.partition(b"\n")
        word, _, text = line.decode(errors="replace").partition(" ")
        return word, text


class SignalRelay:
    """Passes SIGINT, SIGTERM and SIGHUP on to an engine; the second one ends it at once.

    Entered before the engine starts: a signal that comes earlier is passed on when there is one. A signal that is
    ignored (SIGHUP under nohup) stays ignored.

    :ivar received: signals so far, oldest first.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._engine: EngineProcess | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalRelay:
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def connect(self, engine: EngineProcess) -> None:
        """Name the engine that gets the signals, those that have already come included."""
        self._engine = engine
        if self.received:
            self._pass_on()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        self._pass_on()

    def _pass_on(self) -> None:
        if self._engine is None:
            return
        if len(self.received) == 1:
            self._engine.send(self.received[0])
        else:
            self._engine.kill()


@contextlib.contextmanager
def _closing(*descriptors: int) -> Iterator[None]:
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def shell_code(code: int) -> int:
    """Return an exit code as shells show it: 128 + N for an engine that signal N ended."""
    return 128 - code if code < 0 else code
