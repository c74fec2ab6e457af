"""Who owns a TCP port: asked before the load, and again before the URL is shown."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Collection, Sequence
from typing import Any

import psutil

from sglang_bw.errors import PortInUseError

MAX_TRIES = 100


def check_free(host: str, port: int) -> None:
    """Make sure that the engine will be able to listen.

    :raises PortInUseError: another process listens there (named when it can be seen), or the address is not ours.
    """
    try:
        _bind(host, port)
    except socket.gaierror as error:
        raise PortInUseError(
            f"the host {host!r} is not known: {error.strerror}", hint="Use --host 127.0.0.1."
        ) from error
    except PermissionError as error:
        raise PortInUseError(f"port {port} needs privileges", hint="Use a port above 1023: --port 30000.") from error
    except OverflowError as error:
        raise PortInUseError(f"{port} is not a port", hint="It must be from 1 to 65535: --port 30000.") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            free = next_free(host, port)
            hint = f"Stop it, or choose another port: --port {free}." if free else "Stop it, or choose another --port."
            raise PortInUseError(f"port {port} on {host} is in use{_owner(port)}", hint=hint) from error
        reason = os.strerror(error.errno or 0)
        raise PortInUseError(
            f"cannot listen on {host}:{port}: {reason}", hint="Use an address of this machine: --host 127.0.0.1."
        ) from error


def listens(pid: int, port: int) -> bool:
    """Tell whether the process ``pid`` or a descendant of it listens on ``port``."""
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return False
    for process in family:
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and _port(connection.laddr) == port:
                    return True
    return False


def _bind(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: old connections in TIME_WAIT do not count, a listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)


def _port(address: Sequence[Any]) -> int:
    return int(address[1]) if address else 0


def next_free(host: str, port: int, *, but: Collection[int | None] = ()) -> int | None:
    """Return the first free port above one, of the next hundred.

    :param but: ports that are as good as taken.
    """
    for candidate in range(port + 1, min(port + MAX_TRIES, 65536)):
        if candidate in but:
            continue
        with contextlib.suppress(OSError):
            _bind(host, candidate)
            return candidate
    return None


def _owner(port: int) -> str:
    """Return `` by python (pid 123)`` when the system lets us see it."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and _port(connection.laddr) == port and connection.pid:
                process = psutil.Process(connection.pid)
                command = " ".join(process.cmdline())[:120] or process.name()
                return f" by pid {connection.pid}: {command}"
    return ""
