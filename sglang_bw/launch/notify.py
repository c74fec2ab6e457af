"""Tells systemd how far a start is: the protocol of ``sd_notify(3)``, one datagram a state."""

from __future__ import annotations

import contextlib
import os
import socket

SPARE_S = 60
"""What a supervisor waits beyond the start's own limit, which says more when it is reached."""


def notify(*states: str) -> None:
    """Send states such as ``READY=1`` to whoever supervises this process; nothing without a supervisor."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    name = "\0" + address[1:] if address.startswith("@") else address  # the abstract namespace
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto("\n".join(states).encode(), name)


def going_on(within_s: float, what: str) -> None:
    """Ask for this many seconds more, whatever the unit's TimeoutStartSec has left."""
    notify(f"EXTEND_TIMEOUT_USEC={int(within_s * 1e6)}", f"STATUS={what}")
