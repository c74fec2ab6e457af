"""The lines of the memory ledger: what is loaded, what the pool is given, what the slack pays for. Bytes on one GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sglang_bw.host.gpus import GIB
from sglang_bw.plan import kv, overhead
from sglang_bw.plan.estimate import estimate
from sglang_bw.plan.inventory import Inventory, Role
from sglang_bw.plan.settings import EngineSettings
from sglang_bw.plan.shapes import ModelShape, Parallel
from sglang_bw.plan.split import Loading, rank_bytes, tables_bytes

Group = Literal["load", "pool", "slack"]


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
class Weights:
    """The tensors of a target and its draft; estimated from the shapes where they were not read."""

    target: Inventory
    draft: Inventory | None = None

    @property
    def measured(self) -> bool:
        """Whether all come from headers."""
        return self.target.measured and (self.draft is None or self.draft.measured)


@dataclass(frozen=True)
class Load:
    """What is on a GPU when the pool is sized, and the draft's weights, which come before or after."""

    target: ModelShape
    draft: ModelShape | None
    parallel: Parallel
    settings: EngineSettings
    weights: Weights

    @property
    def loading(self) -> Loading:
        """What of the settings changes the division."""
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
            lines.append(Line("symmetric memory", int(self.settings.symm_mem_gib * GIB), "load"))
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


def kept_for_images(target: ModelShape, settings: EngineSettings) -> int:
    """Return the bytes that a multimodal model keeps from the pool."""
    if not target.multimodal or settings.language_only:
        return 0
    reserve = settings.release.multimodal_reserve_mib
    return (reserve + (1024 if reserve and settings.gpu_transport else 0)) << 20


def pool_lines(made: kv.Pool, settings: EngineSettings) -> Iterator[Line]:
    """Yield what the fraction gives to the pools."""
    tokens = max(0, made.tokens)
    target = made.cell.full + made.cell.window * (settings.swa_ratio if made.cell.full else 1)
    yield Line("KV pool target", int(tokens * target), "pool", note=f"{target:,.0f} B a token")
    if made.cell.draft:
        yield Line("KV pool draft", tokens * made.cell.draft, "pool", note=f"{made.cell.draft:,} B a token")
    if made.states:
        yield Line("linear-attention states", made.states.bytes, "pool", note=f"{made.states.slots} slots")
        if made.states.draft_bytes:
            yield Line("states of verified drafts", made.states.draft_bytes, "pool")


def slack_lines(
    target: ModelShape,
    draft: ModelShape | None,
    parallel: Parallel,
    settings: EngineSettings,
    load: Load,
    made: kv.Pool,
    stage: int,
) -> Iterator[Line]:
    """Yield what comes out of the memory that the fraction leaves."""
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
    if upkeep := overhead.draft_upkeep(target, settings, made.max_requests):
        yield Line("hidden states kept for the draft", upkeep, "slack", note="16 tokens of each request")
    if buffers := overhead.speculative_graph_buffers(target, settings):
        note = f"{settings.decode_max_bs} requests x {settings.context_length:,} tokens"
        yield Line("verify buffers (FlashInfer)", buffers, "slack", True, note)
    if images := kept_for_images(target, settings):
        yield Line("multimodal caches", images, "slack", note="kept from the pool")
    if activations := overhead.activations(target, parallel, settings):
        yield Line(
            "activations and workspaces",
            activations,
            "slack",
            True,
            f"prefill of {settings.chunked_prefill_size:,} tokens",
        )
