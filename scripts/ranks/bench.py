"""What every part gets: options, a scratch folder, the running servers and a record that is kept as it grows."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from record.servers import Record, Server, spawn, start_engine, wait_all

SCRIPTS = Path(__file__).resolve().parents[1]
INJECT = SCRIPTS / "record" / "inject"
# A program that uses NVLink multicast can put the GPUs of a shared host out of service; nothing here needs it.
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
ON_ONE_HOST = {
    "GLOO_SOCKET_IFNAME": "lo",  # the host's own name need not be one that it can resolve
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # servers that start beside each other fill the GPUs unevenly
    "SGLANG_DISABLE_CUDNN_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
}
# Two ranks on a CPU: cores for each, and no NCCL, which the engine would use wherever it finds the library.
ON_A_CPU = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1", "SGLANG_NCCL_SO_PATH": "none.so"}
_TAIL = 1500
_CAUSE = re.compile(r"^[\w.]*(?:Error|Exception|Disagree|assert)[\w.]*\b.*", re.MULTILINE)
_CONSEQUENCE = re.compile(r"Connection (closed|reset) by peer|Broken pipe|ncclRemoteError|remote process exited")


@dataclass
class Bench:
    """Where a part works.

    :ivar scratch: folder for logs and models of all parts.
    :ivar servers: running ones by name; a later part of the same process finds those of an earlier one.
    :ivar record: of the part that runs.
    :ivar compiling: what compiles kernels for servers.
    """

    options: argparse.Namespace
    scratch: Path
    part: str = ""
    servers: dict[str, Server] = field(default_factory=dict)
    record: Record = field(default_factory=dict)
    compiling: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def begin(self, part: str) -> None:
        """Start the record of a part."""
        self.part, self.record = part, {"state": "running", "began": time.time()}
        self.keep()

    def keep(self) -> None:
        """Write the record, whole or not at all: the process may be killed at any time."""
        self.record["seconds"] = round(time.time() - self.record["began"], 1)
        path = part_file(self.scratch, self.part)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(self.record, indent=1) + "\n")
        new.replace(path)

    def start(self, name: str, tree: Path, flags: Record, environ: Mapping[str, str] | None = None) -> Server:
        """Start an engine, to be waited for."""
        own = {"PYTHONPATH": f"{INJECT}{os.pathsep}{tree}"} | dict(environ or {})
        self.servers[name] = start_engine(name, tree, flags, self.scratch, own)
        return self.servers[name]

    def wait(self, *names: str, seconds: float | None = None) -> None:
        """Wait until these servers are ready, for the start limit if not told otherwise.

        :raises RuntimeError: one is not; with the end of its log.
        """
        wait_all([self.servers[name] for name in names], self.options.start_limit if seconds is None else seconds)

    def stop(self, *names: str) -> None:
        """End these servers where they run, or all, with what is being compiled for them."""
        ended = [self.servers.pop(name) for name in names or tuple(self.servers) if name in self.servers]
        for server in ended:
            server.process.terminate()
        for server in ended:
            server.stop()
        if not names:
            for process in self.compiling:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def part_file(scratch: Path, part: str) -> Path:
    """Return where the record of a part is."""
    return scratch / f"{part}.json"


def read_part(scratch: Path, part: str) -> Record:
    """Return the record of a part, empty when it has not begun."""
    path = part_file(scratch, part)
    found: Record = json.loads(path.read_text()) if path.exists() else {}
    return found


def environment(device: str) -> dict[str, str]:
    """Return what every process gets, whatever its own environment says."""
    return WITHOUT_MULTICAST | ON_ONE_HOST | (ON_A_CPU if device == "cpu" else {})


def ranks(
    name: str, program: Path, tree: Path, arguments: list[str], scratch: Path, seconds: float, world: int = 2
) -> list[Record]:
    """Run a program as ``world`` processes and return the JSON that each printed last.

    :param program: gets the rank, the number of ranks and a port before ``arguments``.
    :param seconds: all of them are killed after it.
    :raises RuntimeError: one ended badly or did not end, with its last words.
    """
    from record.servers import free_port

    port, started = str(free_port()), []
    for rank in range(world):
        out, err = scratch / f"{name}.{rank}.out", scratch / f"{name}.{rank}.log"
        command = [sys.executable, "-W", "ignore", "-P", str(program), str(rank), str(world), port, *arguments]
        environ = dict(os.environ) | {"PYTHONPATH": f"{tree}{os.pathsep}{SCRIPTS}"}
        started.append((spawn(command, environ, out, err), out, err))
    deadline = time.monotonic() + seconds
    said: list[str] = []
    for rank, (process, _, err) in enumerate(started):
        try:
            code = process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            said.append(f"rank {rank} hung: {last_words(err)}")
            continue
        if code:
            said.append(f"rank {rank} ended with {code}: {last_words(err)}")
            deadline = min(deadline, time.monotonic() + 10)  # the other one may wait for it
    for process, _, _ in started:
        process.kill()
        process.wait()
    if said:
        raise RuntimeError("; ".join(said))
    return [json.loads(out.read_text().splitlines()[-1]) for _, out, _ in started]


def last_words(log: Path) -> str:
    """Return the last error of a log, or else its end."""
    text = log.read_text(errors="replace") if log.exists() else ""
    found = _CAUSE.findall(text)
    # When one rank has died the others say so, later.
    found = [line for line in found if not _CONSEQUENCE.search(line)] or found
    return found[-1][:_TAIL] if found else text[-_TAIL:].strip()
