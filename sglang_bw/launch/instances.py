"""The servers that `serve` has started here: one folder each below the user's state directory, told apart by name.

A record says which process serves; a process is known by its pid, the tick at which it started and the boot, so that
another one with the same pid is never taken for it, let alone killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import platformdirs
from pydantic import BaseModel, ConfigDict, ValidationError

from sglang_bw.errors import PortInUseError, UnknownServerError
from sglang_bw.launch import port as ports

_FILE = "server.json"
_LOCK = ".lock"
_HEALTH_S = 2.0
# Whoever listens on one of these has the port on every address; and so may a record from before hosts were kept.
_EVERY_HOST = ("", "0.0.0.0", "::")


class Process(BaseModel):
    """One process of one boot.

    :ivar start: clock ticks from the boot to its start (field 22 of ``/proc/PID/stat``).
    :ivar boot: the kernel's id of the boot.
    """

    model_config = ConfigDict(frozen=True)

    pid: int
    start: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process that has this pid now; ``None`` when there is none, or only its exit code is left."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()  # a name may hold anything, parentheses too
        return None if fields[0] in ("Z", "X") else cls(pid=pid, start=int(fields[19]), boot=boot)

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs."""
        return Process.of(self.pid) == self

    def send(self, number: int) -> bool:
        """Send it a signal; return false when it is gone. Nothing else can get the signal."""
        try:
            handle = os.pidfd_open(self.pid)  # from here on the pid means this process, or nothing
        except ProcessLookupError:
            return False
        try:
            if not self.is_alive:
                return False
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True


class Ended(BaseModel):
    """How a server ended that nobody had asked to."""

    code: int
    why: str
    at: datetime


class Record(BaseModel):
    """What is known of a server.

    :ivar host: the address that it listens on.
    :ivar phase: as :class:`~sglang_bw.launch.startup.Phase`, or ``checking`` before the engine starts.
    :ivar settled: ready, and the warm-up is over.
    :ivar console: what `serve` itself printed, when it is detached.
    """

    schema_version: Literal[1] = 1
    name: str
    recipe: str
    url: str
    host: str = ""
    device: str
    engine: str
    speculates: bool
    needs_key: bool
    detached: bool
    log: str
    process: Process
    engine_process: Process | None = None
    phase: str = "starting"
    settled: bool = False
    started_at: datetime
    ready_at: datetime | None = None
    ended: Ended | None = None


class State(Enum):
    """What a server does now."""

    STARTING = "starting"
    READY = "ready"
    SILENT = "silent"  # it was ready, and does not answer
    DEAD = "dead"


