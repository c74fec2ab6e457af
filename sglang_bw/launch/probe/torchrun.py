"""One way's processes under torchrun: their command line, their environment and what they tell."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sglang_bw
from sglang_bw.launch.cause import cause
from sglang_bw.launch.probe.variants import Variant
from sglang_bw.launch.process import EngineProcess, SignalRelay

# The tool's package under its own name, and nothing else of the tool's environment on the import path.
_START = """
import json, sys, types
from pathlib import Path
package = types.ModuleType("sglang_bw")
package.__path__ = [sys.argv[1]]
sys.modules["sglang_bw"] = package
from sglang_bw.launch.probe.ranks.main import main
main(json.loads(sys.argv[2]), Path(sys.argv[3]))
"""
_POLL_S = 0.05


@dataclass(frozen=True)
class Job:
    """What is measured.

    :ivar gpus: ranks; processes on a CPU.
    :ivar hidden: numbers of two bytes in a row.
    :ivar rows: rows of a message: of a decode step its batch, of a verify pass batch x draft tokens.
    :ivar repetitions: sums that are compared with the reference's at every size, before it is timed.
    :ivar timeout_s: a way that says nothing for so long is killed.
    """

    device: str
    gpus: int
    hidden: int
    rows: tuple[int, ...]
    repetitions: int = 20
    timeout_s: float = 120.0

    @property
    def graphs(self) -> bool:
        """Whether the times that count are those of CUDA graphs, as in decode and verify passes."""
        return self.device == "cuda"


class Run:
    """One way: its processes, their log and what they tell."""

    def __init__(self, job: Job, variant: Variant, python: Path, environ: Mapping[str, str], scratch: Path) -> None:
        self.job, self.variant = job, variant
        self.out, self.log = scratch / f"{variant.name}.jsonl", scratch / f"{variant.name}.log"
        self.out.touch()
        self.command = command(job, variant, python, self.out)
        self.environ = {**variant.environ(environ), **environment(job, environ)}
        self._read = 0

    def events(self, relay: SignalRelay) -> Iterator[dict[str, Any]]:
        """Start it and yield what it tells; at a bad end last of all ``died``, ``hung`` or ``interrupted``."""
        process = EngineProcess(self.command, self.environ, self.log, grace_s=2)
        relay.connect(process)
        quiet = time.monotonic()
        try:
            while True:
                code = process.poll()
                for event in self._new():
                    quiet = time.monotonic()
                    yield event
                if relay.received:
                    yield {"event": "interrupted"}
                    return
                if code is not None:
                    break
                if time.monotonic() - quiet > self.job.timeout_s:
                    yield {"event": "hung", "reason": f"no sign of life for {self.job.timeout_s:g} s"}
                    return
                time.sleep(_POLL_S)
            if code:
                yield {"event": "died", "reason": cause(self.log) or f"exit code {code}"}
        finally:
            process.kill()
            process.wait(30)

    def _new(self) -> Iterator[dict[str, Any]]:
        with self.out.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        yield from map(json.loads, whole.splitlines())


def command(job: Job, variant: Variant, python: Path, out: Path) -> list[str]:
    """Return the torchrun line of a way."""
    facts = {
        "way": variant.way,
        "device": job.device,
        "hidden": job.hidden,
        "rows": list(job.rows),
        "repetitions": job.repetitions,
        "graphs": job.graphs,
    }
    return [
        *(str(python), "-P", "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(job.gpus), "--no-python"),
        *(str(python), "-P", "-c", _START, str(Path(sglang_bw.__file__).parent), json.dumps(facts), str(out)),
    ]


def environment(job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what every way's processes get besides."""
    bound = str(job.hidden * max(job.rows))
    # All ranks are on this host, whose own name need not be one that it can resolve.
    gloo = environ.get("GLOO_SOCKET_IFNAME", "lo")
    own = {"OMP_NUM_THREADS": "1", "SGLANG_PCIE_IPC_MAX_NUMEL": bound, "GLOO_SOCKET_IFNAME": gloo}
    return own | ({"CUDA_VISIBLE_DEVICES": ""} if job.device == "cpu" else {})


def environ_for(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the engine's environment for the probe: bytecode may be written, the ranks' own variables are not ours."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in environ.items() if name not in foreign} or dict(os.environ)
