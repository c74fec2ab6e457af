"""What a stream brings: its bytes, its events, and what they add up to.

Tokens are counted by the server: every event carries ``usage`` (``continuous_usage_stats``), and so does the end. What
an event holds is not counted: a verify pass emits several tokens at once, and a byte of a character none.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MOST = 2**53  # above, a JSON number is no exact count


class ServerError(ValueError):
    """The server says that it failed: by an error in the stream, or an answer that it aborted."""

    def __init__(self, said: Any) -> None:
        super().__init__(str(said.get("message", said)) if isinstance(said, dict) else str(said))


class SseReader:
    """Turns the bytes of an event stream into the payloads of its ``data`` lines."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("strict")
        self._rest = ""

    def feed(self, chunk: bytes) -> list[str]:
        """Return the payloads that are complete with this chunk.

        :raises ValueError: the bytes are not UTF-8, or a line is neither a field of the protocol nor a comment.
        """
        *lines, self._rest = (self._rest + self._decode.decode(chunk)).split("\n")
        found = []
        for line in lines:
            line = line.rstrip("\r")
            if line.startswith("data:"):
                found.append(line[5:].removeprefix(" "))
            elif line and not line.startswith((":", "event:", "id:", "retry:")):
                raise ValueError(f"not an event: {line:.60}")
        return found


@dataclass
class Arrivals:
    """What a stream has brought so far. Times are of ``time.perf_counter``: no change of the clock reaches them."""

    sent: float
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    ids: list[int] | None = None
    text: list[str] = field(default_factory=list)
    finish: str | None = None
    done: bool = False
    _tokens: int = 0

    def take(self, payload: str, now: float) -> None:
        """Take in one event.

        :raises ValueError: it is not what the protocol says.
        """
        if payload == "[DONE]":
            self.done = True
            return
        event = json.loads(payload)
        if not isinstance(event, dict):
            raise ValueError(f"not an event: {payload:.60}")  # noqa: TRY004 - of the server, not of our caller
        if "error" in event:
            raise ServerError(event["error"])
        choices = event.get("choices") or []
        new = any(list(map(self._take_choice, choices)))  # each of them, so no generator
        if usage := event.get("usage"):
            self.usage = usage
            tokens = count(usage, "completion_tokens")
            # The closing event repeats the last count and brings no token.
            new = bool(choices) and (new or tokens > self._tokens)
            self._tokens = max(tokens, self._tokens)
        if extension := event.get("sglext"):
            self._take_extension(extension)
        if new:
            self._arrived(now)

    @property
    def answer(self) -> str:
        """All text. An event may end in the middle of a surrogate pair; what stays a half is no character."""
        return "".join(self.text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _arrived(self, now: float) -> None:
        if not self.first:
            self.first = now
        elif now > self.last:  # events of one read came together
            self.gaps.append(now - self.last)
        self.last = now

    def _take_choice(self, choice: dict[str, Any]) -> bool:
        delta = choice.get("delta") or choice
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("text") or ""
        calls = delta.get("tool_calls") or []
        if reason := choice.get("finish_reason"):
            self.finish = _finish(reason)
        self.text += [text, *(json.dumps(call.get("function"), ensure_ascii=False) for call in calls)]
        ids = choice.get("token_ids")
        if ids is not None:
            self.ids = self.ids or []
            self.ids += ids  # in place: a long answer is not copied for each of its tokens
        return bool(text or calls or ids)

    def _take_extension(self, extension: dict[str, Any]) -> None:
        self.meta = extension.get("spec_tokens_details") or self.meta
        if ids := extension.get("output_ids"):
            self.ids = list(ids[0] if isinstance(ids[0], list) else ids)


def count(numbers: Mapping[str, Any], name: str) -> int:
    """Return a count that the server gives; 0 where it gives none.

    :raises ValueError: it is no count.
    """
    value = numbers.get(name) or 0
    if not isinstance(value, int | float) or not 0 <= value < _MOST:
        raise ValueError(f"{name} is {value!r:.60}, which is no count")
    return int(value)


def _finish(reason: Any) -> str:
    """Return why an answer ended, from OpenAI's form ("length") or SGLang's own ({"type": "length"}).

    :raises ServerError: the engine aborted it.
    """
    name = reason.get("type") if isinstance(reason, dict) else reason
    if not isinstance(name, str):
        raise ValueError(f"finish_reason is {reason!r:.60}")  # noqa: TRY004 - of the server, not of our caller
    if name == "abort":
        said = reason.get("message") if isinstance(reason, dict) else None
        raise ServerError(f"it aborted the request: {said or 'no reason given'}")
    return name
