"""One rank of the all-reduce probe; rank 0 writes what it finds, one JSON object a line, as it goes."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_bw.launch.probe.ranks import measure
from sglang_bw.launch.probe.ranks.communicators import AbsentError, Ranks, Way, make

_PR_SET_PDEATHSIG = 1


class _Told:
    """Rank 0's file; the others keep silent."""

    def __init__(self, path: Path, rank: int) -> None:
        self.file = path.open("a", encoding="utf-8") if rank == 0 else None

    def __call__(self, event: str, **fields: Any) -> None:
        if self.file:
            self.file.write(json.dumps({"event": event, **fields}) + "\n")
            self.file.flush()


def main(job: dict[str, Any], out: Path) -> None:
    """Check and measure one way at all sizes.

    :param job: ``way``, ``device`` (cpu, cuda), ``hidden``, ``rows`` (a list), ``repetitions``, ``graphs``.
    """
    _end_with_torchrun()
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    tell = _Told(out, rank)
    tell("import")
    ranks = _ranks(job, rank, world, local)
    tell("start", **_versions(ranks))
    try:
        way = make(job["way"], ranks)
        reference = make("torch", ranks)
        for rows in job["rows"]:
            _size(job, ranks, way, reference, rows, tell)
    except AbsentError as error:
        tell("absent", reason=str(error))
    except Exception as error:
        traceback.print_exc()
        tell("failed", reason=f"{type(error).__name__}: {error}")
        raise
    tell("end")
    # Communicators that share memory hang in their destructors when another rank has gone first.
    sys.stdout.flush()
    os._exit(0)


def _ranks(job: dict[str, Any], rank: int, world: int, local: int) -> Ranks:
    import torch
    import torch.distributed as dist

    largest = max(job["rows"]) * job["hidden"] * 2
    limit = datetime.timedelta(seconds=600)  # the tool has a shorter one
    if job["device"] == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=limit)
        return Ranks(rank, world, torch.device("cpu"), dist.group.WORLD, dist.group.WORLD, largest)
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=limit)
    return Ranks(rank, world, device, dist.new_group(backend="gloo"), dist.group.WORLD, largest)


def _versions(ranks: Ranks) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"torch": torch.__version__}
    if ranks.device.type == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["cuda"] = torch.version.cuda
        found["gpu"] = torch.cuda.get_device_name(ranks.device)
    return found


def _size(job: dict[str, Any], ranks: Ranks, way: Way, reference: Way, rows: int, tell: _Told) -> None:
    shape = (rows, job["hidden"])
    check = measure.Check(ranks, reference, shape)
    repetitions = job["repetitions"]
    for graph in (False, True) if job["graphs"] else (False,):
        about = {"rows": rows, "bytes": rows * job["hidden"] * 2, "graph": graph}
        tell("checking", **about)

        def done(number: int, about: dict[str, Any] = about) -> None:
            tell("checked", **about, repetitions=number)

        try:
            wrong = _wrong(way, check, shape, repetitions, done, graph=graph)
        except AbsentError as error:  # on every rank, and perhaps of this size only
            tell("absent", reason=f"{rows} rows {'in a CUDA graph' if graph else 'eagerly'}: {error}")
            continue
        if wrong:
            tell("wrong", **about, wrong=wrong, repetitions=repetitions)
            continue
        median, high = _timed(ranks, way, shape, graph=graph)
        tell("size", **about, microseconds=median * 1e6, microseconds_p90=high * 1e6, repetitions=repetitions)


def _wrong(
    way: Way,
    check: measure.Check,
    shape: tuple[int, int],
    repetitions: int,
    done: Callable[[int], None],
    *,
    graph: bool,
) -> int:
    if not graph:
        return check.wrong(way.reduce, repetitions, done)
    with measure.captured(way, shape, check.ranks.device, 1) as parts:
        return check.wrong(measure.replayed(*parts), repetitions, done)


def _timed(ranks: Ranks, way: Way, shape: tuple[int, int], *, graph: bool) -> tuple[float, float]:
    import torch

    calls = measure.CALLS if ranks.device.type == "cuda" else 1
    if graph:
        with measure.captured(way, shape, ranks.device, calls) as (replayable, _, _):
            return measure.seconds(ranks, replayable.replay, calls)
    work = torch.zeros(shape, dtype=torch.bfloat16, device=ranks.device)

    def run() -> None:
        for _ in range(calls):
            way.reduce(work)

    return measure.seconds(ranks, run, calls)


def _end_with_torchrun() -> None:
    """Be killed when torchrun is: a rank that waits for another one would stay forever."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
