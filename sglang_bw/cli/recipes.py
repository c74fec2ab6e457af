"""``recipes``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sglang_bw.cli import completion
from sglang_bw.cli.console import err, out, print_json
from sglang_bw.errors import OutputError, RecipeError, UnknownRecipeError
from sglang_bw.recipes import lookup
from sglang_bw.recipes.review import review
from sglang_bw.recipes.schema import Recipe
from sglang_bw.recipes.values import ID


@click.group(short_help="List, show, check and write recipes.")
def recipes() -> None:
    """Recipes: one model with its draft, flags and environment, tied to engine versions and machines."""


@recipes.command("list")
@click.option("--json", "as_json", is_flag=True)
def list_recipes(as_json: bool) -> None:
    """List the bundled recipes."""
    found = [lookup.find(name) for name in lookup.catalogue()]
    if as_json:
        print_json([recipe.model_dump(mode="json") for recipe in found])
        return
    width = max(len(recipe.id) for recipe in found)
    for recipe in found:
        out.print(f"{recipe.id:{width}}  {recipe.title}  (sglang {recipe.engine.sglang or 'any'})", markup=False)


@recipes.command("show")
@click.argument("name", shell_complete=completion.recipes)
@click.option("--json", "as_json", is_flag=True)
def show_recipe(name: str, as_json: bool) -> None:
    """Print a recipe, as it is written; with --json, as it is understood."""
    recipe = lookup.find(name)
    if as_json:
        print_json(recipe.model_dump(mode="json"))
        return
    click.echo(lookup.catalogue().get(name, Path(name)).read_text(encoding="utf-8"), nl=False)


@recipes.command("check")
@click.argument("files", nargs=-1, required=True, metavar="FILE|ID...", shell_complete=completion.recipes)
@click.option("--json", "as_json", is_flag=True)
def check_recipes(files: tuple[str, ...], as_json: bool) -> None:
    """Check recipe files, or recipes by id; all findings of all files are printed.

    Flags are held against the argument parsers of every engine release in the recipe's range. Weights without a
    pinned revision are a warning.

    Exit code 31: a file breaks the schema, or has flags that its engine does not take. 30: none does, but one cannot
    be read.
    """
    broken: list[RecipeError | UnknownRecipeError] = []
    rows: list[dict[str, Any]] = []
    for file in files:
        try:
            recipe, warnings = _checked(file)
        except (RecipeError, UnknownRecipeError) as error:
            broken.append(error)
            rows.append({"file": file, "ok": False, "errors": error.message.splitlines(), "warnings": []})
            continue
        rows.append({"file": file, "ok": True, "id": recipe.id, "errors": [], "warnings": list(warnings)})
        if not as_json:
            out.print(f"{file}: ok ({recipe.id})", markup=False)
            for warning in warnings:
                out.print(f"  warning: {warning}", style="yellow", markup=False)
    if as_json:
        print_json(rows)
    if broken:
        first = next((error for error in broken if isinstance(error, RecipeError)), broken[0])
        raise type(first)("\n".join(error.message for error in broken), hint=first.hint)


def _checked(file: str) -> tuple[Recipe, tuple[str, ...]]:
    """Return a recipe that starts, and warnings about it."""
    # A file of any name is checked; what is none is more often a mistyped id.
    is_file = file not in lookup.catalogue() and file and Path(file).exists()
    recipe = lookup.read(Path(file)) if is_file else lookup.find(file)
    found = review(recipe)
    if found.errors:
        lines = [f"the recipe {file} does not start:", *(f"  {line}" for line in found.errors)]
        raise RecipeError("\n".join(lines), hint="`sglang-bw plan` shows what a launch would do.")
    return recipe, found.warnings


@recipes.command("new")
@click.argument("model", metavar="MODEL")
@click.option(
    "--draft", metavar="PATH|ID", help="The EAGLE-3 draft; without it the target's MTP layers, if it has any."
)
@click.option(
    "--gpus",
    metavar='8x"RTX PRO 6000"',
    help="The machine; the GPUs of this one when not given.",
    shell_complete=completion.machines,
)
@click.option("--context", type=click.IntRange(min=1), default=16384, show_default=True, metavar="TOKENS")
@click.option("--concurrency", type=click.IntRange(min=1), default=8, show_default=True, metavar="N")
@click.option("--id", "name", metavar="ID", help="Its id; made from the model's name when not given.")
@click.option("--fetch-headers", is_flag=True, help="Read configuration and weight headers from the hub, a few MB.")
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="File; printed when not given.")
@click.option("--force", is_flag=True, help="Replace the file; write a recipe that does not fit.")
@click.option("--json", "as_json", is_flag=True, help="The recipe as JSON on standard output.")
def new_recipe(
    model: str,
    draft: str | None,
    gpus: str | None,
    context: int,
    concurrency: int,
    name: str | None,
    fetch_headers: bool,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a recipe from a model's config.json and the machine. Nothing is loaded.

    Takes the fewest GPUs that hold the model and the traffic asked for.
    """
    from sglang_bw.cli.planning import Wish
    from sglang_bw.cli.proposal import propose
    from sglang_bw.recipes import writer

    if output and output.exists() and not force:
        raise OutputError(f"{output} exists", hint="Name another file with -o, or --force replaces it.")
    if name is not None and not ID.fullmatch(name):
        raise click.BadParameter(f"{name!r} is no id: lower case letters, digits and . _ - only.", param_hint="--id")
    wish = Wish(model, draft=draft, gpus=gpus, context=context, concurrency=concurrency, fetch=fetch_headers)
    recipe, notes = propose(wish, name, force=force)
    if as_json:
        print_json(recipe.model_dump(mode="json"))
    elif output is None:
        click.echo(writer.text(recipe), nl=False)
    if output:
        try:
            output.write_text(writer.text(recipe), encoding="utf-8")
        except OSError as error:
            raise OutputError(f"cannot write {output}: {error.strerror}", hint="Name another file with -o.") from error
        err.print(f"{output}: `sglang-bw plan {output}` and `sglang-bw serve {output}`", markup=False)
    for note in notes:
        err.print(f"note: {note}", markup=False)
