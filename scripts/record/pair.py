"""Greedy tokens of the bundled pair: chain and tree against the run without speculation."""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang_bw import models

from .servers import Answer, Record, Server, accept_length

PROMPTS, TOKENS, AT_ONCE = 16, 64, 8


def pair(servers: list[Server]) -> Record:
    """Run the same prompts on all, one at a time and several, and compare with the first one's, one at a time."""
    plain = servers[0]
    rows = map(json.loads, models.TINY_PROMPTS.read_text(encoding="utf-8").splitlines())
    prompts = [row["prompt"] for row in rows][:PROMPTS]
    runs: dict[str, Record] = {}
    tokens: dict[str, list[list[int]]] = {}
    for server in servers:
        for at_once in (1, AT_ONCE):
            ask_all(server, prompts, at_once)  # kernels are compiled at their first use
            began = time.perf_counter()
            answers = ask_all(server, prompts, at_once)
            seconds = time.perf_counter() - began
            name = f"{server.name}, {at_once} at once"
            tokens[name] = [answer["output_ids"] for answer in answers]
            runs[name] = {
                "tokens": sum(map(len, tokens[name])),
                "tokens_per_second": round(sum(map(len, tokens[name])) / seconds, 1),
                "accept_length": round(accept_length(answers), 3),
            }
    reference = tokens[f"{plain.name}, 1 at once"]
    for name, found in tokens.items():
        runs[name]["first_differences"] = [
            {"prompt": number, **gap(plain, prompts[number], left, right)}
            for number, (left, right) in enumerate(zip(reference, found, strict=True))
            if left != right
        ]
    return runs


def ask_all(server: Server, prompts: list[str], at_once: int) -> list[Answer]:
    """Return the answers in the order of the prompts."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt), prompts))


def ask(server: Server, prompt: str, **more: Any) -> Answer:
    """Return the answer to one prompt."""
    answer: Answer = server.generate(TOKENS, text=prompt, **more)
    return answer


def gap(plain: Server, prompt: str, reference: list[int], other: list[int]) -> Record:
    """Return how close the two tokens were where two runs of the same length part.

    ``engine``: the plain run's own bf16 logits, whose difference is that of the log probabilities. ``fp32``: the same
    weights computed in fp32 from the same prefix. Both in units of bf16's last place at the best logit's size.
    """
    place = next(n for n, (one, two) in enumerate(zip(reference, other, strict=True)) if one != two)
    answer = ask(plain, prompt, return_logprob=True, top_logprobs_num=8)
    one, two = reference[place], other[place]
    scores = {token: logprob for logprob, token, _ in answer["meta_info"]["output_top_logprobs"][place]}
    exact = fp32_logits(prompt, reference[:place])
    unit = 2.0 ** (math.floor(math.log2(max(abs(exact[one]), abs(exact[two])))) - 7)
    found: Record = {"at": place, "plain": one, "other": two, "fp32_logits": [exact[one], exact[two]]}
    found["fp32_ulp"] = round((exact[one] - exact[two]) / unit, 2)
    if answer["output_ids"][: place + 1] == reference[: place + 1] and {one, two} <= scores.keys():
        found["engine_ulp"] = round((scores[one] - scores[two]) / unit, 2)
    return found


def fp32_logits(prompt: str, prefix: list[int]) -> list[float]:
    """Return the target's logits after the prompt and some output tokens, in fp32 on the CPU, without the engine."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(models.TINY_TARGET)(prompt)["input_ids"] + prefix
    model = AutoModelForCausalLM.from_pretrained(models.TINY_TARGET, dtype=torch.float32)
    with torch.inference_mode():
        logits: list[float] = model(torch.tensor([ids])).logits[0, -1].tolist()
    return logits
