"""Serve the tiny pair with an installed bundle and ask it, on a host whose only interface is the loopback.

Runs with the bundle's own Python: ``python ask_offline.py SGLANG_BW [DEVICE]`` prints the answer as JSON.
"""

from __future__ import annotations

import fcntl
import json
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any

import httpx

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
START_S = 600.0
PORT = 30000


def loopback_up() -> None:
    """Switch the loopback of a new network namespace on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        asked = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(control, SIOCGIFFLAGS, asked))[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def reaches_nobody() -> bool:
    """Tell whether an address outside cannot even be tried."""
    try:
        socket.create_connection(("192.0.2.1", 443), timeout=2).close()
    except OSError as error:
        return not isinstance(error, TimeoutError)
    return False


def ask(serve: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Wait until the server answers, and ask it."""
    deadline = time.monotonic() + START_S
    body = {"text": "At the end of the winter, Lena", "sampling_params": {"temperature": 0, "max_new_tokens": 32}}
    while True:
        try:
            answer = httpx.post(f"http://127.0.0.1:{PORT}/generate", json=body, timeout=120)
            if answer.is_success:
                return dict(answer.json())
        except httpx.HTTPError:
            pass
        if serve.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no answer; serve ended with {serve.poll()}")
        time.sleep(0.5)


def main(tool: str, device: str) -> None:
    loopback_up()
    serve = subprocess.Popen([tool, "serve", "tiny", "--device", device, "--port", str(PORT)], stdout=sys.stderr)
    try:
        answer = ask(serve)
    finally:
        serve.send_signal(signal.SIGINT)
        serve.wait(120)
    meta = answer["meta_info"]
    rounds = meta["spec_verify_ct"]
    print(
        json.dumps(
            {"text": answer["text"], "tokens": meta["completion_tokens"], "rounds": rounds, "alone": reaches_nobody()}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cpu")
