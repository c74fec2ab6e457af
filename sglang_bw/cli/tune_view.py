"""What ``tune`` shows: progress while it searches, a table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.markup import escape
from rich.table import Table

from sglang_bw.cli.console import err, out, print_json, widen_for_file
from sglang_bw.experiment import space as spaces
from sglang_bw.experiment.space import Space
from sglang_bw.experiment.tune import Score, Tried
from sglang_bw.launch.startup import Phase, Startup


class TuneProgress:
    """Tells of blocks and rounds on one line of a terminal; elsewhere of rounds only."""

    def __init__(self) -> None:
        self._block = ""

    def block(self, name: str, round_number: int, concurrency: int, total: int) -> None:
        """Begin a block."""
        kind = "warm-up" if round_number < 0 else f"round {round_number + 1}"
        self._block = f"  {kind}, {name}, concurrency {concurrency}: {{}}/{total}"

    def answered(self, count: int) -> None:
        """Count answers."""
        if err.is_terminal:
            err.print(self._block.format(count), end="\r", markup=False)

    def round_over(self, rounds: int, ratios: Sequence[tuple[int, float, float]]) -> None:
        """Show where the ratios are."""
        found = ", ".join(f"{ratio:.3f} +-{half:.3f} at {concurrency}" for concurrency, ratio, half in ratios)
        if found:
            err.print(f"  round {rounds}: {found}", markup=False)


def say_start(name: str, _startup: Startup, begun: list[Phase]) -> None:
    """Show the start of an engine."""
    for phase in begun:
        err.print(f"  {name}: {phase.value}", markup=False)


def say_study(study: str, space: Space) -> None:
    """Show what begins."""
    err.print(f"study {study}: {space.size} combinations; Ctrl-C stops, the same command goes on", markup=False)


def say_stopped(trials: int) -> None:
    """Show that the user ended it."""
    err.print(f"stopped after {trials} trials; the same command goes on", markup=False)


def say_trial(one: Tried, count: int, most: int) -> None:
    """Show what came of a trial."""
    score = _score(one.score) if one.score else f"{one.result}: {one.why}"
    err.print(f"{count}/{most}  {spaces.says(one.choice)}: {score}", markup=False)


def print_plan(space: Space, refused: Mapping[str, str], *, as_json: bool) -> None:
    """Print what would be searched.

    :param refused: choices that the plan would not start, with the reason.
    """
    if as_json:
        settings = {setting.name: list(setting.values) for setting in space.settings}
        print_json({"settings": settings, "combinations": space.size, "refused": dict(refused)})
        return
    for setting in space.settings:
        out.print(f"{setting.name}: {', '.join(setting.values)}", markup=False)
    out.print(f"{space.size} combinations", markup=False)
    for choice, problem in refused.items():
        out.print(f"refused by the plan: {choice}: {problem.splitlines()[-1].strip()}", markup=False)


def print_result(study: str, tried: Sequence[Tried], winner: Tried | None, *, as_json: bool) -> None:
    """Print everything that was tried, the best first."""
    if as_json:
        print_json(
            {"study": study, "best": asdict(winner) if winner else None, "tried": [asdict(one) for one in tried]}
        )
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("settings", "speed over the recipe", "result", "why", "entry"):
        table.add_column(column, overflow="fold", no_wrap=column == "entry")  # an id is for copying
    for one in tried:
        score = _score(one.score) if one.score else ""
        why = "" if one.score else one.why[:160]
        table.add_row(*map(escape, (spaces.says(one.choice), score, one.result, why, one.entry)))
    if not tried:
        out.print("nothing was tried", markup=False)
        return
    widen_for_file()
    out.print(table)
    words = (
        f"best: {spaces.says(winner.choice)}" if winner else "nothing is faster than the recipe as it is beyond chance"
    )
    out.print(words, markup=False)


def _score(score: Score) -> str:
    return f"{score.value:.3f} [{score.low:.3f}, {score.high:.3f}]"
