"""Where the memory of one GPU goes, before anything is loaded: the ledger, its verdict, and what to try instead."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sglang_bw.errors import CheckpointError
from sglang_bw.host.boards import Board
from sglang_bw.plan import kv, overhead
from sglang_bw.plan.estimate import estimate
from sglang_bw.plan.fraction import with_default_fraction
from sglang_bw.plan.inventory import Inventory, Role
from sglang_bw.plan.settings import EngineSettings
from sglang_bw.plan.shapes import ModelShape, Parallel, worst_stage
from sglang_bw.plan.split import Loading, rank_bytes, tables_bytes

Verdict = Literal["fits", "tight", "does not fit"]
Group = Literal["load", "pool", "slack"]

_GIB = 1 << 30
_LEAST_POOL = _GIB  # about 1 % of a large board, which is how well weights can be told from their headers
_LEAST_SLACK = _GIB  # field data: a pool that left 53 MiB started, and ran out of memory with the first request


@dataclass(frozen=True)
class Line:
    """One line of the ledger.

    :ivar bytes: on one GPU.
    :ivar group: ``load``: there before the pool is sized; ``pool``: what ``--mem-fraction-static`` gives;
        ``slack``: taken from what the fraction leaves.
    :ivar estimated: a rule of thumb, neither read nor restated.
    :ivar note: how it comes about.
    """

    name: str
    bytes: int
    group: Group
    estimated: bool = False
    note: str = ""


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


@dataclass(frozen=True)
class Weights:
    """The tensors of a target and its draft; estimated from the shapes where they were not read."""

    target: Inventory
    draft: Inventory | None = None

    @property
    def measured(self) -> bool:
        """Whether all come from headers."""
        return self.target.measured and (self.draft is None or self.draft.measured)


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

    :param draft: of its own checkpoint; ``None`` without speculation, or with the target's own MTP head.
    :param weights: from headers; estimated from the shapes when not given.
    :param context: tokens of the requests that shall fit.
    :param free_start: bytes, when they are known, for example from a log.
    :param free_after_load: the same.
    :raises CheckpointError: sizes contradict each other, or the KV cache cannot be priced.
    """
    parallel.check(target)
    settings.check()
    weights = weights or Weights(estimate(target), estimate(draft) if draft else None)
    load = _Load(target, draft, parallel, settings, weights)
    stage = worst_stage(
        parallel, target.layers, lambda index, _first, _end: sum(line.bytes for line in load.lines(index))
    )
    start = overhead.free_at_start(board, parallel) if free_start is None else free_start
    after = start - sum(line.bytes for line in load.lines(stage)) if free_after_load is None else free_after_load

    def sized(fraction: float) -> kv.Pool:
        rest = after - start * (1 - fraction) - _kept_for_images(target, settings)
        return kv.pool(rest, target, draft, parallel, settings, stage)

    made = sized(settings.mem_fraction_static)
    longest = settings.context_length or target.context
    # Without a context to hold, a pool is of some use when one pass of prefill fits.
    needed = context or min(longest or settings.chunked_prefill_size, max(2048, settings.chunked_prefill_size))
    slack = int(start * (1 - settings.mem_fraction_static)) + _kept_for_images(target, settings)
    taken = tuple(_slack_lines(target, draft, parallel, settings, load, made, stage))
    left = slack - sum(line.bytes for line in taken)
    least = _least_fraction(sized, needed)
    verdict, reasons = _judge(made, needed, bool(context), left, least, after, start, settings)
    return MemoryLedger(
        board=board,
        parallel=parallel,
        settings=settings,
        stage=stage,
        lines=(*load.lines(stage), *_pool_lines(made, settings), *taken),
        free_start=start,
        free_after_load=after,
        left=left,
        cell=made.cell,
        states=made.states,
        kv_tokens=max(0, made.tokens),
        context=context or longest,
        requests=max(0, made.tokens) // (context or longest or 1),
        max_requests=made.max_requests,
        least_fraction=least,
        verdict=verdict,
        reasons=reasons,
        measured=weights.measured,
    )


@dataclass(frozen=True)
class _Load:
    """What is on a GPU when the pool is sized, and the draft's weights, which come before or after."""

    target: ModelShape
    draft: ModelShape | None
    parallel: Parallel
    settings: EngineSettings
    weights: Weights

    @property
    def loading(self) -> Loading:
        settings = self.settings
        return Loading(
            shared_whole=settings.shared_whole,
            dense_whole=settings.dense_whole,
            head_by_attention=settings.head_by_attention,
            redundant_experts=settings.redundant_experts,
            online=settings.quantization,
        )

    def lines(self, stage: int) -> list[Line]:
        """Return what is loaded before the pool is sized."""
        source = "safetensors headers" if self.weights.target.measured else "estimate from config.json"
        own = rank_bytes(self.weights.target, self.target, self.parallel, self.loading, stage)
        lines = [Line("weights target", own, "load", not self.weights.target.measured, source)]
        draft = self.draft_line(stage)
        if draft and self.settings.release.draft_counted:
            lines.append(draft)
        workspace = overhead.all_to_all(self.target, self.parallel, self.settings)
        if workspace:
            lines.append(Line("all-to-all workspace", workspace, "load", note=f"--moe-a2a-backend {self.settings.a2a}"))
        if self.settings.symm_mem_gib:
            lines.append(Line("symmetric memory", int(self.settings.symm_mem_gib * _GIB), "load"))
        lines.append(Line("loader's rest", overhead.LOADER_REST, "load", True, "what logs show beyond the weights"))
        return lines

    def draft_line(self, stage: int) -> Line | None:
        """Return the draft's weights: with its own embedding and head, which it gives up after the pool is sized."""
        if stage != self.parallel.pp - 1 or not (self.draft or self.settings.draft_is_mtp):
            return None
        if self.draft is None:
            part = rank_bytes(self.weights.target, self.target, self.parallel, self.loading, stage, "mtp")
            tables = sum(tables_bytes(self.target, self.parallel, self.loading))
            measured = self.weights.target.measured and bool(self.weights.target.total("mtp"))
            if not part:
                part = rank_bytes(estimate(self.target), self.target, self.parallel, self.loading, stage, "mtp")
            return Line(
                "weights draft", part + tables, "load", not measured, "MTP head, with an embedding and output head"
            )
        single = Parallel(tp=self.parallel.tp, dp=self.parallel.dp)
        inventory = self.weights.draft or estimate(self.draft)
        held = rank_bytes(inventory, self.draft, single, self.loading)
        for missing, size in zip(_tables(inventory), tables_bytes(self.draft, single, self.loading), strict=True):
            held += 0 if missing else size
        return Line(
            "weights draft",
            held,
            "load",
            not inventory.measured,
            "with an embedding of its own until the pool is sized",
        )


