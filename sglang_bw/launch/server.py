"""From a command to a server that answers: start, wait until it is ready, or say why it is not."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

import platformdirs

from sglang_bw.errors import BwError, EngineStartError, OutputError, PortInUseError
from sglang_bw.launch import port as ports
from sglang_bw.launch import remote_code, secret
from sglang_bw.launch.cause import cause
from sglang_bw.launch.command import Command
from sglang_bw.launch.compiling import Compiling
from sglang_bw.launch.process import EngineProcess, SignalRelay, shell_code
from sglang_bw.launch.startup import LogTail, Phase, Startup

POLL_S = 0.2
HEALTH_TIMEOUT_S = 10.0
INTERRUPT_GRACE_S = 10.0
_TAKEN = re.compile(r"address already in use|EADDRINUSE", re.IGNORECASE)


class InterruptedStartError(BwError):
    """A signal ended the engine before it was ready; the exit code is the shell's: 128 + signal."""

    def __init__(self, number: int) -> None:
        super().__init__("interrupted while loading; the engine has been stopped")
        self.number = number
        self.exit_code = 128 + number  # type: ignore[misc]  # one per signal, as shells do


class StartTimeoutError(EngineStartError):
    """The engine ran, and did not answer in time."""


class PortLostError(EngineStartError):
    """Another process took the engine's port while it loaded; that says nothing about the launch."""

    exit_code = PortInUseError.exit_code


class Server:
    """An engine that was started here.

    :ivar log_offset: where this engine's part of its log begins, in bytes.
    """

    def __init__(
        self, command: Command, process: EngineProcess, relay: SignalRelay, startup: Startup, log_offset: int
    ) -> None:
        self.command = command
        self.process = process
        self.relay = relay
        self.startup = startup
        self.log_offset = log_offset

    def await_ready(self, timeout_s: float, on_progress: Callable[[Startup, list[Phase]], None]) -> None:
        """Return when the engine owns its port and answers.

        A process that is not ours is never asked: the listening socket must belong to the engine or a descendant.

        :param on_progress: called about five times a second, with the phases that have just begun.
        :raises EngineStartError: it died; it is gone then.
        :raises PortLostError: it died because its port was taken meanwhile.
        :raises StartTimeoutError: it was not ready in time; it is gone then.
        :raises InterruptedStartError: a signal ended it.
        """
        tail = LogTail(self.process.log, self.log_offset)
        compiling = Compiling(self.process.pid)
        next_question = 0.0
        while True:
            self.startup.compiling = compiling.look()
            on_progress(self.startup, self.startup.feed(tail.lines()))
            self._raise_if_over()
            if self.startup.elapsed() > timeout_s:
                self.process.kill()
                self.process.wait()
                last = f"compiling {name}" if (name := self.startup.compiling) else self.startup.last_line
                raise StartTimeoutError(
                    f"the engine was not ready after {timeout_s:.0f} s, in phase {self.startup.phase.value}: {last}",
                    hint=f"Full log: {self.process.log}; a longer wait: --startup-timeout SECONDS.",
                )
            if time.monotonic() >= next_question:
                if ports.listens(self.process.pid, self.command.port) and self._answers():
                    break
                next_question = time.monotonic() + 0.5
            time.sleep(POLL_S)
        if self.startup.phase is not Phase.READY:
            self.startup.enter(Phase.READY)
            on_progress(self.startup, [Phase.READY])

    def death(self) -> str:
        """Return why the engine ended, in one line, for a code that is not zero."""
        code = self.process.poll() or 0
        if found := cause(self.process.log, offset=self.log_offset, killed=code == -signal.SIGKILL):
            return found
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _raise_if_over(self) -> None:
        interrupts = self.relay.received
        if interrupts and self.process.wait(INTERRUPT_GRACE_S) is None:
            self.process.kill()
            self.process.wait()
        code = self.process.poll()
        if interrupts:
            raise InterruptedStartError(interrupts[0])
        if code is None:
            return
        why, log = self.death(), self.process.log
        if _TAKEN.search(why) and str(self.command.port) in why:
            free = ports.next_free(self.command.host, self.command.port)
            raise PortLostError(
                f"another process took port {self.command.port} while the engine loaded: {why}",
                hint=f"Another port: --port {free or 'N'}. Full log: {log}",
            )
        raise EngineStartError(
            f"the engine died while {self.startup.phase.value} (exit code {shell_code(code)}): {why}",
            hint=f"Full log: {log}",
        )

    def _answers(self) -> bool:
        import httpx

        try:
            response = httpx.get(f"{self.command.url}/health", timeout=HEALTH_TIMEOUT_S, verify=False, trust_env=False)
        except httpx.HTTPError:
            return False
        return response.status_code == httpx.codes.OK


def start(command: Command, python: Path, environ: Mapping[str, str], log: Path, relay: SignalRelay) -> Server:
    """Start the engine; its log begins with the command. Keys go to it in a file, see :mod:`.secret`.

    Every engine is started here, so that none runs code of no known commit.

    :param python: the interpreter that runs it.
    :param relay: entered by the caller; passes signals on from now on.
    :raises UnsafeLaunchError: it would run code of a model at no pinned commit.
    :raises EngineStartError: the command cannot be started.
    :raises OutputError: the log cannot be written.
    """
    remote_code.demand(command, environ)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"# {command.pasteable()}\n")
            file.flush()
            offset = file.tell()
    except OSError as error:
        raise OutputError(
            f"cannot write the log {log}: {error.strerror}", hint="Choose another place with --log FILE."
        ) from error
    startup = Startup()
    # Python holds back what it prints to a file; the phases are read from there, so it must not.
    private = secret.private(command.flags)
    argv = command.argv(python, private.config if private else None)
    environ = {name: value for name, value in environ.items() if name != secret.VARIABLE}
    process = EngineProcess(
        argv, {**environ, "PYTHONUNBUFFERED": "1"}, log, private=private.folder if private else None
    )
    relay.connect(process)
    return Server(command, process, relay, startup, offset)


def default_log(recipe_id: str, port: int) -> Path:
    """Return a new log file below the user's state directory, one that no other process takes in the same second."""
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    return platformdirs.user_state_path("sglang-bw") / "logs" / f"{stamp}-{recipe_id}-{port}-{os.getpid()}.log"
