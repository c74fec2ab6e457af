"""One request over the streaming API, with the times at which its tokens came."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import aiohttp
from pydantic import ValidationError

from sglang_bw.errors import BwError, LoadError, PromptsError
from sglang_bw.experiment.prompts import Prompt
from sglang_bw.experiment.stream import Arrivals, ServerError, SseReader, count
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
        return _row(prompt, seen, began), seen.gaps
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
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise StreamFailedError(
            "bad-stream",
            f"the stream of {url} is not what the API promises (prompt {prompt.id}): {_what(error)}",
            hint="Something between this client and the engine may have cut or changed it.",
        ) from error


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
    """Return what came of a request.

    :raises ServerError: it ended without a token: the engine counts the end of an answer as one.
    :raises ValueError: the stream was cut, or holds what the protocol does not have.
    """
    if not seen.done or not seen.usage:
        raise ValueError(f"it ended without {'usage' if seen.done else '[DONE]'}")
    usage, meta = seen.usage, seen.meta
    tokens = count(usage, "completion_tokens")
    if not tokens:
        raise ServerError("the answer has no tokens")
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
        prompt_tokens=count(usage, "prompt_tokens"),
        cached_tokens=count(details, "cached_tokens"),
        output_tokens=tokens,
        rounds=count(meta, "spec_verify_ct"),
        accepted=count(meta, "spec_num_correct_drafts"),
        histogram=tuple(meta.get("spec_correct_drafts_histogram") or ()),
        output_ids=tuple(seen.ids) if seen.ids is not None else None,
        text=seen.answer,
        finish=seen.finish,
    )


def _refused(url: str, prompt: Prompt, status: int, said: str) -> NoReturn:
    reason = _message(said)
    if any(word in reason.lower() for word in _TOO_LONG):
        raise PromptsError(
            f"the prompt {prompt.id} does not fit the model's context: {reason}",
            hint="Take a shorter set with --prompts, or start the servers with a larger --context-length.",
        )
    answer = f"answered {status}" if status != 200 else "did not answer to the end"
    # 4xx is about what was asked: the launch is not to blame, and another prompt may be answered.
    failure = "prompts" if 400 <= status < 500 else "server-error"
    raise StreamFailedError(
        failure, f"{url} {answer} (prompt {prompt.id}): {reason}", hint="The server's log has the cause."
    )


def _message(said: str) -> str:
    try:
        value = json.loads(said)
    except (ValueError, RecursionError):
        return said.strip()[:300] or "no reason given"
    if isinstance(value, dict):
        inner = value.get("error", value)
        return str(inner.get("message", inner) if isinstance(inner, dict) else inner)[:300]
    return str(value)[:300]


def _what(error: Exception) -> str:
    """Return in a line what is wrong with a stream."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