def _tables(inventory: Inventory) -> tuple[bool, bool]:
    return inventory.has(Role.EMBEDDING), inventory.has(Role.HEAD)


def _kept_for_images(target: ModelShape, settings: EngineSettings) -> int:
    if not target.multimodal or settings.language_only:
        return 0
    reserve = settings.release.multimodal_reserve_mib
    return (reserve + (1024 if reserve and settings.gpu_transport else 0)) << 20


def _pool_lines(made: kv.Pool, settings: EngineSettings) -> Iterator[Line]:
    tokens = max(0, made.tokens)
    target = made.cell.full + made.cell.window * (settings.swa_ratio if made.cell.full else 1)
    yield Line("KV pool target", int(tokens * target), "pool", note=f"{target:,.0f} B a token")
    if made.cell.draft:
        yield Line("KV pool draft", tokens * made.cell.draft, "pool", note=f"{made.cell.draft:,} B a token")
    if made.states:
        yield Line("linear-attention states", made.states.bytes, "pool", note=f"{made.states.slots} slots")
        if made.states.draft_bytes:
            yield Line("states of verified drafts", made.states.draft_bytes, "pool")


def _slack_lines(
    target: ModelShape,
    draft: ModelShape | None,
    parallel: Parallel,
    settings: EngineSettings,
    load: _Load,
    made: kv.Pool,
    stage: int,
) -> Iterator[Line]:
    if not settings.release.draft_counted and (line := load.draft_line(stage)):
        yield dataclasses.replace(line, group="slack", note="this engine loads it after the pool is sized")
    if unpriced := made.cell.unpriced * max(0, made.tokens):
        yield Line("KV pool draft, not counted", unpriced, "slack", note=f"{made.cell.unpriced:,} B a token")
    length = settings.context_length + 4 + settings.draft_tokens
    yield Line(
        "request table",
        made.max_requests * length * 4,
        "slack",
        note=f"{made.max_requests} requests x {length:,} tokens x 4 B",
    )
    if graphs := overhead.graphs(target, settings):
        yield Line("CUDA graphs", graphs, "slack", True, "the engine's own rule of thumb")
    if images := _kept_for_images(target, settings):
        yield Line("multimodal caches", images, "slack", note="kept from the pool")
    if activations := overhead.activations(target, parallel, settings):
        yield Line(
            "activations and workspaces",
            activations,
            "slack",
            True,
            f"prefill of {settings.chunked_prefill_size:,} tokens",
        )


def _least_fraction(sized: Callable[[float], kv.Pool], context: int) -> float | None:
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


def _judge(
    made: kv.Pool,
    context: int,
    asked: bool,
    left: int,
    least: float | None,
    after: int,
    start: int,
    settings: EngineSettings,
) -> tuple[Verdict, tuple[str, ...]]:
    fraction = settings.mem_fraction_static
    way_out = f"--mem-fraction-static {least:.3f} is the least that holds {context:,} tokens" if least else ""
    if after <= 0:
        return "does not fit", (f"the weights alone take {-after / _GIB:.1f} GiB more than the GPU has",)
    if made.tokens <= 0:
        missing = f"after the load {after / _GIB:.1f} GiB are free, and --mem-fraction-static {fraction:.4g} keeps "
        missing += f"{start * (1 - fraction) / _GIB:.1f} GiB of them from the KV pool"
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
        reasons.append(f"{left / _GIB:.1f} GiB are left beside graphs and activations, and 1 GiB is wise")
    return ("tight", tuple(reasons)) if reasons else ("fits", ())


@dataclass(frozen=True)
class Alternative:
    """What a user would try next.

    :ivar title: what is different.
    :ivar flags: the flags that make it so.
    :ivar ledger: ``None`` when the model cannot be divided so.
    :ivar problem: why not.
    """

    title: str
    flags: str
    ledger: MemoryLedger | None
    problem: str = ""


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
        try:
            changed = with_default_fraction(changed, target, board, division)
            made = ledger(target, draft, board, division, changed, weights=weights, context=context)
            tried.append(Alternative(title, flags, made))
        except CheckpointError as error:
            tried.append(Alternative(title, flags, None, error.message))
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
