"""The page: verdicts, charts with their numbers as tables, differences, versions, and the raw data."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sglang_bw.ledger.record import Outcome, Ratio, RunRecord
from sglang_bw.ledger.report import charts, policy, tables
from sglang_bw.ledger.report.drawing import draw
from sglang_bw.ledger.report.tables import Cells, Table


@dataclass(frozen=True)
class Section:
    """A part of a run's page: a drawing, a table, or both.

    :ivar folded: whether the table waits behind the drawing.
    """

    key: str
    title: str
    says: str
    drawing: Markup | None = None
    table: Table | None = None

    @property
    def folded(self) -> bool:
        """Tell whether the table only repeats the drawing."""
        return self.drawing is not None


@dataclass(frozen=True)
class RunView:
    """A run as the page shows it."""

    number: int
    run: RunRecord
    verdicts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    data: str


def render(runs: Sequence[RunRecord]) -> str:
    """Return the page as HTML. Every text of a run is escaped."""
    environment = Environment(
        loader=PackageLoader("sglang_bw.ledger.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    views = [_view(number, run) for number, run in enumerate(runs, 1)]
    return environment.get_template("page.html.j2").render(views=views, style=_style(environment))


def _style(environment: Environment) -> Markup:
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, "page.css")[0])


def _view(number: int, run: RunRecord) -> RunView:
    lines = [
        run.model_copy(update={"blocks": (), "outcome": None}),
        *run.blocks,
        *([run.outcome] if run.outcome else []),
    ]
    text = "\n".join(line.model_dump_json() for line in lines) + "\n"
    data = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return RunView(number, run, tuple(_verdicts(run)), tuple(_sections(run)), data)


def _verdicts(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Give kind and sentence, the most important first."""
    outcome = run.outcome
    if run.simulated:
        yield "warn", "Acceptance was simulated: these are no real speeds."
    if outcome is None:
        yield "bad", f"The run was ended from outside after {len(run.blocks)} blocks; there is no verdict."
        return
    if outcome.failure:
        yield "bad", f"The run ended early ({outcome.failure}): {outcome.failure_text or 'no more is known'}"
    if not outcome.valid:
        yield "bad", "The numbers must not be used; the warnings say why."
    for one in outcome.ratios:
        kind = {"faster": "good", "slower": "bad"}.get(one.verdict, "plain")
        yield kind, f"{_sentence(one)} At a concurrency of {one.concurrency}: {_ratio(one)}, {one.rounds} rounds."
    for warning in outcome.warnings:
        yield "warn", warning


def _sentence(ratio: Ratio) -> str:
    if ratio.verdict == "undecided":
        return "Undecided: the interval contains 1."
    return f"B is {ratio.verdict} than A."


def _sections(run: RunRecord) -> Iterator[Section]:
    if outcome := run.outcome:
        yield from _speeds(outcome)
        yield from _acceptance(outcome)
    for number, (title, boxes) in enumerate(charts.latencies(run), 1):
        yield Section(
            f"latency-{number}", title.capitalize(), "Every request; the box holds the middle half.", draw(boxes)
        )
    if outcome and outcome.ratios:
        yield Section("numbers", "All numbers", "Quantiles are 0.5, 0.9 and 0.99.", table=tables.numbers(outcome))
    yield _memory(run)
    if spec := charts.timeline(run):
        yield Section("timeline", "In time", _timeline_says(run), draw(spec), tables.switches(run))
    if outcome and outcome.outputs:
        yield _outputs(outcome)
    yield Section("difference", "Configuration that differs", "", table=tables.difference(run))
    yield Section("versions", "Versions and patches", "", table=tables.versions(run))


