"""Latency of all-reduces at the sizes of a recipe, each way in processes of its own under torchrun.

A way that hangs is killed and the next one starts; a sum that differs from the reference's gives no latency.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sglang_bw
from sglang_bw.errors import AllReduceError, BwError, ProbeError
from sglang_bw.host.fingerprint import Fingerprint
from sglang_bw.launch.cause import cause
from sglang_bw.launch.probe.variants import Variant
from sglang_bw.launch.process import EngineProcess, SignalRelay
from sglang_bw.ledger.entry import Number
from sglang_bw.ledger.failure import FailureClass, classify

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


@dataclass(frozen=True)
class Latency:
    """One size of one way, as its slowest rank saw it.

    :ivar graph: whether it was replayed from a CUDA graph, as decode and verify passes are.
    :ivar microseconds: median.
    """

    backend: str
    rows: int
    bytes: int
    graph: bool
    microseconds: float
    microseconds_p90: float
    repetitions: int


@dataclass(frozen=True)
class Failure:
    """A way that is not to be had (``absent``), or must not be used (``wrong``, ``hung``, ``died``)."""

    backend: str
    kind: str
    reason: str


@dataclass
class Result:
    """What was found, complete or not yet."""

    job: Job
    host: Fingerprint
    recipe: str = ""
    versions: dict[str, Any] = field(default_factory=dict)
    latencies: list[Latency] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    complete: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the form that `plan` reads, with everything else that was found."""
        return {
            "probe": "allreduce",
            "schema": 1,
            "taken": datetime.now(UTC).isoformat(timespec="seconds"),
            "complete": self.complete,
            "recipe": self.recipe,
            "host": {"key": self.host.key, **asdict(self.host)},
            "versions": self.versions,
            "gpus": self.job.gpus,
            "hidden": self.job.hidden,
            "dtype": "bfloat16",
            "device": self.job.device,
            "latencies": [asdict(row) for row in self.latencies],
            "failures": [asdict(row) for row in self.failures],
        }

    def fastest(self, rows: int) -> Latency | None:
        """Return the quickest way at a size."""
        found = [row for row in self.latencies if row.rows == rows]
        return min(found, key=lambda row: row.microseconds, default=None)

    def title(self) -> str:
        """Return what was measured, in words."""
        ways = len({row.backend for row in self.latencies})
        job = self.job
        return f"all-reduces of {job.gpus} ranks on {job.device}, hidden {job.hidden}; ways measured: {ways}"

    def numbers(self) -> dict[str, Number]:
        """Return the fastest way at each size; all of them are in the file."""
        fastest = filter(None, map(self.fastest, self.job.rows))
        return {f"{row.rows} rows by {row.backend}": Number(value=row.microseconds, unit="us") for row in fastest}

    def failure(self, error: BwError) -> FailureClass:
        """Return why it failed."""
        known = {"hung": FailureClass.HANG, "wrong": FailureClass.NUMERICS}
        kinds = (known[row.kind] for row in self.failures if row.kind in known)
        return next(kinds, classify(error.message, phase="ready"))

    def error(self) -> AllReduceError | ProbeError | None:
        """Return what a user must know of: ways that are dangerous, or nothing that works."""
        bad = [row for row in self.failures if row.kind != "absent"]
        if bad:
            said = "; ".join(f"{row.backend} {row.kind}: {row.reason}" for row in bad)
            return AllReduceError(said, hint="do not serve with these; the others were measured and stored.")
        if not self.latencies:
            said = "; ".join(f"{row.backend}: {row.reason}" for row in self.failures)
            return ProbeError(f"no all-reduce could be measured: {said}")
        return None


class Run:
    """One way: its processes, their log and what they tell."""

    def __init__(self, job: Job, variant: Variant, python: Path, environ: Mapping[str, str], scratch: Path) -> None:
        self.job, self.variant = job, variant
        self.out, self.log = scratch / f"{variant.name}.jsonl", scratch / f"{variant.name}.log"
        self.out.touch()
        self.command = command(job, variant, python, self.out)
        self.environ = {**environ, **variant.env, **environment(job, environ)}
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
                    yield {"event": "hung", "reason": f"no sign of life for {self.job.timeout_s:.0f} s"}
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
        "graphs": job.device == "cuda",
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


def measure(
    result: Result,
    variants: Sequence[Variant],
    python: Path,
    environ: Mapping[str, str],
    *,
    tell: Callable[[str], None],
    keep: Callable[[Result], None],
) -> Result:
    """Measure every way, one after the other.

    :param tell: gets a line about what is being done.
    :param keep: is called after each way, so that nothing is lost when the next one is interrupted.
    :raises KeyboardInterrupt: a signal came; what was measured has been kept.
    """
    with tempfile.TemporaryDirectory(prefix="sglang-bw-probe-") as folder, SignalRelay() as relay:
        for number, variant in enumerate(variants, 1):
            run = Run(result.job, variant, python, environ, Path(folder))
            tell(f"{number}/{len(variants)} {variant.name}: starting {result.job.gpus} processes")
            for event in run.events(relay):
                if event["event"] == "interrupted":
                    raise KeyboardInterrupt
                _take(result, variant, event)
                if said := _line(event):
                    tell(f"{number}/{len(variants)} {variant.name}: {said}")
            keep(result)
            if relay.received:
                raise KeyboardInterrupt
    result.complete = True
    keep(result)
    return result


def _take(result: Result, variant: Variant, event: dict[str, Any]) -> None:
    kind = event["event"]
    if kind == "start":
        result.versions.update({name: value for name, value in event.items() if name != "event"})
    elif kind == "size":
        fields = {name: value for name, value in event.items() if name != "event"}
        result.latencies.append(Latency(variant.name, **fields))
    elif kind == "wrong":
        where = "in a CUDA graph" if event["graph"] else "eagerly"
        said = f"{event['wrong']} of {event['repetitions']} sums of {event['bytes']} bytes {where}"
        result.failures.append(Failure(variant.name, "wrong", said))
    elif kind in ("absent", "hung", "died"):
        told = any(row.backend == variant.name for row in result.failures)
        if not told:
            result.failures.append(Failure(variant.name, kind, event["reason"]))
    elif kind == "failed":
        result.failures.append(Failure(variant.name, "died", event["reason"]))


def _line(event: dict[str, Any]) -> str:
    if event["event"] in ("checking", "checked"):
        sums = f", {event['repetitions']} sums compared" if "repetitions" in event else ""
        return f"{event['rows']} rows, {'graph' if event['graph'] else 'eager'}{sums}"
    return {"import": "importing torch", "start": "connected"}.get(event["event"], "")


def environ_for(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the engine's environment for the probe: bytecode may be written, the ranks' own variables are not ours."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in environ.items() if name not in foreign} or dict(os.environ)
