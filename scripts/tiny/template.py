"""A small phrase grammar: rules with alternatives, per-document memory, and no repeats within a document."""

from __future__ import annotations

import random
import re
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path

_SLOT = re.compile(r"\{(\^?)(?:(\w+):)?(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])")
_NOT_AN = re.compile(r"\b([Aa])n (?=(?:one|use|uni|eu)[a-z]*\b)")


@dataclass(frozen=True)
class Rule:
    """One rule. A document uses no alternative twice until all were used, so greedy text has no reason to loop."""

    name: str
    alternatives: tuple[str, ...]


@dataclass
class Memory:
    """What one document remembers: variables and the alternatives that it used up."""

    rng: random.Random
    variables: dict[str, str] = field(default_factory=dict)
    used: dict[str, set[int]] = field(default_factory=dict)


class Grammar:
    """Rules by name. Several files may be joined; a rule defined twice is an error."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules: dict[str, Rule] = {}
        for rule in rules:
            if rule.name in self.rules:
                raise ValueError(f"rule [{rule.name}] is defined twice")
            self.rules[rule.name] = rule

    @classmethod
    def load(cls, *paths: Path) -> Grammar:
        """Join the rules of several files."""
        return cls(rule for path in paths for rule in read_rules(path))

    def words(self) -> set[str]:
        """Every word that stands in an alternative, lower case unless it is a name."""
        found: set[str] = set()
        for rule in self.rules.values():
            for text in rule.alternatives:
                found.update(re.findall(r"[^\W\d_]{2,}", _SLOT.sub(" ", text)))
        return {word for word in found if word.lower() == word or word.lower() not in found}

    def expand(self, name: str, memory: Memory) -> str:
        """Expand one rule; KeyError when neither a rule nor a variable has that name."""
        rule = self.rules[name]
        return self.fill(rule.alternatives[self._choose(rule, memory)], memory)

    def fill(self, template: str, memory: Memory) -> str:
        """Expand the slots of one template."""

        def slot(match: re.Match[str]) -> str:
            upper, variable, name = match.groups()
            if variable is not None:
                if variable not in memory.variables:
                    memory.variables[variable] = self.expand(name, memory)
                text = memory.variables[variable]
            elif name in memory.variables:
                text = memory.variables[name]
            else:
                text = self.expand(name, memory)
            return text[:1].upper() + text[1:] if upper else text

        return _SLOT.sub(slot, template)

    @staticmethod
    def _choose(rule: Rule, memory: Memory) -> int:
        """Choose an unused alternative, earlier ones more often (1 / (8 + position)): real words are no equals."""
        total = len(rule.alternatives)
        used = memory.used.setdefault(rule.name, set())
        if len(used) == total:
            used.clear()
        bounds = _bounds(total)
        while (choice := bisect(bounds, memory.rng.random() * bounds[-1])) in used:
            pass
        used.add(choice)
        return choice


def articles(text: str) -> str:
    """Put "an" before vowels: templates say "a" everywhere."""
    return _NOT_AN.sub(r"\1 ", _ARTICLE.sub(r"\1n ", text))


@cache
def _bounds(total: int) -> tuple[float, ...]:
    return tuple(accumulate(1 / (8 + i) for i in range(total)))


def read_rules(path: Path) -> list[Rule]:
    r"""Read a grammar file: `[name]`, then alternatives, `\n` standing for a line break."""
    found: list[tuple[str, list[str]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        header = re.fullmatch(r"\[(\w+)\]", line)
        if header:
            found.append((header[1], []))
        elif not found:
            raise ValueError(f"{path.name}: an alternative before the first rule: {line!r}")
        else:
            found[-1][1].extend(part.replace("\\n", "\n") for part in line.split(" | "))
    return [Rule(name, tuple(alternatives)) for name, alternatives in found]
