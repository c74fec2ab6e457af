"""What ``ab`` shows: progress while it measures, tables at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from sglang_bw.cli.console import err, out, widen_for_file
from sglang_bw.experiment.arm import Name
from sglang_bw.launch.startup import Phase, Startup
from sglang_bw.ledger.record import ArmNumbers, ArmRecord, OutputComparison, Ratio, RunRecord

_STYLES = {"faster": "green", "slower": "red", "undecided": "yellow"}


class AbProgress:
    """A live line on a terminal, a line a phase and a round elsewhere."""

    def __init__(self, head: RunRecord, path: Path) -> None:
        self.head = head
        self.path = path
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
        )
        self._progress = Progress(*columns, TimeElapsedColumn(), console=err, transient=True)
        self._task = self._progress.add_task("starting", total=None)
        self._said = ""

    def __enter__(self) -> AbProgress:
        for arm in self.head.arms:
            err.print(f"{arm.name}: {arm.says}", markup=False)
        err.print(f"record: {self.path}", markup=False)
        if err.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def start(self, name: str, startup: Startup, begun: list[Phase]) -> None:
        """Show the start of an engine."""
        self._show(f"{self._said}{name} {startup.phase.value} {startup.elapsed():.0f} s", 0, None)
        if not err.is_terminal:
            for phase in begun:
                err.print(f"{name} {startup.elapsed():6.1f} s  {phase.value}", markup=False)

    def block(self, name: Name, round_number: int, concurrency: int, total: int) -> None:
        """Begin a block."""
        what = "warm-up" if round_number < 0 else f"round {round_number + 1}"
        self._show(f"{self._said}{what}, {name}, {concurrency} at once", 0, total)

    def answered(self, count: int) -> None:
        """Count answers."""
        self._progress.update(self._task, completed=count)

    def round_over(self, rounds: int, ratios: Sequence[tuple[int, float, float]]) -> None:
        """Show where the ratios are."""
        parts = [f"{value:.3f} ±{half:.1%} at {concurrency}" for concurrency, value, half in ratios]
        self._said = f"B/A {', '.join(parts)} | " if parts else ""
        if not err.is_terminal:
            err.print(f"round {rounds}: {', '.join(parts) or 'no interval yet'}", markup=False)

    def _show(self, text: str, completed: int, total: int | None) -> None:
        self._progress.update(self._task, description=text, completed=completed, total=total)


def print_plan(head: RunRecord) -> None:
    """Print what a run would do."""
    for arm in head.arms:
        out.print(f"{arm.name}: {arm.says}  ({arm.url})", markup=False)
        if arm.argv:
            env = [f"{key}={value}" for key, value in sorted(arm.env.items())]
            out.print("   " + " ".join([*env, "sglang", "serve", *arm.argv]), markup=False)
    load = head.settings
    out.print(
        f"load: {load['prompt_count']} prompts of {load['prompts']}, {load['max_tokens']} tokens each, temperature "
        f"{load['temperature']:g}, at {', '.join(map(str, load['concurrency']))} at once",
        markup=False,
    )
    rounds = (
        f"{load['rounds']} rounds" if load["rounds"] else f"until the interval is within {100 * load['within']:g} %"
    )
    out.print(f"{rounds}, at most {_span(load['budget_s'])}, blocks A B B A", markup=False)


def _span(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 2 * 60 else f"{seconds / 60:.3g} min"


def print_outcome(run: RunRecord) -> None:
    """Print verdicts, numbers, differences and warnings."""
    outcome = run.outcome
    if outcome is None:
        return
    widen_for_file()
    for arm in run.arms:
        out.print(_identity(arm), markup=False)
    if run.simulated:
        out.print("Acceptance is simulated: these are no speeds that a user gets.", style="yellow")
    if outcome.ratios:
        out.print(_verdicts(outcome.ratios))
        out.print(_latencies(outcome.ratios))
    _print_difference(run)
    if outcome.outputs:
        _print_outputs(outcome.outputs)
    for warning in outcome.warnings:
        err.print(f"warning: {warning}", style="yellow", markup=False)


def _identity(arm: ArmRecord) -> str:
    graphs = {True: "decode graphs", False: "no decode graphs", None: "graphs unknown"}[arm.graphs]
    patches = f", {len(arm.engine.patches)} patches" if arm.engine.patches else ""
    pool = f"KV pool {arm.kv_tokens} tokens" if arm.kv_tokens else "KV pool unknown"
    speculation = arm.speculation or "no speculation"
    return f"{arm.name}: {arm.says}: sglang {arm.engine.version}{patches}, {speculation}, {graphs}, {pool}"


def _verdicts(ratios: Sequence[Ratio]) -> Table:
    table = Table(
        "at once", "A tok/s", "B tok/s", "B / A", "95 % interval", "B is", "accept length", "R", "rounds", box=None
    )
    for ratio in ratios:
        table.add_row(
            str(ratio.concurrency),
            f"{ratio.a.tok_s:.1f}",
            f"{ratio.b.tok_s:.1f}",
            f"{ratio.value:.3f}",
            f"{ratio.low:.3f} to {ratio.high:.3f}",
            Text(ratio.verdict, style=_STYLES[ratio.verdict]),
            _accept(ratio.a, ratio.b),
            f"{ratio.round_cost:.2f}" if ratio.round_cost is not None else "",
            str(ratio.rounds),
        )
    return table


def _accept(a: ArmNumbers, b: ArmNumbers) -> str:
    values = [f"{x.accept_length:.2f}" for x in (a, b) if x.accept_length is not None]
    return " and ".join(values)


def _latencies(ratios: Sequence[Ratio]) -> Table:
    table = Table(
        "at once",
        "arm",
        "TTFT ms",
        "TPOT ms",
        "ITL ms",
        "end to end s",
        "tok/s a user",
        "goodput /s",
        "KV use",
        box=None,
    )
    for ratio in ratios:
        for name, arm in (("A", ratio.a), ("B", ratio.b)):
            table.add_row(
                str(ratio.concurrency),
                name,
                *(f"{values[0] * 1e3:.1f}, {values[2] * 1e3:.1f}" for values in (arm.ttft_s, arm.tpot_s, arm.itl_s)),
                f"{arm.e2e_s[0]:.2f}, {arm.e2e_s[2]:.2f}",
                f"{arm.tok_s_user:.1f}",
                f"{arm.goodput:.2f}" if arm.goodput is not None else "",
                f"{arm.kv_use:.0%}" if arm.kv_use is not None else "",
            )
    table.caption = "median, 99th percentile"
    return table


def _print_difference(run: RunRecord) -> None:
    if not run.difference:
        out.print("Both arms are configured the same.")
        return
    shown = [f"{key} {a} | {b}" for key, (a, b) in run.difference.items()]
    out.print(f"configured differently: {'; '.join(f'{text:.80}' for text in shown[:8])}", markup=False)
    if len(shown) > 8:
        out.print(f"and {len(shown) - 8} more, in the record", markup=False)


def _print_outputs(outputs: OutputComparison) -> None:
    if not outputs.different:
        out.print(f"outputs: all {outputs.compared} answers are equal", markup=False)
        return
    out.print(f"outputs: {outputs.different} of {outputs.compared} answers differ", markup=False)
    if outputs.unsteady:
        out.print(f"{outputs.unsteady} of A's answers differ from its own first ones", markup=False)
    if first := outputs.first:
        place = f"first difference: prompt {first.prompt}, {first.unit} {first.position}, {first.concurrency} at once"
        out.print(place, markup=False)
        out.print(f"  both   ...{first.before}\n  A      {first.a}\n  B      {first.b}", markup=False)
