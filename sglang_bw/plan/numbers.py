"""The numbers of a command line, checked before anything is computed from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sglang_bw.errors import CheckpointError

_MOST = 1 << 40


class _Range(NamedTuple):
    """What a setting may be, both ends included.

    :ivar several: it may be a list.
    """

    least: float
    most: float = _MOST
    whole: bool = True
    several: bool = False


# By the engine's field names: the settings from which the plan computes.
_RANGES: Mapping[str, _Range] = {
    "mem_fraction_static": _Range(0, 1, whole=False),
    "context_length": _Range(1),
    "page_size": _Range(1),
    "chunked_prefill_size": _Range(-1),
    "max_prefill_tokens": _Range(1),
    "max_running_requests": _Range(1),
    "max_total_tokens": _Range(1),
    "cuda_graph_max_bs": _Range(0),
    "cuda_graph_max_bs_decode": _Range(0),
    "cuda_graph_bs": _Range(1, several=True),
    "cuda_graph_bs_decode": _Range(1, several=True),
    "max_mamba_cache_size": _Range(1),
    "mamba_full_memory_ratio": _Range(0, whole=False),
    "swa_full_tokens_ratio": _Range(0, 1, whole=False),
    "ep_num_redundant_experts": _Range(0),
    "moe_dense_tp_size": _Range(1),
    # A chain this long has no use; the bound keeps a slip of the finger from being computed step by step.
    "speculative_num_steps": _Range(1, 256),
    "speculative_eagle_topk": _Range(1, 256),
    "speculative_num_draft_tokens": _Range(1, 4096),
}


def check(asked: Mapping[str, Any]) -> None:
    """Check what a user or a recipe asks for.

    :param asked: the engine's field name -> number, text, list, or ``True`` for a flag without a value.
    :raises CheckpointError: a setting is not the number it must be; names every finding.
    """
    findings = [line for name, allowed in _RANGES.items() if name in asked for line in _finding(name, asked, allowed)]
    if findings:
        raise CheckpointError(
            "\n".join(["the settings make no sense:", *(f"  {line}" for line in findings)]),
            hint="Correct the flag behind '--', or the recipe.",
        )


def _finding(name: str, asked: Mapping[str, Any], allowed: _Range) -> Iterator[str]:
    value, flag = asked[name], f"--{name.replace('_', '-')}"
    values = value if isinstance(value, list) else [value]
    if value is True:
        yield f"{flag} has no value"
    elif len(values) > 1 and not allowed.several:
        yield f"{flag} takes one value, not {len(values)}"
    elif not all(_is_number(each, whole=allowed.whole) for each in values):
        kind = "a whole number" if allowed.whole else "a number"
        yield f"{flag} is {' '.join(map(str, values))}, not {kind}"
    elif not all(allowed.least <= each <= allowed.most for each in values):
        end = f"{allowed.least:g} or more" if allowed.most == _MOST else f"{allowed.least:g} to {allowed.most:g}"
        yield f"{flag} is {' '.join(map(str, values))}, expected {end}"


def _is_number(value: object, *, whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return isinstance(value, int) or not whole
