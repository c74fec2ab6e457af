"""Greedy tokens of servers against those of one without speculation."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from record.servers import Answer, Record, Server, accept_length

NEAR_ULP = 2.0
"""A first difference counts as a tie where the two tokens' logits are no farther apart, in units of bf16's last place.

Where kernels round differently each of the two may be off by a unit.
"""
_TOP = 8
_SHOWN = 12


@dataclass(frozen=True)
class Prompts:
    """Prompts of random tokens.

    :ivar tokens: of an answer.
    :ivar vocabulary: tokens of the model.
    """

    count: int
    tokens: int
    vocabulary: int
    length: int = 64

    @property
    def ids(self) -> list[list[int]]:
        """The prompts, the same every time."""
        dice = random.Random(0)
        return [[dice.randrange(10, self.vocabulary - 10) for _ in range(self.length)] for _ in range(self.count)]


def ask(server: Server, prompts: Prompts, at_once: int) -> list[Answer]:
    """Return the answers in the order of the prompts."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda ids: _one(server, prompts, ids), prompts.ids))


def reference(server: Server, prompts: Prompts) -> list[Answer]:
    """Return the answers of the server without speculation, one at a time, with its best tokens at every place."""
    return [_one(server, prompts, ids, return_logprob=True, top_logprobs_num=_TOP) for ids in prompts.ids]


def _one(server: Server, prompts: Prompts, ids: list[int], **more: Any) -> Answer:
    answer: Answer = server.generate(prompts.tokens, input_ids=ids, **more)
    return answer


def compare(known: list[Answer], found: list[Answer], vocabulary: int, near: float = NEAR_ULP) -> Record:
    """Return how many answers are the same, and how close the two tokens were where the others first differ.

    Lossless: every first difference is a tie of the reference's own bf16 logits, ``near`` units apart at most.
    """
    first = []
    for number, (one, two) in enumerate(zip(known, found, strict=True)):
        if one["output_ids"] != two["output_ids"]:
            first.append({"prompt": number, **_gap(one, two["output_ids"], vocabulary)})
    apart = [row for row in first if row["ulp"] is None or row["ulp"] > near]
    return {
        "prompts": len(known),
        "same": len(known) - len(first),
        "ties": len(first) - len(apart),
        "apart": len(apart),
        "lossless": not apart,
        "farthest_ulp": max((row["ulp"] for row in first if row["ulp"] is not None), default=0.0),
        "accept_length": round(accept_length(found), 3),
        "first_differences": first[:_SHOWN],
    }


def _gap(known: Answer, other: list[int], vocabulary: int) -> Record:
    """Return where two answers part, and the difference of the two logits there in bf16's last place.

    The engine tells log probabilities. With random weights logits are zero on average, so that a logit is about
    its log probability plus ln(vocabulary); its size gives the unit.
    """
    own = known["output_ids"]
    place = next(n for n, (one, two) in enumerate(zip(own, other, strict=True)) if one != two)
    scores = {token: value for value, token, _ in known["meta_info"]["output_top_logprobs"][place]}
    row: Record = {"at": place, "reference": own[place], "other": other[place], "ulp": None}
    if {own[place], other[place]} <= scores.keys():
        best = max(abs(scores[own[place]] + math.log(vocabulary)), 2.0**-20)
        unit = 2.0 ** (math.floor(math.log2(best)) - 7)
        row["ulp"] = round((scores[own[place]] - scores[other[place]]) / unit, 2)
    return row


def said(found: Record) -> str:
    """Return the comparison in a few words."""
    return f"{found['same']}/{found['prompts']} same, {found['ties']} ties, {found['apart']} apart"