class Instance:
    """A server's folder and record."""

    def __init__(self, folder: Path, record: Record) -> None:
        self.folder = folder
        self.record = record

    @property
    def name(self) -> str:
        """Its name."""
        return self.record.name

    @property
    def is_alive(self) -> bool:
        """Whether its `serve` runs."""
        return self.record.ended is None and self.record.process.is_alive

    @property
    def port(self) -> int | None:
        """The port that it listens on, or will."""
        return urlsplit(self.record.url).port

    @property
    def engine_runs(self) -> bool:
        """Whether its engine runs, with or without `serve`."""
        return self.record.engine_process is not None and self.record.engine_process.is_alive

    @property
    def is_ending(self) -> bool:
        """Whether its engine is gone, so that its `serve` will be, too."""
        return self.record.engine_process is not None and not self.engine_runs

    @property
    def console(self) -> tuple[Path, Path]:
        """Where a detached `serve` prints: output and errors."""
        return self.folder / "out.txt", self.folder / "err.txt"

    def state(self) -> State:
        """Ask the server; two seconds at most."""
        import httpx

        if not self.is_alive:
            return State.DEAD
        if self.record.ready_at is None:
            return State.STARTING
        try:
            answer = httpx.get(f"{self.record.url}/health", timeout=_HEALTH_S, verify=False, trust_env=False)
        except httpx.HTTPError:
            return State.SILENT
        return State.READY if answer.status_code == httpx.codes.OK else State.SILENT

    def update(self, **changes: object) -> None:
        """Change the record; readers see the old one or the new one."""
        self.record = Record.model_validate({**self.record.model_dump(), **changes})
        scratch = self.folder / f".{_FILE}.{os.getpid()}"
        scratch.write_text(self.record.model_dump_json(indent=2), encoding="utf-8")
        scratch.replace(self.folder / _FILE)

    def remove(self) -> None:
        """Forget it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def root() -> Path:
    """Return the folder of all."""
    return platformdirs.user_state_path("sglang-bw") / "servers"


def create(recipe: str, host: str, port: int, **fields: object) -> Instance:
    """Make the record of a server that this process is about to start; a dead one of that name goes.

    :raises PortInUseError: another one that was started here has the port, or will.
    :raises OSError: it cannot be written.
    """
    with _alone():
        check_port(host, port)
        taken = {found.name for found in everything() if found.is_alive}
        name = next(name for name in _names(f"{recipe}-{port}") if name not in taken)
        folder = root() / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        now = datetime.now(UTC)
        me = Process.of(os.getpid())
        known = {"name": name, "recipe": recipe, "host": host, "process": me, "started_at": now}
        instance = Instance(folder, Record.model_validate({**known, **fields}))
        instance.update()
        return instance


def check_port(host: str, port: int) -> None:
    """Make sure that no server that was started here has a port, or will when it has loaded.

    Nobody listens while an engine loads, so that looking at the port alone does not show it.

    :raises PortInUseError: one has.
    """
    alive = [one for one in everything() if one.is_alive and not one.is_ending]
    other = next((one for one in alive if one.port == port and _meet(one.record.host, host)), None)
    if other is None:
        return
    does = "listens there" if other.record.ready_at else "is starting there"
    free = ports.next_free(host, port, but={one.port for one in alive})
    raise PortInUseError(
        f"port {port} on {host} is taken: {other.name} (pid {other.record.process.pid}) {does}",
        hint=f"`sglang-bw stop {other.name}` ends it; or another port: --port {free or 'N'}.",
    )


def _meet(one: str, other: str) -> bool:
    one, other = ("127.0.0.1" if host == "localhost" else host for host in (one, other))
    return one == other or one in _EVERY_HOST or other in _EVERY_HOST


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Keep other processes from making a record meanwhile: of two in one moment one must see the other."""
    root().mkdir(parents=True, exist_ok=True)
    with (root() / _LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def everything() -> list[Instance]:
    """Return all, the oldest first; a folder without a readable record is left out."""
    found = []
    with contextlib.suppress(OSError):
        for path in root().glob(f"*/{_FILE}"):
            with contextlib.suppress(OSError, ValidationError, ValueError):
                found.append(Instance(path.parent, Record.model_validate_json(path.read_bytes())))
    return sorted(found, key=lambda one: one.record.started_at)


def find(name: str) -> Instance:
    """Return the server of that name, or the only one whose name begins like it.

    :raises UnknownServerError: there is none, or there are several.
    """
    known = everything()
    if exact := [one for one in known if one.name == name]:
        return exact[0]
    alike = [one for one in known if one.name.startswith(name)]
    if len(alike) == 1:
        return alike[0]
    if alike:
        raise UnknownServerError(
            f"{name!r} may be {' or '.join(one.name for one in alike)}", hint="Write the name out."
        )
    names = ", ".join(one.name for one in known)
    raise UnknownServerError(
        f"no server {name!r} was started here" + (f"; there are {names}" if names else ""),
        hint="`sglang-bw status` lists them; `sglang-bw serve RECIPE --detach` starts one.",
    )


def _names(base: str) -> Iterator[str]:
    yield base
    number = 2
    while True:
        yield f"{base}-{number}"
        number += 1
