"""The goodput policy at tensor parallelism 2: its grid, and whether the ranks decide the same in every round."""

from __future__ import annotations

import itertools
import time

from record import rounds
from record.servers import Record
from record.speed import block

from . import arms, decisions
from .bench import Bench

ARMS = {"off": "off", "fixed": "patched", "goodput": "goodput", "checked": "checked"}
"""Servers by the name of the arm; ``patched`` has a fixed number of steps. The last one is watched, not measured."""
MEASURED = ("off", "fixed", "goodput")
SPECULATING = ["patched", "goodput"]


def run(bench: Bench) -> None:
    """Measure the grid, then watch the ranks for a while, and again with one of them slowed."""
    options, record = bench.options, bench.record
    record["flags"] = arms.flags(bench, "goodput")
    grid = Grid(bench)
    record["agreement"] = {}
    if options.lengths:
        bench.stop("stock")  # of `tp2`: large models fit three times
        measure(bench, grid)
    runs = (("long", options.seconds, 0.0), ("slowed", options.slow_seconds, options.slow_ms))
    if any(seconds for _, seconds, _ in runs):
        bench.stop()
        arms.start(bench, "checked")
        record["phase"] = "watching"  # time is measured no more: others may begin
        bench.keep()
        log = decisions.Log.of(arms.decisions(bench, "checked"))
        for name, seconds, slow in runs:
            seen = grid.watch(seconds, slow)
            record["agreement"][name] = decisions.compare(log.new(), options.tp) | {"slow_ms": slow} | seen
            bench.keep()
    if bad := [name for name, found in record["agreement"].items() if not found["same"]]:
        raise RuntimeError(f"the ranks did not decide the same: {', '.join(bad)}")


def measure(bench: Bench, grid: Grid) -> None:
    """Measure every point of the grid."""
    options, record = bench.options, bench.record
    arms.start(bench, "off", "patched", "goodput")
    record["server"] = bench.servers["goodput"].told()
    record["points"] = {}
    for length, batch in itertools.product(options.lengths, options.policy_batches):
        record["points"][f"{length} x {batch}"] = grid.point(length, batch)
        bench.keep()
    log = decisions.Log.of(arms.decisions(bench, "goodput"))
    record["agreement"]["grid"] = decisions.compare(log.new(), options.tp)


class Grid:
    """Blocks of the arms."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.seed = 0

    def run(self, arm: str, batch: int) -> tuple[float, float]:
        """One block: output tokens per second, accept length."""
        self.seed += 1
        server = self.bench.servers[ARMS[arm]]
        return block(server, batch, self.bench.options.policy_tokens, arms.vocabulary(self.bench), self.seed)

    def point(self, length: float, batch: int) -> Record:
        """All arms at one accept length and batch."""
        options = self.bench.options
        arms.control(self.bench, SPECULATING, length)
        for arm, times in (("off", 1), ("fixed", 1), ("goodput", options.adapt)):
            for _ in range(times):
                self.run(arm, batch)
        found = rounds.measure(
            lambda arm: self.run(arm, batch),
            MEASURED,
            "goodput",
            least=options.rounds,
            most=options.most,
            within=options.within,
        )
        return rounds.judge(found, "goodput", options.within)

    def watch(self, seconds: float, slow_ms: float) -> Record:
        """Keep the watched server busy at changing batches and accept lengths."""
        began, speeds = time.monotonic(), []
        points = itertools.cycle(itertools.product(self.bench.options.policy_batches, (3.0, 1.0, 1.5)))
        while time.monotonic() - began < seconds:
            batch, length = next(points)
            arms.control(self.bench, ["checked"], length, slow_ms=slow_ms)
            speeds.append([batch, length, round(self.run("checked", batch)[0], 1)])
        arms.control(self.bench, ["checked"], arms.REAL)
        return {"seconds": round(time.monotonic() - began, 1), "blocks": len(speeds), "speeds": speeds[:40]}


def line(record: Record) -> str:
    """Return what was found in one line."""
    said = []
    if points := record.get("points", {}):
        worst = min(points, key=lambda name: points[name]["ratio"])
        said.append(f"{len(points)} points, least goodput/best {points[worst]['ratio']} at {worst}")
    for name, found in record.get("agreement", {}).items():
        verdict = "the same" if found["same"] else f"NOT the same ({found['first_difference']})"
        said.append(f"{name}: {found['launches']} launches, {found['switches']} switches, {verdict}")
    return "; ".join(said)
