"""Where the memory of one GPU goes, before anything is loaded: the ledger, its verdict, and what to try instead."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_bw.errors import CheckpointError
from sglang_bw.host.boards import Board
from sglang_bw.plan import kv, overhead
from sglang_bw.plan.estimate import estimate
from sglang_bw.plan.fraction import with_default_fraction
from sglang_bw.plan.lines import Line as Line
from sglang_bw.plan.lines import Load, kept_for_images, pool_lines, slack_lines
from sglang_bw.plan.lines import Weights as Weights
from sglang_bw.plan.settings import EngineSettings
from sglang_bw.plan.shapes import ModelShape, Parallel, worst_stage
from sglang_bw.plan.verdict import Verdict as Verdict
from sglang_bw.plan.verdict import judge, least_fraction, too_long


@dataclass(frozen=True)
class MemoryLedger:
    """The memory of the fullest GPU.

    :ivar free_start: bytes free before anything is loaded.
    :ivar free_after_load: bytes free when weights are loaded.
    :ivar left: bytes of the slack that no line takes.
    :ivar cell: bytes of one token.
    :ivar kv_tokens: tokens of the KV pool.
    :ivar context: tokens of one request, asked for or the longest that the settings allow.
    :ivar requests: how many requests of ``context`` tokens the pool holds.
    :ivar max_requests: most requests that the engine runs at once.
    :ivar least_fraction: smallest ``--mem-fraction-static`` that holds one request of the context asked for, or one
        prefill pass; ``None`` when none does.
    :ivar reasons: why the verdict is not ``fits``.
    :ivar measured: whether all weights come from safetensors headers.
    """

    board: Board
    parallel: Parallel
    settings: EngineSettings
    stage: int
    lines: tuple[Line, ...]
    free_start: int
    free_after_load: int
    left: int
    cell: kv.Cell
    states: kv.States | None
    kv_tokens: int
    context: int
    requests: int
    max_requests: int
    least_fraction: float | None
    verdict: Verdict
    reasons: tuple[str, ...]
    measured: bool

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as plain values."""
        return {
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "board": self.board.name,
            "memory_mib": self.board.memory_mib,
            "parallel": dataclasses.asdict(self.parallel),
            "stage": self.stage,
            "mem_fraction_static": self.settings.mem_fraction_static,
            "least_mem_fraction_static": self.least_fraction,
            "settings": self.settings.source,
            "weights": "safetensors headers" if self.measured else "estimate from config.json",
            "free_start_bytes": self.free_start,
            "free_after_load_bytes": self.free_after_load,
            "slack_left_bytes": self.left,
            "kv_bytes_per_token": {
                "target": self.cell.full,
                "window": self.cell.window,
                "draft": self.cell.draft,
                "draft_unpriced": self.cell.unpriced,
            },
            "kv_tokens": self.kv_tokens,
            "context": self.context,
            "requests_of_context": self.requests,
            "max_requests": self.max_requests,
            "state_slots": self.states.slots if self.states else None,
            "lines": [dataclasses.asdict(line) for line in self.lines],
        }


def ledger(
    target: ModelShape,
    draft: ModelShape | None,
    board: Board,
    parallel: Parallel,
    settings: EngineSettings,
    *,
    weights: Weights | None = None,
    context: int | None = None,
    free_start: int | None = None,
    free_after_load: int | None = None,
) -> MemoryLedger:
    """Work out the memory of the fullest GPU.

    :param draft: of its own checkpoint; ``None`` with the target's own MTP head. Settings without speculation leave
        it out.
    :param weights: from headers; estimated from the shapes when not given.
    :param context: tokens of the requests that shall fit.
    :param free_start: bytes, when they are known, for example from a log.
    :param free_after_load: the same.
    :raises CheckpointError: sizes contradict each other, or the KV cache cannot be priced.
    """
    parallel.check(target)
    settings.check()
    if settings.algorithm is None:
        draft = None
    weights = weights or Weights(estimate(target), estimate(draft) if draft else None)
    load = Load(target, draft, parallel, settings, weights)
    stage = worst_stage(
        parallel, target.layers, lambda index, _first, _end: sum(line.bytes for line in load.lines(index))
    )
    start = overhead.free_at_start(board, parallel) if free_start is None else free_start
    after = start - sum(line.bytes for line in load.lines(stage)) if free_after_load is None else free_after_load

    def sized(fraction: float) -> kv.Pool:
        rest = after - start * (1 - fraction) - kept_for_images(target, settings)
        return kv.pool(rest, target, draft, parallel, settings, stage)

    made = sized(settings.mem_fraction_static)
    longest = settings.context_length or target.context
    # Without a context to hold, a pool is of some use when one pass of prefill fits.
    needed = context or min(longest or settings.chunked_prefill_size, max(2048, settings.chunked_prefill_size))
    slack = int(start * (1 - settings.mem_fraction_static)) + kept_for_images(target, settings)
    taken = tuple(slack_lines(target, draft, parallel, settings, load, made, stage))
    left = slack - sum(line.bytes for line in taken)
    least = least_fraction(sized, needed)
    verdict, reasons = judge(made, needed, bool(context), left, least, after, start, settings)
    if refused := too_long(context, longest, target.context):
        least, verdict, reasons = None, "does not fit", refused
    return MemoryLedger(
        board=board,
        parallel=parallel,
        settings=settings,
        stage=stage,
        lines=(*load.lines(stage), *pool_lines(made, settings), *taken),
        free_start=start,
        free_after_load=after,
        left=left,
        cell=made.cell,
        states=made.states,
        kv_tokens=max(0, made.tokens),
        context=context or longest,
        requests=0 if refused else max(0, made.tokens) // (context or longest or 1),
        max_requests=made.max_requests,
        least_fraction=least,
        verdict=verdict,
        reasons=reasons,
        measured=weights.measured,
    )


