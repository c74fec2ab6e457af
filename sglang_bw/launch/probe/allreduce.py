"""Latency of all-reduces at the sizes of a recipe, each way in processes of its own under torchrun.

A way that hangs is killed and the next one starts; a sum that differs from the reference's gives no latency.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sglang_bw.errors import AllReduceError, BwError, ProbeError
from sglang_bw.host.fingerprint import Fingerprint
from sglang_bw.launch.probe.sizes import Sizes
from sglang_bw.launch.probe.torchrun import Job, Run
from sglang_bw.launch.probe.variants import Variant
from sglang_bw.launch.process import SignalRelay
from sglang_bw.ledger.entry import Number
from sglang_bw.ledger.failure import FailureClass, classify

_DANGEROUS = ("wrong", "hung", "died")
# Before any rank was there, by words of the reason: what to do next.
_NEXT = (
    (
        re.compile(r"no sign of life"),
        "importing torch can take minutes on a busy disk: --timeout SECONDS gives it more.",
    ),
    (
        re.compile(r"No module named|ModuleNotFoundError|ImportError"),
        "`sglang-bw install` puts the engine and torch there; --python names the interpreter of another environment.",
    ),
    (
        re.compile(r"out of memory|OutOfMemory", re.IGNORECASE),
        "`nvidia-smi` names the programs that hold the GPUs' memory.",
    ),
)
_LOOK = "`sglang-bw doctor` looks at driver, GPUs and engine."


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
    """A way that is not to be had, or must not be used.

    :ivar kind: ``absent``: not here, or not at this size; ``unstarted``: no rank came up, which says nothing of the way
        itself; ``wrong``, ``hung``, ``died``: do not use it.
    """

    backend: str
    kind: str
    reason: str


@dataclass
class Result:
    """What was found, complete or not yet.

    :ivar sizes: which passes have messages of so many rows; ``None`` when nobody knows.
    :ivar backends: way -> what decides about all-reduces in the environment of its processes.
    :ivar complete: every way was tried, and something was measured.
    """

    job: Job
    host: Fingerprint
    recipe: str = ""
    sizes: Sizes | None = None
    backends: dict[str, dict[str, str]] = field(default_factory=dict)
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
            "batches": self.sizes.batches if self.sizes else None,
            "draft_tokens": self.sizes.draft_tokens if self.sizes else None,
            "sizes": [self._size(rows) for rows in self.job.rows],
            "backends": self.backends,
            "latencies": [asdict(row) for row in self.latencies],
            "failures": [asdict(row) for row in self.failures],
        }

    def _size(self, rows: int) -> dict[str, Any]:
        fastest = self.fastest(rows)
        return {
            "rows": rows,
            "bytes": rows * self.job.hidden * 2,
            "in": self.passes(rows),
            "fastest": fastest.backend if fastest else None,
        }

    def passes(self, rows: int) -> str:
        """Return which passes have messages of so many rows."""
        return self.sizes.of(rows) if self.sizes else ""

    def at(self, rows: int) -> dict[str, Latency]:
        """Return what counts at a size, by way: times in CUDA graphs where there are graphs, as passes run in them."""
        graphs = self.job.graphs
        return {row.backend: row for row in self.latencies if (row.rows, row.graph) == (rows, graphs)}

    def fastest(self, rows: int) -> Latency | None:
        """Return the quickest way at a size."""
        return min(self.at(rows).values(), key=lambda row: row.microseconds, default=None)

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
        bad = [row for row in self.failures if row.kind in _DANGEROUS]
        unstarted = [row for row in self.failures if row.kind == "unstarted"]
        measured = {row.backend for row in self.latencies}
        if bad:
            said = "; ".join(f"{row.backend} {row.kind}: {row.reason}" for row in [*bad, *unstarted])
            others = measured - {row.backend for row in bad}
            rest = "; the others were measured and stored." if others else "."
            return AllReduceError(said, hint=f"do not serve with these{rest}")
        if unstarted:
            rest = "; the others were measured and stored" if measured else ""
            return ProbeError(f"no rank came up: {_by_reason(unstarted)}{rest}", hint=_next(unstarted[0].reason))
        if not measured:
            return ProbeError(f"no all-reduce could be measured: {_by_reason(self.failures)}")
        return None


def _by_reason(failures: Iterable[Failure]) -> str:
    """Say each reason once, behind the ways that it holds for."""
    ways: dict[str, list[str]] = {}
    for row in failures:
        ways.setdefault(row.reason, []).append(row.backend)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in ways.items())


def _next(reason: str) -> str:
    return next((hint for words, hint in _NEXT if words.search(reason)), _LOOK)


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
    :param keep: is called after each size and each way, so that nothing is lost when the next one is interrupted.
    :raises KeyboardInterrupt: a signal came; what was measured has been kept.
    """
    with tempfile.TemporaryDirectory(prefix="sglang-bw-probe-") as folder, SignalRelay() as relay:
        for number, variant in enumerate(variants, 1):
            run = Run(result.job, variant, python, environ, Path(folder))
            result.backends[variant.name] = variant.shown(environ)
            started = False
            tell(f"{number}/{len(variants)} {variant.name}: starting {result.job.gpus} processes")
            for event in run.events(relay):
                if event["event"] == "interrupted":
                    raise KeyboardInterrupt
                started = started or event["event"] == "start"
                _take(result, variant.name, event, started=started)
                if event["event"] == "size":
                    keep(result)
                if said := _line(event):
                    tell(f"{number}/{len(variants)} {variant.name}: {said}")
            keep(result)
            if relay.received:
                raise KeyboardInterrupt
    result.complete = bool(result.latencies)
    keep(result)
    return result


def _take(result: Result, way: str, event: dict[str, Any], *, started: bool) -> None:
    kind = event["event"]
    fields = {name: value for name, value in event.items() if name != "event"}
    if kind == "start":
        result.versions.update(fields)
    elif kind == "size":
        result.latencies.append(Latency(way, **fields))
    elif failure := _failure(way, event, started=started):
        # The exception that a rank has told says more than how its process ended.
        told = kind == "died" and any((row.backend, row.kind) == (way, "died") for row in result.failures)
        if not told:
            result.failures.append(failure)


def _failure(way: str, event: dict[str, Any], *, started: bool) -> Failure | None:
    kind = event["event"]
    if kind == "wrong":
        where = "in a CUDA graph" if event["graph"] else "eagerly"
        said = f"{event['wrong']} of {event['repetitions']} sums of {event['bytes']} bytes {where}"
        return Failure(way, "wrong", said)
    if kind in ("hung", "died") and not started:
        return Failure(way, "unstarted", event["reason"])
    if kind in ("absent", "hung", "died", "failed"):
        return Failure(way, "died" if kind == "failed" else kind, event["reason"])
    return None


def _line(event: dict[str, Any]) -> str:
    if event["event"] in ("checking", "checked"):
        sums = f", {event['repetitions']} sums compared" if "repetitions" in event else ""
        return f"{event['rows']} rows, {'graph' if event['graph'] else 'eager'}{sums}"
    return {"import": "importing torch", "start": "connected"}.get(event["event"], "")
