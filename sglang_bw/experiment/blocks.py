"""Parts of a block, measured one by one, as the one block that they are."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from sglang_bw.experiment.prompts import Prompt
from sglang_bw.experiment.quantiles import middle
from sglang_bw.ledger.record import Block, GpuUse, PolicyLook, RequestRow

_PARTS = 8


def split(prompts: Sequence[Prompt], concurrency: int) -> list[Sequence[Prompt]]:
    """Return up to eight parts of about the same size, each of at least twice the concurrency where there are several.

    A rest of fewer prompts than requests at a time would be measured at another concurrency.
    """
    count = max(1, min(_PARTS, len(prompts) // (2 * concurrency)))
    ends = [number * len(prompts) // count for number in range(count + 1)]
    return [prompts[begin:end] for begin, end in itertools.pairwise(ends)]


def joined(parts: Sequence[Block], position: int) -> Block:
    """Return the parts of a block as one; its times leave out what lay between the parts.

    :param position: of the block in the run.
    """
    spreads = [part.spread_s for part in parts if part.spread_s]
    offset = 0.0
    rows: list[RequestRow] = []
    looks: list[PolicyLook] = []
    for part in parts:
        rows += [row.model_copy(update={"began_s": row.began_s + offset}) for row in part.rows]
        # The policy lives on the server's clock, which runs between the parts as well.
        apart = (part.began - parts[0].began).total_seconds()
        looks += [look.model_copy(update={"at_s": look.at_s + apart}) for look in part.policy]
        offset += part.seconds
    return parts[0].model_copy(
        update={
            "position": position,
            "seconds": offset,
            "rows": tuple(rows),
            "spread_s": middle(spreads) if spreads else None,
            "client_lag_s": max(part.client_lag_s for part in parts),
            "client_cpu": max(part.client_cpu for part in parts),
            "kv_use": max((part.kv_use for part in parts if part.kv_use is not None), default=None),
            "gpu": gpu_use([part.gpu for part in parts if part.gpu]),
            "graph_share": mean([part.graph_share for part in parts if part.graph_share is not None]),
            "policy": tuple(looks),
        }
    )


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; ``None`` of nothing."""
    return statistics.fmean(values) if values else None


def gpu_use(uses: Sequence[GpuUse]) -> GpuUse | None:
    """Return the medians of each GPU; ``None`` of nothing."""
    if not uses:
        return None
    fields = GpuUse.model_fields
    columns = {name: [getattr(use, name) for use in uses] for name in fields}
    medians = {
        name: tuple(statistics.median(board) for board in zip(*rows, strict=True)) for name, rows in columns.items()
    }
    return GpuUse(**medians)
