"""Launches that would hand this machine to others: open to the network without a key, or running anybody's code."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping

from sglang_bw.errors import UnsafeLaunchError
from sglang_bw.launch import hub, weights
from sglang_bw.launch.command import Command
from sglang_bw.recipes import flags

# Names and short hashes can be given to other commits; a whole hash cannot.
_COMMIT = re.compile(r"[0-9a-f]{40}")


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


def check_remote_code(command: Command, environ: Mapping[str, str]) -> list[str]:
    """Allow ``--trust-remote-code`` for files of this disk and for whole commits of the hub, and nothing else.

    :return: whose code will run, a sentence each.
    :raises UnsafeLaunchError: a model of the hub is named without its commit, so that its owner may change what runs.
    """
    if not flags.has(command.flags, "trust-remote-code"):
        return []
    told, loose, cure = [], [], []
    for role, name, revision, option in _models(command):
        if weights.local(name):
            told.append(f"code that lies in {name} will run (trust-remote-code)")
        elif revision and _COMMIT.fullmatch(revision):
            told.append(f"code of {name} at {revision[:12]} will run (trust-remote-code)")
        else:
            loose.append(f"the {role} {name}" + (f" at {revision!r}" if revision else ""))
            cure.append(f"--{option} {_known_commit(command, role, environ) or 'COMMIT'}")
    if loose:
        raise UnsafeLaunchError(
            f"trust-remote-code runs what the hub has today of {' and '.join(loose)}: no commit is pinned",
            hint=f"read that code, then pin it: `-- {' '.join(cure)}`, or `revision:` in a copy of the recipe; or take "
            "away the flag with `trust-remote-code: null` there.",
        )
    return told


def _models(command: Command) -> Iterator[tuple[str, str, str | None, str]]:
    """Yield role, name, revision and the flag that sets it."""
    yield "target", command.target, flags.value(command.flags, "revision"), "revision"
    if command.draft:
        name = "speculative-draft-model-revision"
        yield "draft", command.draft, flags.value(command.flags, name), name


def _known_commit(command: Command, role: str, environ: Mapping[str, str]) -> str:
    """Return the commit that the hub's cache holds of a model."""
    model = next((model for model in hub.wanted(command, environ) if model.role == role), None)
    folder = hub.cached(model) if model else None
    return folder.name if folder and _COMMIT.fullmatch(folder.name) else ""
