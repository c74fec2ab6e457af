"""Speed of two engines with the same flags, in short alternating blocks."""

from __future__ import annotations

import math
import random
import statistics
import time

from .servers import Record, Server, accept_length

PROMPT_TOKENS = 64
Block = tuple[float, float]
"""Output tokens per second and accept length."""


def speed(stock: Server, patched: Server, batch: int, *, pairs: int, tokens: int, vocabulary: int) -> Record:
    """Alternate blocks of both servers at one batch size (A B B A ...) and compare neighbours."""
    for number in range(2):  # nothing is measured before both have run this batch size twice
        for server in (stock, patched):
            block(server, batch, tokens, vocabulary, seed=-1 - number)
    measured = []
    for number in range(pairs):
        order = (stock, patched) if number % 2 == 0 else (patched, stock)
        found = {server.name: block(server, batch, tokens, vocabulary, number) for server in order}
        measured.append((found["stock"], found["patched"]))
    return compare(measured)


def block(server: Server, batch: int, tokens: int, vocabulary: int, seed: int) -> Block:
    """Return output tokens per second and accept length of one batch; its prompts were never seen before."""
    dice = random.Random(f"{batch}/{seed}")
    prompts = [[dice.randrange(10, vocabulary - 10) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
    began = time.perf_counter()
    answers = server.generate(tokens, input_ids=prompts)
    seconds = time.perf_counter() - began
    produced = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    if produced != batch * tokens:
        raise RuntimeError(f"{server.name} answered {produced} tokens, not {batch * tokens}")
    return produced / seconds, accept_length(answers)


def compare(pairs: list[tuple[Block, Block]]) -> Record:
    """Return medians, and the ratio patched/stock with its 95 % interval (Student's t over logarithms of ratios)."""
    from scipy import stats

    logs = [math.log(patched[0] / stock[0]) for stock, patched in pairs]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    reach = float(stats.t.ppf(0.975, len(logs) - 1)) * error
    low, high = math.exp(mean - reach), math.exp(mean + reach)
    return {
        "pairs": len(pairs),
        "stock": round(statistics.median(stock[0] for stock, _ in pairs), 1),
        "patched": round(statistics.median(patched[0] for _, patched in pairs), 1),
        "accept_length": {
            "stock": round(statistics.fmean(stock[1] for stock, _ in pairs), 3),
            "patched": round(statistics.fmean(patched[1] for _, patched in pairs), 3),
        },
        "ratio": round(math.exp(mean), 4),
        "ratio_median": round(math.exp(statistics.median(logs)), 4),
        "interval": [round(low, 4), round(high, 4)],
        "half_width": round((high - low) / 2, 4),
        "blocks": [[round(stock[0], 1), round(patched[0], 1)] for stock, patched in pairs],
    }
