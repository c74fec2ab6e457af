"""What a user would try next, held against the rules: nothing is offered that is known not to run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sglang_bw.plan.memory import Alternative
from sglang_bw.plan.rules.check import of_change
from sglang_bw.plan.rules.facts import Facts
from sglang_bw.recipes import flags


def allowed(others: Iterable[Alternative], facts: Facts) -> tuple[Alternative, ...]:
    """Return the alternatives that no rule forbids; those that one warns of come last and name it."""
    kept = []
    for other in others:
        found = of_change(facts, _changed(facts, other))
        if not any(finding.severity == "error" for finding in found):
            warned = tuple(finding.rule for finding in found if finding.severity == "warning")
            kept.append(replace(other, warned=warned))
    return tuple(sorted(kept, key=lambda other: bool(other.warned)))


def _changed(facts: Facts, other: Alternative) -> Facts:
    if other.plain:
        return facts.without_speculation()
    return facts.with_flags(flags.parse(other.flags.split()))
