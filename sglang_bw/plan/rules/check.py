"""Hold a launch against the rules."""

from __future__ import annotations

import fnmatch
import operator
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml
from packaging.specifiers import SpecifierSet
from pydantic import BaseModel, ConfigDict, Field, field_validator

from sglang_bw.plan.rules.facts import Facts

Severity = Literal["error", "warning", "note"]
_COMPARISON = re.compile(r"(?P<sign><=|>=|<|>)\s*(?P<number>-?\d+(\.\d+)?)")
_SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
Condition = bool | str | int | float | list[str | int | float]


class Rule(BaseModel):
    """Something that is known not to run, or to harm; ``known.yaml`` explains the keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    when: dict[str, Condition] = Field(min_length=1)
    unless: dict[str, Condition] = Field(default_factory=dict)
    engine: str = ""
    severity: Literal["error", "warning"]
    reason: str = Field(min_length=1)
    fix: str = Field(min_length=1)
    reference: str = Field(min_length=1)
    fixed_by: str = ""

    @field_validator("engine")
    @classmethod
    def _is_specifier(cls, text: str) -> str:
        SpecifierSet(text)
        return text

    def holds(self, facts: Facts) -> bool:
        """Tell whether the rule is about this launch."""
        if facts.engine and not SpecifierSet(self.engine).contains(facts.engine, prereleases=True):
            return False
        if self.engine and not facts.engine:
            return False
        return all(_holds(facts.get(name), wanted) for name, wanted in self.when.items()) and not any(
            _holds(facts.get(name), wanted) for name, wanted in self.unless.items()
        )


@dataclass(frozen=True)
class Finding:
    """A rule that speaks about a launch.

    :ivar severity: ``note`` when a patch of the engine takes care of it.
    """

    rule: str
    severity: Severity
    reason: str
    fix: str
    reference: str

    def as_json(self) -> dict[str, str]:
        """Return the fields."""
        return dict(vars(self))


@cache
def variables() -> frozenset[str]:
    """Return the environment variables that some rule names."""
    names = {name for rule in rules() for name in {**rule.when, **rule.unless}}
    return frozenset(name.removeprefix("env.") for name in names if name.startswith("env."))


def check(facts: Facts) -> tuple[Finding, ...]:
    """Return every rule that speaks about a launch, errors first."""
    found = [_finding(rule, facts) for rule in rules() if rule.holds(facts)]
    order = {"error": 0, "warning": 1, "note": 2}
    return tuple(sorted(found, key=lambda finding: order[finding.severity]))


def of_change(before: Facts, after: Facts) -> tuple[Finding, ...]:
    """Return the rules that speak about a change of flags: new ones, and those about a flag that was changed."""
    names = before.flags.keys() | after.flags.keys()
    changed = {f"flag.{name}" for name in names if before.flags.get(name) != after.flags.get(name)}
    known = {finding.rule for finding in check(before)}
    about = {rule.id for rule in rules() if changed & rule.when.keys()}
    return tuple(finding for finding in check(after) if finding.rule not in known or finding.rule in about)


def _finding(rule: Rule, facts: Facts) -> Finding:
    topic = re.sub(r"^\d{4}-", "", rule.fixed_by)
    if topic and topic in facts.patches:
        return Finding(rule.id, "note", rule.reason, f"the engine's patch {topic} takes care of it", rule.reference)
    return Finding(rule.id, rule.severity, rule.reason, rule.fix, rule.reference)


@cache
def rules() -> tuple[Rule, ...]:
    """Return all rules, in the order of the file."""
    text = (resources.files("sglang_bw.plan.rules") / "known.yaml").read_text(encoding="utf-8")
    return tuple(Rule.model_validate(entry) for entry in yaml.safe_load(text))


def _holds(values: list[Any], wanted: Condition) -> bool:
    if isinstance(wanted, bool):
        return bool(values) is wanted
    options = wanted if isinstance(wanted, list) else [wanted]
    return any(_is(value, option) for value in values for option in options)


def _is(value: Any, option: str | float) -> bool:
    if isinstance(option, str) and (match := _COMPARISON.fullmatch(option)):
        try:
            return bool(_SIGNS[match["sign"]](float(value), float(match["number"])))
        except (TypeError, ValueError):
            return False
    return fnmatch.fnmatchcase(str(value), str(option))
