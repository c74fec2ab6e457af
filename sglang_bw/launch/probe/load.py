"""Batches of requests that decode side by side, timed so that prefill and the client cancel out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from sglang_bw.errors import ProbeError
from sglang_bw.launch import secret

_SHORT_ROUNDS = 8
# An answer may be thousands of rounds long; who a server is, it knows at once.
_TIMEOUT_S = 600.0
_INFO_TIMEOUT_S = 15.0
_CHECK_URL = "`sglang-bw serve RECIPE` starts a server; check the URL."


@dataclass(frozen=True)
class Timed:
    """A batch from request to answer.

    :ivar rounds: decode steps or verify passes, of the request that had most.
    :ivar mean_rounds: of all requests.
    """

    seconds: float
    rounds: int
    mean_rounds: float
    tokens: int
    prompt_tokens: int
    requests: int


@dataclass(frozen=True)
class Served:
    """What a running server says of itself.

    :ivar steps: draft steps; ``None`` for plain decoding.
    :ivar most: requests that it decodes at once, ``None`` when it does not tell.
    """

    model: str
    version: str
    device: str
    steps: int | None
    adaptive: bool
    most: int | None


class Client:
    """Talks to one server.

    :raises ProbeError: no URL at all.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = secret.without_userinfo(url)  # to be shown; the client has the whole
        try:
            # Certificates of a local server are its own business; proxies must not get in between.
            self.http = httpx.Client(
                base_url=url.rstrip("/"), headers=headers, timeout=_TIMEOUT_S, verify=False, trust_env=False
            )
        except httpx.InvalidURL as error:
            raise ProbeError(f"{self.url} is no URL", hint="such as http://127.0.0.1:30000") from error

    def served(self) -> Served:
        """Ask what it is.

        :raises ProbeError: it does not answer, or is no SGLang server.
        """
        try:
            response = self.http.get("/server_info", timeout=_INFO_TIMEOUT_S)
            response.raise_for_status()
            info = response.json()
            speculates = bool(info.get("speculative_algorithm"))
            states = info.get("internal_states") or [{}]
            most = states[0].get("effective_max_running_requests_per_dp") or info.get("max_running_requests")
            return Served(
                model=str(info["model_path"]),
                version=str(info["version"]),
                device=str(info.get("device", "")),
                steps=int(info["speculative_num_steps"]) if speculates else None,
                adaptive=bool(info.get("speculative_adaptive")),
                most=int(most) if most else None,
            )
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                raise ProbeError(f"{self.url} wants another key (status {status})", hint="--api-key KEY") from error
            raise ProbeError(
                f"{self.url} answers, and not as an SGLang server does: status {status}", hint=_CHECK_URL
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ProbeError(f"{self.url} does not answer: {_why(error)}", hint=_CHECK_URL) from error
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ProbeError(f"{self.url} is no SGLang server that can be measured: {error}") from error

    def decode(self, prompts: Sequence[str], tokens: int) -> Timed:
        """Generate exactly ``tokens`` tokens for every prompt, at temperature 0.

        :raises ProbeError: it refuses, or answers something else.
        """
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        began = time.perf_counter()
        try:
            response = self.http.post("/generate", json={"text": list(prompts), "sampling_params": sampling})
            seconds = time.perf_counter() - began
            response.raise_for_status()
            metas = [answer["meta_info"] for answer in response.json()]
            found = [int(meta["completion_tokens"]) for meta in metas]
            rounds = [int(meta.get("spec_verify_ct") or meta["completion_tokens"]) for meta in metas]
            context = max((int(meta["prompt_tokens"]) for meta in metas), default=0)
        except httpx.HTTPStatusError as error:
            raise ProbeError(
                f"{self.url} refuses a batch of {len(prompts)}: status {error.response.status_code}",
                hint="the engine's log says why.",
            ) from error
        except httpx.HTTPError as error:
            raise ProbeError(f"{self.url} does not answer a batch of {len(prompts)}: {_why(error)}") from error
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ProbeError(
                f"{self.url} answers a batch of {len(prompts)} with something else than text: {error!r}"
            ) from error
        if len(found) != len(prompts):
            raise ProbeError(f"{self.url} gave {len(found)} answers to a batch of {len(prompts)}")
        if any(count != tokens for count in found):
            raise ProbeError(
                f"{self.url} cut an answer short of {tokens} tokens", hint="the context is too small: fewer --rounds."
            )
        return Timed(seconds, max(rounds), statistics.fmean(rounds), tokens, context, len(metas))


def _why(error: Exception) -> str:
    """Return an error without the URL, whose password httpx puts into some."""
    return "no answer in time" if isinstance(error, httpx.TimeoutException) else str(error) or type(error).__name__


@dataclass(frozen=True)
class Cell:
    """A round at one batch.

    :ivar seconds: median over the repeats.
    :ivar spread: largest minus smallest, as a share of the median.
    :ivar accept_length: tokens that a round emitted, the mean of the requests.
    :ivar context: tokens of a prompt.
    """

    seconds: float
    spread: float
    accept_length: float
    context: int


def measure(client: Client, prompts: Sequence[str], *, rounds: int, repeats: int, tell: Callable[[str], Any]) -> Cell:
    """Time rounds as the difference between long and short answers to the same prompts.

    What both have (prefill, tokenizer, the way of the answer) cancels out. The first run of each is not measured. A
    difference below 0 is noise like any other and stays among the repeats: leaving it out would favour the slow ones.

    :raises ProbeError: the server does not answer as it should, or the noise is larger than what is measured.
    """
    tell("first run")
    warm = client.decode(prompts, max(2 * _SHORT_ROUNDS, 16))
    length = warm.tokens / warm.rounds
    short, long = round(_SHORT_ROUNDS * length), round((_SHORT_ROUNDS + rounds) * length)
    client.decode(prompts, long)
    found, lengths = [], []
    context = warm.prompt_tokens
    for number in range(repeats):
        tell(f"{number + 1} of {repeats}")
        few, many = client.decode(prompts, short), client.decode(prompts, long)
        found.append((many.seconds - few.seconds) / max(1, many.rounds - few.rounds))
        lengths.append((many.tokens - few.tokens) / max(1.0, many.mean_rounds - few.mean_rounds))
    seconds = statistics.median(found)
    if seconds <= 0:
        raise ProbeError(
            f"{rounds} rounds at batch {len(prompts)} drown in the noise of this machine", hint="more: --rounds N."
        )
    return Cell(seconds, (max(found) - min(found)) / seconds, statistics.fmean(lengths), context)


def prompts(texts: Sequence[str], batch: int, context: int) -> list[str]:
    """Return ``batch`` prompts from some texts, repeated to about ``context`` tokens; 0: as they are.

    No two are alike: equal requests would choose the same experts of an MoE, and make its steps cheaper than they are.
    """
    turns = [divmod(number, len(texts)) for number in range(batch)]
    chosen = [f"{turn + 1}. {texts[at]}" if turn else texts[at] for turn, at in turns]
    letters = 4 * context  # about four a token
    return [(text + " ") * max(1, -(-letters // (len(text) + 1))) if context else text for text in chosen]
