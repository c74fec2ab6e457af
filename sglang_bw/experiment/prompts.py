"""Prompt sets: those that come with the tool, and any JSONL in the ShareGPT or OpenAI form."""

from __future__ import annotations

import hashlib
import json
import random
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from sglang_bw import models
from sglang_bw.errors import PromptsError

RANDOM = "random"
_RANDOM_LENGTH = 128
# Text in natural languages and code keeps to one or two scripts; decoded random tokens mix everything a vocabulary has.
_SCRIPTS_OF_NOISE = 4
_SURROGATE = re.compile("[\ud800-\udfff]")  # json.loads joins the pairs, so what is left is a half
_EAST_ASIAN = {"HIRAGANA", "KATAKANA", "HANGUL", "FULLWIDTH", "HALFWIDTH", "BOPOMOFO"}
_FORMS = (
    "Known forms, one object a line: {'messages': [...]}, {'prompt': '...'}, {'conversations': [...]} (ShareGPT), "
    "{'body': {...}} (OpenAI batch)."
)


@dataclass(frozen=True)
class Prompt:
    """One prompt, in one of three forms: chat messages, bare text, token ids.

    :ivar tools: tool definitions in the OpenAI form, for chat only.
    :ivar max_tokens: of the answer; ``None`` leaves it to the run.
    """

    id: str
    messages: tuple[Mapping[str, Any], ...] = ()
    text: str = ""
    ids: tuple[int, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None

    @property
    def words(self) -> str:
        """Everything that a reader would read."""
        contents = (message.get("content") for message in self.messages)
        return self.text + " ".join(content for content in contents if isinstance(content, str))


@dataclass(frozen=True)
class PromptSet:
    """Prompts in their order.

    :ivar digest: SHA-256 over the prompts, 16 digits: the same set has the same.
    """

    name: str
    prompts: tuple[Prompt, ...]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        content = [[p.id, p.messages, p.text, p.ids, p.tools, p.max_tokens] for p in self.prompts]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=dict).encode()).hexdigest()[:16]
        object.__setattr__(self, "digest", digest)

    @property
    def is_noise(self) -> bool:
        """Whether some prompt is random tokens: ids, or text that mixes as many scripts as decoded ids do."""
        return any(prompt.ids or len(scripts(prompt.words)) >= _SCRIPTS_OF_NOISE for prompt in self.prompts)

    def first(self, count: int | None) -> PromptSet:
        """Return the set cut to its first prompts."""
        return self if count is None else PromptSet(self.name, self.prompts[:count])


def names() -> list[str]:
    """Return the sets that come with the tool."""
    return [*sorted(path.stem for path in _folder().glob("*.jsonl")), "tiny", RANDOM]


def names_with(count: int) -> list[str]:
    """Return the bundled sets of real text with so many prompts."""
    return [name for name in names() if name != RANDOM and len(load(name).prompts) >= count]


def load(name: str, *, seed: int = 0) -> PromptSet:
    """Return a bundled set by its name, or the prompts of a file.

    :raises PromptsError: no such set or file, or something in it is no prompt; says where.
    """
    if name == RANDOM:
        return _random(seed)
    bundled = models.TINY_PROMPTS if name == "tiny" else _folder() / f"{name}.jsonl"
    is_bundled = name in names()
    path = bundled if is_bundled else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise PromptsError(
            f"there is no prompt set {name!r}: {reason}", hint=f"Bundled: {', '.join(names())}; or a JSONL file."
        ) from error
    prompts = tuple(_read(where, row) for where, row in _rows(_plain(path.name), text))
    if not prompts:
        raise PromptsError(f"the prompt set {name} is empty", hint=_FORMS)
    twice = [prompt.id for prompt in prompts if sum(other.id == prompt.id for other in prompts) > 1]
    if twice:
        raise PromptsError(f"{path.name}: the id {twice[0]!r} stands twice", hint="Every prompt needs its own id.")
    return PromptSet(name if is_bundled else _plain(path.stem), prompts)


