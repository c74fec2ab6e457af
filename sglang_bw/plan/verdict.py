"""Whether a launch fits, and the smallest fraction with which it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from sglang_bw.host.gpus import GIB
from sglang_bw.plan import kv
from sglang_bw.plan.settings import EngineSettings

Verdict = Literal["fits", "tight", "does not fit"]

_LEAST_POOL = GIB  # about 1 % of a large board, which is how well weights can be told from their headers
_LEAST_SLACK = GIB  # field data: a pool that left 53 MiB started, and ran out of memory with the first request


def least_fraction(sized: Callable[[float], kv.Pool], context: int) -> float | None:
    """Return the smallest fraction, in thousandths, whose pool holds one request."""
    need = max(1, context)
    low, high = 0, 999
    if sized(high / 1000).tokens < need:
        return None
    while low < high:
        middle = (low + high) // 2
        if sized(middle / 1000).tokens >= need:
            high = middle
        else:
            low = middle + 1
    return high / 1000


def too_long(context: int | None, limit: int, model: int) -> tuple[str, ...]:
    """Return why the engine takes no request of a context, and what to ask instead; nothing where it takes them.

    :param context: tokens that a user named.
    :param limit: tokens of the longest request of the launch; 0: unknown.
    :param model: the model's own maximum.
    """
    if not (context and limit and context > limit):
        return ()
    if limit == model:
        told = f"requests of {context:,} tokens are longer than the model's maximum of {model:,}"
        return told, f"--context {limit} asks for the longest that it takes"
    told = f"requests of {context:,} tokens are longer than --context-length {limit} of this launch"
    more = f", or a --context-length up to the model's {model}" if model > limit else ""
    return told, f"--context {limit} asks for the longest that it takes{more}"


def judge(
    made: kv.Pool,
    context: int,
    asked: bool,
    left: int,
    least: float | None,
    after: int,
    start: int,
    settings: EngineSettings,
) -> tuple[Verdict, tuple[str, ...]]:
    """Return the verdict and, unless it fits, why.

    :param context: tokens that must fit; ``asked`` when a user named them.
    :param left: bytes of the slack that nothing takes.
    :param least: the smallest fraction that holds ``context``.
    :param after: bytes free after the load.
    :param start: bytes free before it.
    """
    fraction = settings.mem_fraction_static
    way_out = f"--mem-fraction-static {least:.3f} is the least that holds {context:,} tokens" if least else ""
    if after <= 0:
        return "does not fit", (f"the weights alone take {-after / GIB:.1f} GiB more than the GPU has",)
    if made.tokens <= 0:
        missing = f"after the load {after / GIB:.1f} GiB are free, and --mem-fraction-static {fraction:.4g} keeps "
        missing += f"{start * (1 - fraction) / GIB:.1f} GiB of them from the KV pool"
        return "does not fit", tuple(text for text in (missing, way_out) if text)
    reasons = []
    if made.tokens < context:
        what = "one request" if asked else "one prefill pass"
        reasons.append(f"the KV pool holds {made.tokens:,} tokens, less than {what} of {context:,}")
        reasons += [way_out] if way_out else []
        if asked:
            return "does not fit", tuple(reasons)
    elif made.bytes(settings.swa_ratio) < _LEAST_POOL:
        reasons.append(f"the KV pool holds {made.tokens:,} tokens; a load that takes 1 GiB more leaves none")
    if left < _LEAST_SLACK:
        reasons.append(f"{left / GIB:.1f} GiB are left beside graphs and activations, and 1 GiB is wise")
    return ("tight", tuple(reasons)) if reasons else ("fits", ())