def _speeds(outcome: Outcome) -> Iterator[Section]:
    rows: tuple[Cells, ...]
    if spec := charts.ratios(outcome):
        rows = tuple(
            (
                str(one.concurrency),
                f"{one.value:.4f}",
                f"{one.low:.4f}",
                f"{one.high:.4f}",
                one.verdict,
                f"{one.drift:.3f}",
            )
            for one in outcome.ratios
        )
        table = Table(("concurrency", "ratio", "low", "high", "verdict", "drift of the baseline"), rows)
        yield Section("ratio", "Speed of B over A", "Paired over prompts and rounds.", draw(spec), table)
    if spec := charts.throughput(outcome):
        rows = tuple(
            (
                str(one.concurrency),
                f"{one.a.tok_s:.1f}",
                f"{one.b.tok_s:.1f}",
                f"{one.a.tok_s_user:.1f}",
                f"{one.b.tok_s_user:.1f}",
            )
            for one in outcome.ratios
        )
        table = Table(("concurrency", "A, tok/s", "B, tok/s", "A, tok/s of a user", "B, tok/s of a user"), rows)
        yield Section("throughput", "Throughput", "Output tokens per second of all requests.", draw(spec), table)


def _acceptance(outcome: Outcome) -> Iterator[Section]:
    rows: tuple[Cells, ...]
    if spec := charts.accept_lengths(outcome):
        rows = tuple(
            (str(one.concurrency), tables.number(one.a.accept_length, 3), tables.number(one.b.accept_length, 3))
            for one in outcome.ratios
        )
        says = "Tokens that a verify pass emits, the bonus token included."
        yield Section("accept", "Accept length", says, draw(spec), Table(("concurrency", "A, mean", "B, mean"), rows))
    if spec := charts.round_cost(outcome):
        rows = tuple((str(one.concurrency), tables.number(one.round_cost, 3)) for one in outcome.ratios)
        says = "A speculative round in plain decode steps. Speculation pays where the accept length is above it."
        yield Section("cost", "Cost of a round", says, draw(spec), Table(("concurrency", "cost of a round"), rows))


def _memory(run: RunRecord) -> Section:
    used = {
        arm.name: max((b.kv_use for b in run.blocks if b.arm == arm.name and b.kv_use is not None), default=None)
        for arm in run.arms
    }
    rows: list[Cells] = [
        ("KV pool, tokens", *(f"{arm.kv_tokens:,}" if arm.kv_tokens else "-" for arm in run.arms)),
        ("largest share in use", *(tables.percent(used[arm.name]) for arm in run.arms)),
    ]
    keys = ("mem_fraction_static", "max_running_requests", "chunked_prefill_size", "kv_cache_dtype", "context_length")
    rows += [
        (key, *(tables.text(arm.config.get(key)) for arm in run.arms))
        for key in keys
        if any(key in arm.config for arm in run.arms)
    ]
    parts = dict.fromkeys(part for arm in run.arms for part in arm.memory)
    rows += [(f"{part}, GB", *(tables.number(arm.memory.get(part), 2) for arm in run.arms)) for part in parts]
    drawn = charts.memory(run)
    table = Table(("", "A", "B"), tuple(rows))
    return Section(
        "memory",
        "Memory",
        "As the servers report it: of one GPU, or of the machine on a CPU.",
        draw(drawn) if drawn else None,
        table,
    )


def _timeline_says(run: RunRecord) -> str:
    seen = sum(one.count for one in policy.switches(run))
    switched = f" Dashed: an adaptive policy changed its draft steps, {seen} times." if seen else ""
    return f"Every block in the order in which it ran.{switched}"


def _outputs(outcome: Outcome) -> Section:
    compared = outcome.outputs
    assert compared is not None
    says = (
        f"{compared.compared} answers compared, {compared.different} differ; "
        f"{compared.unsteady} of A's differ from its own first."
    )
    if (first := compared.first) is None:
        return Section("outputs", "Outputs", says)
    rows = (
        ("prompt", first.prompt),
        ("from", f"{first.unit} {first.position}, concurrency {first.concurrency}"),
        ("before", first.before),
        ("A goes on", first.a),
        ("B goes on", first.b),
    )
    return Section("outputs", "Outputs", says, table=Table(("first difference", ""), rows))


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
