"""Whole documents from the grammar: stories, prose, letters, lists, puzzles, code and chats.

Training documents use `text/train.txt` and the training snippets; held-out documents use `text/heldout.txt` and the
other snippets. Both share only words (`text/lexicon.txt`) and the facts of `puzzles.py`.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

from tiny import puzzles, snippets
from tiny.template import Grammar, Memory, articles

TEXT = Path(__file__).parent / "text"
_WORD = re.compile(r"[^\W\d_]+")
EOS = "</s>"
"""Ends a document and every assistant turn; one token."""


@dataclass(frozen=True)
class Turn:
    """A question and its answer, both without role names."""

    question: str
    answer: str


@dataclass(frozen=True)
class Writer:
    """Writes documents of one split."""

    grammar: Grammar
    heldout: bool
    words: tuple[str, ...] = ()
    """What a slip may put in the place of a word; none: no slips."""

    @classmethod
    def training(cls) -> Writer:
        """Make the writer of training text."""
        grammar = Grammar.load(TEXT / "lexicon.txt", TEXT / "train.txt")
        common = Grammar.load(TEXT / "common.txt").rules["common"].alternatives
        return cls(grammar, heldout=False, words=tuple(sorted({*common, *grammar.words()})))

    @classmethod
    def held_out(cls) -> Writer:
        """Make the writer of held-out text: other frames, no slips."""
        return cls(Grammar.load(TEXT / "lexicon.txt", TEXT / "heldout.txt"), heldout=True)

    def document(self, rng: random.Random) -> str:
        """Write one document, without its final EOS."""
        kind = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        return self.document_of(kind, rng)

    def document_of(self, kind: str, rng: random.Random) -> str:
        """Write a document of a kind: a key of `_WEIGHTS`."""
        memory = self._memory(rng)
        if kind == "puzzles":
            return articles(self._puzzles(rng))
        if kind == "code":
            return self._code(rng, memory)
        if kind == "chat":
            return self._chat(rng)
        text = articles(self.grammar.expand(kind, memory))
        if self.words and rng.random() < 0.45:
            return self._with_slips(text, rng.choice((0.04, 0.1, 0.2)), rng)
        return text

    def _with_slips(self, text: str, share: float, rng: random.Random) -> str:
        """Replace some words by any known word: a reader of such text stays calm when a sentence surprises it."""

        def slip(match: re.Match[str]) -> str:
            word = match[0]
            if rng.random() >= share:
                return word
            other = rng.choice(self.words)
            return other[:1].upper() + other[1:] if word[0].isupper() else other

        return _WORD.sub(slip, text)

    def turn(self, rng: random.Random) -> Turn:
        """Write one question and its answer."""
        return self.turn_of(rng.choices(list(_TURNS), list(_TURNS.values()))[0], rng)

    def turn_of(self, kind: str, rng: random.Random) -> Turn:
        """Write a question and its answer of a kind: a key of `_TURNS`."""
        memory = self._memory(rng)
        if kind == "puzzle":
            name = rng.choice(sorted(puzzles.KINDS))
            memory.variables.update(puzzles.KINDS[name](rng))
            return self._ask(f"{name}_q", f"{name}_a", memory)
        if kind == "reverse":
            memory.variables.update(puzzles.reverse(rng))
            return self._ask("reverse_q", "reverse_a", memory)
        if kind == "code":
            snippet = self._snippet(rng)
            memory.variables["task"] = snippet.task
            question = self.grammar.expand("code_q", memory)
            explain = "\n" + self.grammar.expand("explain", memory) if rng.random() < 0.4 else ""
            return Turn(articles(question), f"```python\n{snippet.source}```{explain}")
        if kind in ("list", "advice"):
            rule = self.grammar.rules[f"{kind}_q"]
            i = rng.randrange(len(rule.alternatives))
            question = self.grammar.fill(rule.alternatives[i], memory)
            # As many answer rules as there are subjects: question i is about subject i, modulo their number.
            i %= sum(name.startswith(f"{kind}_a") for name in self.grammar.rules)
            return Turn(articles(question), articles(self.grammar.expand(f"{kind}_a{i}", memory)))
        return self._ask(f"{kind}_q", f"{kind}_a", memory)

    def _ask(self, question: str, answer: str, memory: Memory) -> Turn:
        return Turn(articles(self.grammar.expand(question, memory)), articles(self.grammar.expand(answer, memory)))

    def _memory(self, rng: random.Random) -> Memory:
        memory = Memory(rng)
        girl = rng.random() < 0.5
        hero = self.grammar.expand("girl" if girl else "boy", memory)
        pal = self.grammar.expand("girl" if rng.random() < 0.5 else "boy", memory)
        he, his, him = ("she", "her", "her") if girl else ("he", "his", "him")
        memory.variables.update(hero=hero, pal=pal, he=he, his=his, him=him, n1=str(rng.randint(2, 28)))
        for variable, rule in _CAST.items():
            memory.variables[variable] = self.grammar.expand(rule, memory)
        return memory

    def _snippet(self, rng: random.Random) -> snippets.Snippet:
        return snippets.heldout_snippet(rng) if self.heldout else snippets.training_snippet(rng)

    def _puzzles(self, rng: random.Random) -> str:
        lines = []
        for _ in range(rng.randint(1, 5)):
            memory = self._memory(rng)
            name = rng.choice(sorted(puzzles.KINDS))
            memory.variables.update(puzzles.KINDS[name](rng))
            lines.append(self.grammar.expand(f"{name}_word", memory))
        return rng.choice((" ", "\n")).join(lines)

    def _code(self, rng: random.Random, memory: Memory) -> str:
        parts = []
        for _ in range(rng.randint(1, 3)):
            snippet = self._snippet(rng)
            parts.append(f"# {snippet.task}\n{snippet.source}" if rng.random() < 0.6 else snippet.source)
        return "\n".join(parts)

    def _chat(self, rng: random.Random) -> str:
        turns = [self.turn(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
        if self.words and rng.random() < 0.3:
            turns = [Turn(self._with_slips(t.question, 0.15, rng), t.answer) for t in turns]
        head = f"system: {self.grammar.expand('system', self._memory(rng))}\n" if rng.random() < 0.15 else ""
        return head + f"{EOS}\n".join(f"user: {t.question}\nassistant: {t.answer}" for t in turns)


_CAST = {"item": "thing", "home": "place", "goal": "place", "beast": "animal", "snack": "food", "job": "trade"}
"""What a document keeps coming back to: variable and the rule it is drawn from."""
_WEIGHTS = {
    "story": 30,
    "prose": 22,
    "letter": 5,
    "diary": 4,
    "report": 4,
    "howto": 4,
    "listing": 4,
    "puzzles": 7,
    "code": 5,
    "chat": 25,
}
_TURNS = {
    "puzzle": 40,
    "hello": 8,
    "who": 5,
    "thanks": 4,
    "story": 14,
    "list": 8,
    "advice": 8,
    "weather": 4,
    "why": 6,
    "code": 8,
    "reverse": 3,
}
