"""The tables of the page: text for every number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_bw.ledger.record import ArmNumbers, ArmRecord, Outcome, RunRecord
from sglang_bw.ledger.report import policy

Cells = tuple[str, ...]
_APART = "\N{NO-BREAK SPACE}/\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Table:
    """A table of text; the first column names the row."""

    head: Cells
    rows: tuple[Cells, ...]


def numbers(outcome: Outcome) -> Table:
    """Return what both arms did at each concurrency."""
    head = (
        "concurrency", "arm", "tok/s", "TTFT, s", "TPOT, s", "ITL, s", "end to end, s", "goodput, 1/s", "accept length",
        "KV in use", "in graphs", "GPU MHz", "GPU W", "PCIe rx/tx MB/s",
    )  # fmt: skip
    rows = [
        (str(one.concurrency), name, *_arm_numbers(arm))
        for one in outcome.ratios
        for name, arm in (("A", one.a), ("B", one.b))
    ]
    return Table(head, tuple(rows))


def _arm_numbers(arm: ArmNumbers) -> Cells:
    gpu = arm.gpu
    return (
        f"{arm.tok_s:.1f}",
        *(_APART.join(f"{value:.4g}" for value in times) for times in (arm.ttft_s, arm.tpot_s, arm.itl_s, arm.e2e_s)),
        number(arm.goodput, 3),
        number(arm.accept_length, 3),
        percent(arm.kv_use),
        percent(arm.graph_share),
        mean(gpu.clock_mhz if gpu else ()),
        mean(gpu.power_w if gpu else ()),
        f"{mean(gpu.pcie_rx_mb_s)}{_APART}{mean(gpu.pcie_tx_mb_s)}" if gpu else "-",
    )


def difference(run: RunRecord) -> Table:
    """Return the settings that are not the same in both arms."""
    rows = tuple((key, text(a), text(b)) for key, (a, b) in sorted(run.difference.items()))
    return Table(("setting", "A", "B"), rows)


def versions(run: RunRecord) -> Table:
    """Return engine, patches and command of both arms, and the machine."""

    def row(name: str, of: Any) -> Cells:
        return (name, *(text(of(arm)) for arm in run.arms))

    def command(arm: ArmRecord) -> str:
        setting = " ".join(f"{name}={value}" for name, value in sorted(arm.env.items()))
        return f"{setting} {' '.join(arm.argv)}".strip() or "was already running"

    rows = (
        row("arm", lambda arm: arm.says),
        row("engine", lambda arm: arm.engine.version),
        row("tree", lambda arm: arm.engine.tree),
        row("patches", lambda arm: ", ".join(arm.engine.patches)),
        row("speculation", lambda arm: arm.speculation),
        row("graphs", lambda arm: arm.graphs),
        row("command", command),
    )
    host = run.host
    gpus = ", ".join(host.gpus) or "no GPU"
    machine = f"{host.fingerprint}: {host.cpu}, {host.cores} cores, {host.memory_gib:.0f} GiB, {gpus}"
    return Table(("", "A", "B"), (*rows, ("machine", machine, f"driver {host.driver or '-'}"), ("tool", run.tool, "")))


def switches(run: RunRecord) -> Table | None:
    """Return when adaptive policies changed their draft steps, and why; ``None`` when they did not."""
    rows = tuple(
        (f"{one.at_s:.1f}", one.arm, f"{one.before} to {one.after}", str(one.count), one.reason)
        for one in policy.switches(run)
    )
    return Table(("seconds", "arm", "draft steps", "switches", "the policy says"), rows) if rows else None


def number(value: float | None, digits: int) -> str:
    """Return a number, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Return a share as percent, or a dash."""
    return "-" if value is None else f"{100 * value:.1f} %"


def mean(values: Sequence[float]) -> str:
    """Return the mean over GPUs, or a dash."""
    return f"{sum(values) / len(values):.0f}" if values else "-"


def text(value: Any) -> str:
    """Return a setting as text."""
    if value is None or value == "":
        return "-"
    return value if isinstance(value, str) else json.dumps(value, default=str)
