"""Fetches files of a model into the hub's cache: ``python -m sglang_bw.launch.fetch PARENT ID REVISION CACHE FILE...``.

Ends with its parent, so that a killed `serve` fetches nothing more.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Fetch, or exit with the reason on standard error."""
    parent, name, revision, cache, *files = arguments
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        raise SystemExit("the caller is gone")
    from huggingface_hub import snapshot_download

    # Names are patterns here; a bracket in one would be a class of characters.
    patterns = [file.replace("[", "[[]") for file in files]
    endpoint = os.environ.get("HF_ENDPOINT") or None
    snapshot_download(name, revision=revision, cache_dir=cache, allow_patterns=patterns, endpoint=endpoint)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:  # its last line is what the caller shows
        raise SystemExit(f"{type(error).__name__}: {' '.join(str(error).split())}") from None
