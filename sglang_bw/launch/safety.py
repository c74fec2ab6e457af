"""Launches that would hand this machine to others because the network reaches them without a key."""

from __future__ import annotations

import ipaddress

from sglang_bw.errors import UnsafeLaunchError
from sglang_bw.launch.command import Command


def is_loopback(host: str) -> bool:
    """Tell whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_open(command: Command, *, allowed: bool) -> str:
    """Refuse a server that everybody in the network may use without a key.

    Refused rather than warned of: whoever reaches the port may use the GPUs, flush caches and, on some endpoints,
    change weights; and a warning goes by unread in a unit file.

    :param allowed: the user wants it so.
    :return: a warning about what was allowed, or an empty string.
    :raises UnsafeLaunchError: it is not allowed.
    """
    if is_loopback(command.host) or command.api_key:
        return ""
    told = f"everybody who reaches {command.host}:{command.port} may use this server: it has no key"
    if not allowed:
        raise UnsafeLaunchError(
            told,
            hint="--api-key-file FILE gives it one; --open serves without; --host 127.0.0.1 keeps it to this machine.",
        )
    return told