@dataclass(frozen=True)
class Alternative:
    """What a user would try next.

    :ivar title: what is different.
    :ivar flags: the flags that make it so.
    :ivar ledger: ``None`` when the model cannot be divided so.
    :ivar problem: why not.
    :ivar plain: it is the launch without speculation.
    :ivar warned: rules that warn of it.
    """

    title: str
    flags: str
    ledger: MemoryLedger | None
    problem: str = ""
    plain: bool = False
    warned: tuple[str, ...] = ()


def alternatives(
    target: ModelShape,
    draft: ModelShape | None,
    board: Board,
    parallel: Parallel,
    settings: EngineSettings,
    *,
    weights: Weights | None = None,
    context: int | None = None,
) -> list[Alternative]:
    """Return the ledgers of what a user would try next: another KV dtype, graph size, fraction, and experts apart."""
    tried = []
    for title, flags, division, changed in _variants(target, parallel, settings):
        plain = bool(settings.algorithm) and not changed.algorithm
        try:
            changed = with_default_fraction(changed, target, board, division)
            made = ledger(target, draft, board, division, changed, weights=weights, context=context)
            tried.append(Alternative(title, flags, made, plain=plain))
        except CheckpointError as error:
            tried.append(Alternative(title, flags, None, error.message, plain))
    return tried


def _variants(
    target: ModelShape, parallel: Parallel, settings: EngineSettings
) -> Iterator[tuple[str, str, Parallel, EngineSettings]]:
    change = dataclasses.replace
    if kv.element_bytes(settings.kv_cache_dtype, target) > 1:
        yield "FP8 KV cache", "--kv-cache-dtype fp8_e4m3", parallel, change(settings, kv_cache_dtype="fp8_e4m3")
    if (size := settings.decode_max_bs) > 16:
        smaller = 16 if size <= 64 else 64
        name = "--cuda-graph-max-bs-decode" if settings.release.version >= (0, 5, 17) else "--cuda-graph-max-bs"
        yield f"graphs up to {smaller}", f"{name} {smaller}", parallel, change(settings, decode_max_bs=smaller)
    higher = min(0.95, math.ceil(settings.mem_fraction_static * 20 + 1) / 20)
    if higher > settings.mem_fraction_static:
        yield (
            f"fraction {higher:.2f}",
            f"--mem-fraction-static {higher:.2f}",
            parallel,
            change(settings, mem_fraction_static=higher, fraction_is_default=False),
        )
    if target.experts and parallel.tp > 1 and parallel.ep == 1:
        apart = change(parallel, ep=parallel.tp)
        yield "experts apart (EP)", f"--ep-size {parallel.tp}", apart, settings
    elif parallel.ep > 1:
        yield (
            "experts divided (TP)",
            "--ep-size 1 --moe-a2a-backend none",
            change(parallel, ep=1),
            change(settings, a2a="none"),
        )
    if settings.algorithm:
        without = change(settings, algorithm=None, draft_is_mtp=False, draft_tokens=0, steps=0)
        yield "without speculation", "no --speculative-algorithm", parallel, without
