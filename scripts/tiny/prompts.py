"""Held-out documents and prompts: from frames that training never saw."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tiny.documents import Writer

_ORDER = ("story", "chat", "prose", "story", "letter", "chat", "story", "code", "chat", "story", "howto", "report")
_CHAT = ("hello", "story", "puzzle", "advice", "who", "story", "list", "code", "puzzle", "weather", "why", "story")


@dataclass(frozen=True)
class Prompt:
    """`messages` is set for a chat; `prompt` is then what the chat template makes of them."""

    id: str
    kind: str
    prompt: str
    messages: tuple[dict[str, str], ...] = ()


def heldout_documents(count: int, seed: int) -> list[str]:
    """Held-out documents without their end token, kinds mixed as in training."""
    writer, rng = Writer.held_out(), random.Random(f"held-out/{seed}")
    documents: list[str] = []
    while len(documents) < count:
        document = writer.document(rng)
        if len(document.encode()) > 24:
            documents.append(document)
    return documents


def heldout_prompts(count: int, seed: int) -> list[Prompt]:
    """Prompts of at most 200 bytes: the first words of held-out documents, and held-out questions as chats."""
    writer, rng = Writer.held_out(), random.Random(f"prompts/{seed}")
    return list(_prompts(count, writer, rng))


def _prompts(count: int, writer: Writer, rng: random.Random) -> Iterator[Prompt]:
    chats = 0
    for i in range(count):
        kind = _ORDER[i % len(_ORDER)]
        name = f"{kind}-{i:02d}"
        if kind == "chat":
            question = writer.turn_of(_CHAT[chats % len(_CHAT)], rng).question
            chats += 1
            yield Prompt(name, kind, f"user: {question}\nassistant: ", ({"role": "user", "content": question},))
        else:
            yield Prompt(name, kind, _beginning(writer.document_of(kind, rng), rng.randint(50, 130)))


def _beginning(document: str, length: int) -> str:
    """Take the first `length` characters, cut back to a whole word; a space or line break at the end is cut too."""
    length = min(length, len(document) * 2 // 3)
    return document[: max(document.rfind(" ", 0, length), document.rfind("\n", 0, length))].rstrip()
