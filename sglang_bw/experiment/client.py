"""One request over the streaming API, with the times at which its tokens came.

Tokens are counted by the server: every event carries ``usage`` (``continuous_usage_stats``), and so does the end. What
an event holds is not counted: a verify pass emits several tokens at once, and a byte of a character none.
"""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import aiohttp

from sglang_bw.errors import BwError, LoadError, PromptsError
from sglang_bw.experiment.prompts import Prompt
from sglang_bw.ledger.record import RequestRow

CONNECT_S = 10.0
_TOO_LONG = ("context length", "context_length", "too long", "maximum allowed length", "longer than")


class StreamFailedError(LoadError):
    """A request that could not be measured.

    :ivar failure: its class, as in :class:`sglang_bw.ledger.record.Outcome`.
    """

    def __init__(self, failure: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.failure = failure


@dataclass(frozen=True)
class Sampling:
    """How answers are made.

    :ivar max_tokens: of an answer, where the prompt says nothing.
    :ivar ignore_eos: answer exactly ``max_tokens`` tokens.
    :ivar timeout_s: longest silence of a stream.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int | None = None
    timeout_s: float = 120.0


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
            tokens = int(usage.get("completion_tokens") or 0)
            # The closing event repeats the last count and brings no token.
            new = bool(choices) and (new or tokens > self._tokens)
            self._tokens = max(tokens, self._tokens)
        if extension := event.get("sglext"):
            self._take_extension(extension)
        if new:
            self._arrived(now)

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
        self.finish = choice.get("finish_reason") or self.finish
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


class ServerError(ValueError):
    """The server wrote an error into the stream."""

    def __init__(self, said: Any) -> None:
        super().__init__(str(said.get("message", said)) if isinstance(said, dict) else str(said))


def connect(limit_s: float, api_key: str | None = None) -> aiohttp.ClientSession:
    """Return a session without a limit on connections, that no proxy of the environment gets into."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=limit_s)
    connector = aiohttp.TCPConnector(limit=0, ssl=False)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers, trust_env=False)


async def ask(
    session: aiohttp.ClientSession, url: str, prompt: Prompt, sampling: Sampling, began: float
) -> tuple[RequestRow, Sequence[float]]:
    """Send one prompt and read its answer.

    :param began: of the block, on ``time.perf_counter``.
    :return: the row, and the gaps between arrivals in seconds.
    :raises StreamFailedError: the server died, answered with an error, broke the stream, or was silent too long.
    :raises PromptsError: the server says that the prompt does not fit its context.
    """
    path, body = request(prompt, sampling)
    seen = Arrivals(sent=time.perf_counter())
    try:
        async with session.post(url + path, json=body) as response:
            if response.status != 200:
                _refused(url, prompt, response.status, await response.text())
            await _read(response, seen)
    except ServerError as error:
        _refused(url, prompt, 200, str(error))
    except BwError:
        raise
    except TimeoutError as error:
        raise StreamFailedError(
            "timeout",
            f"{url} said nothing for {sampling.timeout_s:.0f} s (prompt {prompt.id})",
            hint="It hangs, or the prompt takes longer: --request-timeout SECONDS.",
        ) from error
    except aiohttp.ClientError as error:
        hint = "The server has died, or its address is wrong; its log says why."
        raise StreamFailedError("server-died", f"{url} broke the connection: {error}", hint=hint) from error
    except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise _malformed(url, prompt, str(error)) from error
    if not seen.done or not seen.usage:
        missing = "[DONE]" if not seen.done else "usage"
        raise _malformed(url, prompt, f"it ended without {missing}")
    return _row(prompt, seen, began), seen.gaps


async def _read(response: aiohttp.ClientResponse, seen: Arrivals) -> None:
    reader = SseReader()
    async for chunk in response.content.iter_any():
        now = time.perf_counter()
        for payload in reader.feed(chunk):
            seen.take(payload, now)


def request(prompt: Prompt, sampling: Sampling) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request; SGLang's own fields ask for token ids and the numbers of speculation."""
    body: dict[str, Any] = {
        "model": "default",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": sampling.temperature,
        "max_tokens": prompt.max_tokens or sampling.max_tokens,
        "return_spec_tokens_details": True,
    }
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if prompt.messages:
        tools = {"tools": list(prompt.tools)} if prompt.tools else {}
        extra = {"messages": list(prompt.messages), "return_output_ids_in_sglext": True}
        return "/v1/chat/completions", body | extra | tools
    return "/v1/completions", body | {"prompt": prompt.text or list(prompt.ids), "return_token_ids": True}


def _row(prompt: Prompt, seen: Arrivals, began: float) -> RequestRow:
    usage, meta = seen.usage, seen.meta
    tokens = int(usage.get("completion_tokens") or 0)
    details = usage.get("prompt_tokens_details") or {}
    last = seen.last or time.perf_counter()
    ttft = seen.first - seen.sent if seen.first else None
    gaps = sorted(seen.gaps)
    return RequestRow(
        prompt=prompt.id,
        began_s=seen.sent - began,
        ttft_s=ttft,
        tpot_s=(last - seen.first) / (tokens - 1) if tokens > 1 and seen.first else None,
        itl_s=(gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)], gaps[-1]) if gaps else None,
        e2e_s=last - seen.sent,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
        output_tokens=tokens,
        rounds=int(meta.get("spec_verify_ct") or 0),
        accepted=int(meta.get("spec_num_correct_drafts") or 0),
        histogram=tuple(meta.get("spec_correct_drafts_histogram") or ()),
        output_ids=tuple(seen.ids) if seen.ids is not None else None,
        text=None if seen.ids is not None else "".join(seen.text),
        finish=seen.finish,
    )


def _refused(url: str, prompt: Prompt, status: int, said: str) -> NoReturn:
    reason = _message(said)
    if any(word in reason.lower() for word in _TOO_LONG):
        raise PromptsError(
            f"the prompt {prompt.id} does not fit the model's context: {reason}",
            hint="Take a shorter set with --prompts, or start the servers with a larger --context-length.",
        )
    answer = f"answered {status}" if status != 200 else "wrote an error into the stream"
    raise StreamFailedError(
        "server-error", f"{url} {answer} (prompt {prompt.id}): {reason}", hint="The server's log has the cause."
    )


def _message(said: str) -> str:
    try:
        value = json.loads(said)
    except ValueError:
        return said.strip()[:300] or "no reason given"
    if isinstance(value, dict):
        inner = value.get("error", value)
        return str(inner.get("message", inner) if isinstance(inner, dict) else inner)[:300]
    return str(value)[:300]


def _malformed(url: str, prompt: Prompt, what: str) -> StreamFailedError:
    return StreamFailedError(
        "bad-stream",
        f"the stream of {url} is not what the API promises (prompt {prompt.id}): {what}",
        hint="Something between this client and the engine may have cut or changed it.",
    )
