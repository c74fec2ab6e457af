"""Hunks whose file or function is not there any more, and the place where its content went."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from sglang_bw.fork.rebase.evidence import Hunk, Versions
from sglang_bw.fork.rebase.outcome import HunkWord
from sglang_bw.fork.rebase.search import Tree
from sglang_bw.fork.rebase.units import Lines, every_thing, parse, units


def with_loss(hunk: Hunk, versions: Versions, missing: Container[str], tree: Tree) -> Hunk:
    """Mark a hunk whose file (one of ``missing``) or function the new release does not have."""
    report = hunk.report
    if report.word is not HunkWord.APPLIED or not (report.path in missing or _lacks(hunk, versions)):
        return hunk
    proof = ""
    if not hunk.is_support:
        text = _old_text(hunk, versions)
        proof = tree.definition(versions.path, report.where, text) or tree.nearest(text)
    says = f"upstream has no {versions.there if report.path in missing else report.where} any more"
    return replace(hunk, report=report.model_copy(update={"word": HunkWord.GONE, "proof": proof, "says": says}))


def _old_text(hunk: Hunk, versions: Versions) -> Lines:
    """Return the function or member that a hunk edits, as it was, else the lines of the hunk."""
    old = units(versions.path, versions.old)
    return next((unit.text for unit in old if unit.key == hunk.report.where), hunk.removed or hunk.context)


def _lacks(hunk: Hunk, versions: Versions) -> bool:
    """Whether a hunk edits a function or class that the new file does not have."""
    where = hunk.report.where
    if not where or versions.new is None or parse(versions.there, versions.new) is None:
        return False
    there = {thing.name for thing in every_thing(versions.there, versions.new)}
    had = {thing.name for thing in every_thing(versions.path, versions.old)}
    # A member that the patch adds has no place when its class is gone.
    outer = where.rpartition(".")[0] if where not in had else where
    return bool(outer) and outer in had and outer not in there
