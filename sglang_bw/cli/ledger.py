"""``ledger``."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from sglang_bw.cli import completion, ledger_view
from sglang_bw.cli.console import clean, err, out, print_json, widen_for_file
from sglang_bw.errors import LedgerError, OutputError
from sglang_bw.host import fingerprint
from sglang_bw.ledger import exchange, reference, store
from sglang_bw.ledger.entry import RESULTS, Entry, Result, new_id
from sglang_bw.ledger.failure import FailureClass
from sglang_bw.ledger.query import Query
from sglang_bw.ledger.record import RunRecord
from sglang_bw.ledger.runfile import read
from sglang_bw.ledger.store import Ledger


class _Text(click.ParamType[str]):
    """Text that the ledger can hold: what is no UTF-8 on the command line is replaced, and control characters are."""

    name = "text"

    def convert(self, value: Any, _param: click.Parameter | None, _ctx: click.Context | None) -> str:
        return clean(str(value))


_TEXT = _Text()
_NEWEST = 30
_as_json = click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")


@click.group(short_help="What was tried, what came of it, and the report.")
@click.option(
    "--ledger",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar=store.PATH_VARIABLE,
    help="The file; without it, the one below your state directory.",
)
@click.pass_context
def ledger(ctx: click.Context, path: Path | None) -> None:
    """Every start, probe, comparison and trial with its outcome; entries are added, never changed."""
    ctx.obj = path


@ledger.command("list")
@click.option("--kind", type=click.Choice(["start", "probe", "ab", "trial"]))
@click.option("--recipe", type=_TEXT, metavar="ID")
@click.option("--result", type=click.Choice(RESULTS))
@click.option("--failure", type=click.Choice([kind.value for kind in FailureClass]))
@click.option("--study", type=_TEXT, metavar="NAME", help="Trials of one tuning.")
@click.option("--since", type=click.DateTime(), help="From this day on (UTC).")
@click.option("--reported", is_flag=True, help="What others reported, instead of what was tried here.")
@click.option("--all", "everything", is_flag=True, help=f"All, not only the newest {_NEWEST}.")
@_as_json
@click.pass_obj
def list_entries(
    path: Path | None,
    kind: str | None,
    recipe: str | None,
    result: str | None,
    failure: str | None,
    study: str | None,
    since: datetime | None,
    reported: bool,
    everything: bool,
    as_json: bool,
) -> None:
    """List entries, the oldest first."""
    since = since.replace(tzinfo=UTC) if since else None
    query = Query(
        kind=kind, recipe=recipe, result=result, failure=failure, study=study, since=since,
        origin="reported" if reported else "here", newest=None if everything or as_json or reported else _NEWEST,
    )  # fmt: skip
    with Ledger(path) as book:
        found = [*filter(query.holds, reference.entries()), *book.select(query)]
    if as_json:
        print_json([entry.model_dump(mode="json", exclude_defaults=True) for entry in found])
    elif found:
        widen_for_file()
        out.print(ledger_view.table(found))
    else:
        more = "" if reported else "; `sglang-bw ledger list --reported` shows what others reported"
        err.print(f"no entries{more}", markup=False)


@ledger.command()
@click.argument("name", metavar="ID", type=_TEXT)
@_as_json
@click.pass_obj
def show(path: Path | None, name: str, as_json: bool) -> None:
    """Show one entry with its numbers, log lines and notes; the first characters of its id are enough."""
    entry = _find(path, name)
    if as_json:
        print_json(entry.model_dump(mode="json", exclude_defaults=True))
        return
    ledger_view.show(entry)


@ledger.command()
@click.argument("name", metavar="ID", type=_TEXT)
@click.argument("text", type=_TEXT)
@click.pass_obj
def note(path: Path | None, name: str, text: str) -> None:
    """Add a remark to an entry."""
    with Ledger(path) as book:
        entry = book.note(name, text)
    err.print(f"{entry.id}: {len(entry.notes)} notes", markup=False)


@ledger.command()
@click.option("--kind", type=click.Choice(["start", "probe", "ab", "trial"]), default="start", show_default=True)
@click.option("--recipe", type=_TEXT, metavar="ID")
@click.option("--hypothesis", type=_TEXT, default="", help="What was expected.")
@click.option("--result", type=click.Choice(["ok", "failed", "faster", "slower", "undecided"]), required=True)
@click.option("--failure", type=click.Choice([kind.value for kind in FailureClass]))
@click.option("--summary", type=_TEXT, required=True, help="What happened, in a sentence.")
@click.option("--evidence", type=_TEXT, multiple=True, help="A log line that proves it; more than once.")
@click.option("--fix", type=_TEXT, default="", help="What helped.")
@click.option("--source", type=_TEXT, default="", help="Somebody else's result: who, and where.")
@click.pass_obj
def add(
    path: Path | None,
    kind: str,
    recipe: str | None,
    hypothesis: str,
    result: Result,
    failure: str | None,
    summary: str,
    evidence: tuple[str, ...],
    fix: str,
    source: str,
) -> None:
    """Add an entry by hand: something tried without this tool, or read somewhere."""
    if failure and result != "failed":
        raise click.UsageError(f"--failure {failure} says how it failed, and --result {result} that it did not.")
    if not summary.strip():
        raise click.UsageError("--summary says what happened, and is empty.")
    now = datetime.now(UTC)
    entry = Entry.model_validate(
        {
            "id": new_id(now), "kind": kind, "at": now, "recipe": recipe, "hypothesis": hypothesis, "result": result,
            "failure": failure, "summary": summary, "evidence": evidence, "fix": fix, "source": source,
            "origin": "reported" if source else "here",
            "host": None if source else fingerprint.look(),
        }
    )  # fmt: skip
    with Ledger(path) as book:
        book.add(entry)
    out.print(entry.id, markup=False)


@ledger.command()
@click.argument("names", metavar="[ID]...", nargs=-1, type=_TEXT)
@click.option("--markdown", is_flag=True, help="A table to read, instead of JSON that can be imported.")
@click.option("--reported", is_flag=True, help="What others reported, as well.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="A file; standard output without."
)
@click.pass_obj
def export(path: Path | None, names: tuple[str, ...], markdown: bool, reported: bool, output: Path | None) -> None:
    """Write entries, all of them or those named, as JSON or markdown."""
    with Ledger(path) as book:
        found = [book.find(name) for name in names] if names else book.select()
        runs = [] if markdown else [run for run in map(book.run, found) if run]
    if reported:
        found = [*reference.entries(), *found]
    text = clean(exchange.to_markdown(found)) if markdown else exchange.to_json(found, runs)
    if output is None:
        click.echo(text, nl=not text.endswith("\n"))
        return
    _write(output, text)
    err.print(f"{output}: {len(found)} entries", markup=False)


@ledger.command("import")
@click.argument("files", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.pass_obj
def import_files(path: Path | None, files: tuple[Path, ...]) -> None:
    """Take in exports of other ledgers and run files; what is there already stays as it is."""
    with Ledger(path) as book:
        for file in files:
            count, new = exchange.take_in(book, file)
            err.print(f"{file}: {count} entries, {new} of them new", markup=False)


@ledger.command()
@click.argument("names", metavar="[RUN]...", nargs=-1, type=_TEXT)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), default="report.html", show_default=True
)
@click.pass_obj
def report(path: Path | None, names: tuple[str, ...], output: Path) -> None:
    """Write one HTML page about comparisons: ids of the ledger or run files; the newest one without any."""
    from sglang_bw.ledger.report import page

    with Ledger(path) as book:
        runs = [_run(book, name) for name in names] or [_newest_run(book)]
    with err.status("drawing") if err.is_terminal else nullcontext():
        text = page.render(runs)
    _write(output, text)
    err.print(f"{output}: {len(runs)} runs, {len(text.encode()) / 1024:.0f} KiB", markup=False)


@ledger.command()
@click.argument("name", metavar="RECIPE|FILE.yaml|MODEL", shell_complete=completion.recipes)
@_as_json
@click.pass_obj
def why(path: Path | None, name: str, as_json: bool) -> None:
    """Say what is known to fail with a recipe: here, elsewhere, and as others reported it."""
    from sglang_bw.cli.launches import described

    launch = described(name)
    with Ledger(path) as book:
        tried = [entry for entry in book.select(Query(recipe=launch.recipe)) if entry.failed or entry.failure]
    here = [entry for entry in tried if entry.host and entry.host.fingerprint == launch.host and entry.origin == "here"]
    elsewhere = [entry for entry in tried if entry not in here]
    reported = reference.matching(launch.reference)
    if as_json:
        groups = {"here": here, "elsewhere": elsewhere, "reported": reported}
        print_json(
            {key: [one.model_dump(mode="json", exclude_defaults=True) for one in g] for key, g in groups.items()}
        )
        return
    ledger_view.group(f"{launch.recipe} on this host", here, none="nothing has failed here yet")
    if elsewhere:
        ledger_view.group("on other hosts", elsewhere)
    ledger_view.group(
        "reported by others about launches like this one (nobody here has seen it)", reported, none="nothing"
    )


def _find(path: Path | None, name: str) -> Entry:
    known = {entry.id: entry for entry in reference.entries()}
    if name in known:
        return known[name]
    with Ledger(path) as book:
        return book.find(name)


def _run(book: Ledger, name: str) -> RunRecord:
    if Path(name).is_file():
        return read(Path(name))
    entry = book.find(name)
    run = book.run(entry)
    if run is None:
        raise LedgerError(
            f"{entry.id} is a {entry.kind}, and no comparison", hint="`sglang-bw ledger list --kind ab` shows those."
        )
    return run


def _newest_run(book: Ledger) -> RunRecord:
    for entry in reversed(book.select(Query(kind="ab", newest=_NEWEST))):
        if run := book.run(entry):
            return run
    raise LedgerError("the ledger has no comparison yet", hint="`sglang-bw ab RECIPE --no-spec` makes one.")


def _write(output: Path, text: str) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror}", hint="Name another file: -o FILE.") from error