def scripts(text: str) -> set[str]:
    """Return the writing systems of the letters in a text, each by the first word of its Unicode names.

    Chinese, Japanese and Korean writing counts as one: it is mixed in ordinary text.
    """
    letters = {letter for letter in text if letter.isalpha()}
    names = {unicodedata.name(letter, "").partition(" ")[0].partition("-")[0] for letter in letters} - {""}
    return {"CJK" if name in _EAST_ASIAN else name for name in names}


def _folder() -> Path:
    return Path(str(resources.files("sglang_bw.experiment"))) / "prompt_sets"


def _random(seed: int) -> PromptSet:
    # Every vocabulary has these ids; special tokens stand at the ends in most.
    dice = random.Random(seed)
    ids = [tuple(dice.randrange(10, 250) for _ in range(_RANDOM_LENGTH)) for _ in range(16)]
    return PromptSet(RANDOM, tuple(Prompt(f"random-{n:02}", ids=row) for n, row in enumerate(ids)))


def _rows(name: str, text: str) -> Iterable[tuple[str, Any]]:
    if text.lstrip().startswith("["):  # ShareGPT files are often one array
        try:
            yield from ((f"{name}[{n}]", row) for n, row in enumerate(json.loads(text)))
        except (ValueError, RecursionError) as error:
            raise PromptsError(f"{name} is no JSON: {error}", hint=_FORMS) from error
        return
    # Not splitlines(): JSON leaves other separators, U+2028 for one, as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{name}:{number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise PromptsError(f"{name}:{number} is no JSON: {error}", hint=_FORMS) from error


def _plain(name: str) -> str:
    """Return a file name that can be written: without the bytes that are no UTF-8."""
    return name.encode("utf-8", "replace").decode("utf-8")


def _read(where: str, row: Any) -> Prompt:
    if not isinstance(row, dict):
        raise PromptsError(f"{where}: a prompt is an object, not {row!r:.60}", hint=_FORMS)
    if _SURROGATE.search(json.dumps(row, ensure_ascii=False)):
        raise PromptsError(
            f"{where}: half of a surrogate pair, which is no character and cannot be sent or recorded",
            hint="It looks like \\ud83d in the file; the other half was cut off. Complete it or take it out.",
        )
    name = str(row.get("id") or row.get("custom_id") or where)
    body = row["body"] if isinstance(row.get("body"), dict) else row
    limit = body.get("max_tokens", body.get("max_completion_tokens"))
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise PromptsError(f"{where}: max_tokens is {limit!r}, not a number from 1 on")
    if "conversations" in body:
        return Prompt(name, messages=_share_gpt(where, body["conversations"]), max_tokens=limit)
    if "messages" in body:
        messages, tools = _objects(where, "messages", body["messages"]), body.get("tools") or []
        if any("role" not in message for message in messages):
            raise PromptsError(f"{where}: a message has no role", hint=_FORMS)
        return Prompt(name, messages=messages, tools=_objects(where, "tools", tools, empty=True), max_tokens=limit)
    prompt = body.get("prompt")
    if isinstance(prompt, str) and prompt.strip():
        return Prompt(name, text=prompt, max_tokens=limit)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return Prompt(name, ids=tuple(prompt), max_tokens=limit)
    raise PromptsError(f"{where}: the prompt is empty or missing", hint=_FORMS)


def _objects(where: str, key: str, value: Any, *, empty: bool = False) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value) or not (value or empty):
        raise PromptsError(f"{where}: {key} must be a list of objects, and not empty", hint=_FORMS)
    return tuple(value)


def _share_gpt(where: str, turns: Any) -> tuple[Mapping[str, Any], ...]:
    roles = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
    messages = []
    for turn in _objects(where, "conversations", turns):
        role, text = roles.get(str(turn.get("from"))), turn.get("value")
        if role is None or not isinstance(text, str):
            raise PromptsError(f"{where}: a turn needs 'from' (human, gpt, system) and 'value'", hint=_FORMS)
        messages.append({"role": role, "content": text})
    while messages and messages[-1]["role"] != "user":  # the answer is what we ask for
        messages.pop()
    if not messages:
        raise PromptsError(f"{where}: nobody asks anything in this conversation", hint=_FORMS)
    return tuple(messages)
