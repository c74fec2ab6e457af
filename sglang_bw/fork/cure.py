"""The commands that put an engine into an environment, or the files of a damaged one back."""

from __future__ import annotations

import shlex
import sys

from sglang_bw.errors import BwError
from sglang_bw.fork.series import Series, patches_root

_INSTALL = "sglang-bw install"


def install_command(python: str) -> str:
    """Return the command that puts the newest patched engine into the environment of ``python``."""
    return f"{_INSTALL} --python {shlex.quote(python)}" if python not in ("", sys.executable) else _INSTALL


def repair(python: str, version: str, base: str) -> str:
    """Say what puts the recorded files of ``version`` back: that engine and no other one."""
    command = f"{install_command(python)} --base {shlex.quote(base)}"
    if ".local." in version:  # told by the version, since the record may be what is damaged
        return f"`{command} --local DIR` puts the recorded files back; DIR is the --local folder that it was built from"
    if _is_made_here(version, base):
        return f"`{command}` puts the recorded files back"
    return (
        f"`{install_command(python)} --wheel FILE` puts the recorded files back; FILE is the wheel that it was"
        f" installed from, since no series here makes {version}"
    )


def _is_made_here(version: str, base: str) -> bool:
    try:
        return Series.load(patches_root(), base).pins.full_version == version
    except BwError:
        return False
