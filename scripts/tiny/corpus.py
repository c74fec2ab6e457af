"""Token rows of training text, written by several processes from one seed."""

from __future__ import annotations

import random
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt

from tiny.documents import Writer
from tiny.settings import EOS
from tiny.tokens import encode

_SHARD = 1024  # rows a shard; fixed, so that the text does not depend on how many processes write it

Rows = npt.NDArray[np.uint16]


def training_rows(count: int, length: int, seed: int, workers: int) -> Rows:
    """`count` rows of `length` tokens. Each begins with a new document, more follow, and the last one is cut."""
    shards = -(-count // _SHARD)
    work = partial(_shard, length=length, seed=seed)
    if workers == 1:
        parts = [work(i) for i in range(shards)]
    else:
        with ProcessPoolExecutor(workers) as pool:
            parts = list(pool.map(work, range(shards)))
    return np.concatenate(parts)[:count]


def _shard(index: int, length: int, seed: int) -> Rows:
    writer = Writer.training()
    rng = random.Random(f"{seed}/{index}")
    rows = np.empty((_SHARD, length), dtype=np.uint16)
    for row in rows:
        ids: list[int] = []
        while len(ids) < length:
            ids += [*encode(writer.document(rng)), EOS]
        row[:] = ids[:length]
    return rows
