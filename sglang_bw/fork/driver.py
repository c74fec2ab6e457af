"""The NVIDIA driver, asked without CUDA: from the kernel's own file, else from ``nvidia-smi``."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from sglang_bw.fork.locks import Locked

# First driver branch of each CUDA major release; minor releases run on it (NVIDIA, "CUDA Compatibility",
# minor version compatibility).
MINIMUM_BRANCH = {12: 525, 13: 580}


def driver_version(root: Path = Path("/")) -> str | None:
    """Return the driver's version (``580.95.05``), or ``None`` without a driver or without a GPU to use.

    A container sees the host's kernel file even when no GPU was handed to it: without a device node it does not count.

    :param root: where ``proc`` and ``dev`` are.
    """
    try:
        said = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _ask_smi()
    found = re.search(r"Kernel Module\b.*?\s(\d+\.\d+(?:\.\d+)?)\b", said)
    has_gpu = any(re.fullmatch(r"nvidia\d+", node.name) for node in (root / "dev").glob("nvidia*"))
    return found[1] if found and has_gpu else None


def _ask_smi() -> str | None:
    """Ask ``nvidia-smi``: under WSL the driver has no file below ``/proc``."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    try:
        done = subprocess.run(
            [smi, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"\d+\.\d+(?:\.\d+)?\b", done.stdout.strip())
    return found[0] if found and done.returncode == 0 else None


def needed_branch(packages: Iterable[Locked]) -> int:
    """Return the driver branch that the CUDA runtime of a lock needs, 0 when it has none."""
    for package in packages:
        if package.name.startswith("nvidia-cuda-runtime"):
            return MINIMUM_BRANCH.get(int(package.version.split(".")[0]), 0)
    return 0
