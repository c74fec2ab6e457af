"""Measures the pair without an engine: bits per byte, greedy outputs, accept lengths.

Greedy speculation is lossless, so the tokens are known beforehand and an accept length needs no loop through the
models: each round begins at a known place of the greedy output and counts how many of its draft tokens agree.
Accept length here and everywhere: tokens per verify pass, the bonus token included.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from tiny import settings as s
from tiny.draft import Draft, target_states
from tiny.tokens import encode

DRAFTED = 3
"""Tokens drafted a round: `--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4`."""
NGRAM_MAX = 18
"""Longest suffix that the n-gram draft looks up (SGLang's `--speculative-ngram-max-trie-depth` default)."""


@dataclass(frozen=True)
class Run:
    """A prompt and its greedy output, as token ids."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


@torch.no_grad()
def bits_per_byte(target: LlamaForCausalLM, documents: Sequence[str]) -> float:
    """Mean bits per byte of the documents, the first byte of each not counted (nothing stands before it)."""
    nats, count = 0.0, 0
    device = target.device
    for document in documents:
        ids = torch.tensor([encode(document)], device=device)
        logits = target(input_ids=ids, use_cache=False).logits[0, :-1].float()
        picked = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])
        nats -= picked.sum().item()
        count += len(picked)
    return nats / count / math.log(2)


@torch.no_grad()
def greedy_runs(target: LlamaForCausalLM, prompts: Sequence[str], tokens: int) -> list[Run]:
    """Greedy outputs to `tokens` tokens or the end token (included)."""
    ids = [encode(p) for p in prompts]
    width = max(map(len, ids))
    batch = torch.full((len(ids), width), s.PAD, device=target.device)
    mask = torch.zeros_like(batch)
    for row, prompt in enumerate(ids):
        batch[row, width - len(prompt) :] = torch.tensor(prompt, device=target.device)
        mask[row, width - len(prompt) :] = 1
    out = target.generate(
        batch, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=s.EOS, pad_token_id=s.PAD
    )
    return [Run(tuple(p), _to_end(row[width:].tolist())) for p, row in zip(ids, out, strict=True)]


def _to_end(tokens: list[int]) -> tuple[int, ...]:
    return tuple(tokens[: tokens.index(s.EOS) + 1] if s.EOS in tokens else tokens)


def accept_length(runs: Sequence[Run], propose: Callable[[Run], Callable[[int], Sequence[int]]]) -> float:
    """Tokens per verify pass over all runs; `propose(run)(n)` drafts what follows the first n known output tokens.

    The first output token comes from the prefill and is not counted.
    """
    produced, rounds = 0, 0
    for run in runs:
        guess = propose(run)
        known = 1
        while known < len(run.output):
            agreed = 0
            for token, wanted in zip(guess(known), run.output[known:], strict=False):
                if token != wanted:
                    break
                agreed += 1
            step = min(agreed + 1, len(run.output) - known)
            produced, rounds, known = produced + step, rounds + 1, known + step
    return produced / rounds


@torch.no_grad()
def eagle_accept_length(target: LlamaForCausalLM, draft: Draft, runs: Sequence[Run]) -> float:
    """Accept length of the EAGLE-3 chain of `DRAFTED` tokens."""

    def propose(run: Run) -> Callable[[int], Sequence[int]]:
        ids = torch.tensor([[*run.prompt, *run.output]], device=target.device)
        embeds, captured, _ = target_states(target, ids)
        dtype = draft.fc.weight.dtype
        best = [x[0].argmax(-1).tolist() for x in draft(embeds.to(dtype), captured.to(dtype), DRAFTED)]
        # With n output tokens known the last one is token P + n - 1; depth j at position P + n - 2 + j predicts
        # token P + n + j, on the known tokens between: right only as long as the chain was, which is all that counts.
        first = len(run.prompt) - 2
        return lambda n: [best[j][first + n + j] for j in range(DRAFTED) if first + n + j < len(best[j])]

    return accept_length(runs, propose)


def lookup_accept_length(runs: Sequence[Run]) -> float:
    """Accept length of prompt lookup: what followed the latest earlier place of the longest suffix, same text only."""

    def propose(run: Run) -> Callable[[int], Sequence[int]]:
        text = [*run.prompt, *run.output]

        def guess(known: int) -> Sequence[int]:
            seen = text[: len(run.prompt) + known]
            for size in range(min(NGRAM_MAX, len(seen) - 1), 0, -1):
                suffix = seen[-size:]
                for end in range(len(seen) - 1, size - 1, -1):
                    if seen[end - size : end] == suffix:
                        # The found place may run into the suffix itself: go on with what was just proposed.
                        follow = list(seen[end : end + DRAFTED])
                        while len(follow) < DRAFTED:
                            follow.append(follow[len(follow) - (len(seen) - end)])
                        return follow
            return []

        return guess

    return accept_length(runs, propose)


def ngram_accept_length(runs: Sequence[Run]) -> float:
    """Accept length of an n-gram cache that keeps all earlier requests, as SGLang's NGRAM trie does.

    Each draft token is the most frequent follower of the longest suffix (to `NGRAM_MAX`) seen before.
    """
    followers: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def learn(text: Sequence[int], start: int) -> None:
        for i in range(max(1, start), len(text)):
            for size in range(1, min(NGRAM_MAX, i) + 1):
                followers[tuple(text[i - size : i])][text[i]] += 1

    def follow(text: list[int]) -> int | None:
        for size in range(min(NGRAM_MAX, len(text)), 0, -1):
            found = followers.get(tuple(text[-size:]))
            if found:
                return found.most_common(1)[0][0]
        return None

    def propose(run: Run) -> Callable[[int], Sequence[int]]:
        text = [*run.prompt, *run.output]
        learned = 0

        def guess(known: int) -> Sequence[int]:
            nonlocal learned
            end = len(run.prompt) + known
            learn(text[:end], learned)
            learned = end
            drafted: list[int] = []
            while len(drafted) < DRAFTED and (token := follow([*text[:end], *drafted])) is not None:
                drafted.append(token)
            return drafted

        return guess

    return accept_length(runs, propose)


def loops(output: Sequence[int]) -> bool:
    """Whether the output ends in the same piece, of at most 64 tokens, twice in a row (24 tokens in all at least)."""
    for period in range(1, 65):
        compared = max(period, 24 - period)
        if len(output) >= compared + period and all(output[-i] == output[-i - period] for i in range(1, compared + 1)):
            return True
    return False
