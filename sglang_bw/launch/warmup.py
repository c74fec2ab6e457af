"""A few requests right after the start: accept length, speed, and whether the output is sane.

The first request is not measured: kernels compile and graphs run for the first time in it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang_bw.recipes.schema import Warmup

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 300.0
USELESS_ACCEPT_LENGTH = 1.1
ENOUGH_ROUNDS = 16
# A run of one token as long as this, and half of the answer, is a loop and not text.
SHORTEST_LOOP = 12


@dataclass(frozen=True)
class Sample:
    """One answered request.

    :ivar token_ids: output tokens, one by one.
    :ivar logprobs: of the output tokens; ``None`` where the engine gave no number (NaN is no JSON).
    :ivar rounds: verify passes; 0 without speculation.
    :ivar accepted: draft tokens that the verify passes accepted.
    :ivar seconds: from request to the whole answer.
    """

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    rounds: int
    accepted: int
    seconds: float


@dataclass(frozen=True)
class Report:
    """What the warm-up saw.

    :ivar accept_length: tokens a round emits on average, the bonus token included; ``None`` without speculation.
    :ivar tokens_per_second: output tokens per second of one request at a time, prefill included.
    :ivar warnings: for the user, whole sentences.
    :ivar broken: the output is not text: NaN, or one token repeated.
    """

    accept_length: float | None
    tokens_per_second: float
    samples: tuple[Sample, ...]
    warnings: tuple[str, ...]
    broken: bool


def run(url: str, warmup: Warmup, *, speculates: bool, api_key: str | None = None) -> Report:
    """Ask the engine the recipe's prompts at temperature 0.

    :param url: of the server, without a path.
    :param speculates: whether an accept length is expected.
    :raises httpx.HTTPError: the engine does not answer.
    """
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # Certificates of a local server are its own business; proxies must not get in between.
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, verify=False, trust_env=False) as client:
        ask = _Asker(client, warmup)
        ask(warmup.prompts[0])
        samples = tuple(ask(prompt) for prompt in warmup.prompts)
    return judge(samples, speculates=speculates)


def judge(samples: Sequence[Sample], *, speculates: bool) -> Report:
    """Turn samples into numbers and warnings.

    The accept length is ``1 + accepted / rounds``, that is the mean over verify passes, as in the engine's log.
    """
    rounds = sum(sample.rounds for sample in samples)
    accept_length = 1 + sum(sample.accepted for sample in samples) / rounds if rounds else None
    looped = [sample for sample in samples if loops(sample.token_ids)]
    unsound = [sample for sample in samples if not all(map(_is_number, sample.logprobs))]
    empty = [sample for sample in samples if not sample.token_ids]
    warnings = []
    if unsound:
        warnings.append(
            "The engine computes NaN: a log-probability is not a number. Check weights, dtype and quantization."
        )
    if looped:
        warnings.append(
            f"One token repeats in the answer to {looped[0].prompt[:40]!r} (token {looped[0].token_ids[-1]}): "
            "the output is probably broken; compare with --no-spec and another --attention-backend."
        )
    if empty:
        warnings.append(f"The answer to {empty[0].prompt[:40]!r} is empty.")
    if speculates and accept_length is None:
        warnings.append("The engine reports no verify passes, although speculation is on.")
    elif accept_length is not None and accept_length < USELESS_ACCEPT_LENGTH and rounds >= ENOUGH_ROUNDS:
        warnings.append(
            f"The accept length is {accept_length:.2f}: the draft guesses nothing right and only costs time. "
            "Check that the draft belongs to this target; --no-spec serves without it."
        )
    seconds = sum(sample.seconds for sample in samples)
    return Report(
        accept_length=accept_length,
        tokens_per_second=sum(len(sample.token_ids) for sample in samples) / seconds if seconds else 0.0,
        samples=tuple(samples),
        warnings=tuple(warnings),
        broken=bool(unsound or looped),
    )


def loops(token_ids: Sequence[int]) -> bool:
    """Tell whether one token fills half of the output, or more, in one run."""
    longest = run_length = 0
    for position, token in enumerate(token_ids):
        run_length = run_length + 1 if position and token == token_ids[position - 1] else 1
        longest = max(longest, run_length)
    return longest >= max(SHORTEST_LOOP, len(token_ids) / 2)


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


class _Asker:
    """Asks through the chat endpoint, or with the bare prompt when the recipe or the model wants that."""

    def __init__(self, client: httpx.Client, warmup: Warmup) -> None:
        self.client = client
        self.tokens = warmup.max_new_tokens
        self.chat = warmup.format == "chat"

    def __call__(self, prompt: str) -> Sample:
        began = time.monotonic()
        response = self._chat(prompt) if self.chat else self._generate(prompt)
        if self.chat and response.status_code == HTTPStatus.BAD_REQUEST:  # a base model without a chat template
            self.chat = False
            return self(prompt)
        response.raise_for_status()
        seconds = time.monotonic() - began
        answer = response.json()
        choice = answer["choices"][0] if self.chat else answer
        text = choice["message"].get("content") or "" if self.chat else choice["text"]
        return _sample(prompt, text, choice["meta_info"], seconds)

    def _chat(self, prompt: str) -> httpx.Response:
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": self.tokens,
            "logprobs": True,
            "return_meta_info": True,
        }
        return self.client.post("/v1/chat/completions", json=body)

    def _generate(self, prompt: str) -> httpx.Response:
        sampling = {"temperature": 0, "max_new_tokens": self.tokens}
        return self.client.post("/generate", json={"text": prompt, "sampling_params": sampling, "return_logprob": True})


def _sample(prompt: str, text: str, meta: dict[str, Any], seconds: float) -> Sample:
    tokens = meta.get("output_token_logprobs") or []
    return Sample(
        prompt=prompt,
        text=text,
        token_ids=tuple(int(entry[1]) for entry in tokens),
        logprobs=tuple(entry[0] for entry in tokens),
        rounds=int(meta.get("spec_verify_ct") or 0),
        accepted=int(meta.get("spec_num_correct_drafts") or 0),
        seconds=seconds,
    )
