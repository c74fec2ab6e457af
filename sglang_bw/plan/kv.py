"""How many tokens a KV pool holds: bytes of a token, states of linear attention, and the engine's division of the rest.

Restates ``model_executor/pool_configurator.py`` and ``mem_cache/kv_cache_configurator.py`` of 0.5.23, and what the
releases since 0.5.9 did otherwise. Bytes throughout, for one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_bw.errors import CheckpointError
from sglang_bw.plan.releases import Release
from sglang_bw.plan.settings import EngineSettings
from sglang_bw.plan.shapes import LinearState, ModelShape, Parallel

_FP8 = {"fp8", "fp8_e4m3", "fp8_e5m2"}
_PLAIN = {"auto": 0, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2, "fp32": 4, "float32": 4}
_FP4 = {"nvfp4", "fp4_e2m1", "fp4_mx_block16"}
DTYPES = (*_PLAIN, *sorted(_FP8), "mxfp8", *sorted(_FP4))
_INDEX_BLOCK = 128  # elements of an FP8 index key that share a 4-byte scale
_CONV_BYTES = 2
_LEAST_REQUESTS, _MOST_REQUESTS = 2048, 4096


@dataclass(frozen=True)
class Cell:
    """Bytes of one token.

    :ivar full: in layers with full attention.
    :ivar window: in sliding-window layers, whose pool holds fewer tokens.
    :ivar draft: what the engine counts for the draft.
    :ivar draft_held: what the draft's pool really takes.
    """

    full: int
    window: int = 0
    draft: int = 0
    draft_held: int = 0

    def priced(self, swa_ratio: float) -> float:
        """Bytes by which the engine divides."""
        return self.full + self.draft + self.window * (swa_ratio if self.full else 1.0)

    @property
    def unpriced(self) -> int:
        """Bytes of a token that the draft takes beyond what the engine counts for it."""
        return max(0, self.draft_held - self.draft)


@dataclass(frozen=True)
class States:
    """The pool of linear-attention states.

    :ivar slots: states that are kept, one for each running or cached request.
    :ivar bytes: of all of them.
    :ivar draft_bytes: of those kept while drafts are verified.
    :ivar per_request: slots that one request needs.
    """

    slots: int
    bytes: int
    draft_bytes: int = 0
    per_request: int = 1


@dataclass(frozen=True)
class Pool:
    """What the engine makes of the bytes that are left.

    :ivar tokens: of the KV pool, a multiple of the page; 0 or less when nothing fits.
    :ivar cell: bytes of one token.
    :ivar states: of linear attention; ``None`` without.
    :ivar max_requests: most running requests.
    """

    tokens: int
    cell: Cell
    states: States | None
    max_requests: int

    def bytes(self, swa_ratio: float) -> int:
        """Bytes of the KV pool of target and draft, as far as they are counted."""
        return int(self.tokens * self.cell.priced(swa_ratio))


def element_bytes(dtype: str, shape: ModelShape) -> int:
    """Return the bytes of one stored element; 1 for the packed formats, whose cells are halved later.

    :raises CheckpointError: no such KV dtype.
    """
    if dtype == "auto":
        return 1 if shape.quantization.fp8_kv else shape.dtype_bytes
    if dtype in _PLAIN:
        return _PLAIN[dtype]
    if dtype in _FP8 or dtype in _FP4 or dtype == "mxfp8":
        return 1
    raise CheckpointError(f"{dtype!r} is no KV cache dtype", hint=f"Known: {', '.join(DTYPES)}.")


def cell(
    target: ModelShape, draft: ModelShape | None, parallel: Parallel, settings: EngineSettings, stage: int = 0
) -> Cell:
    """Return the bytes of one token on one GPU of a pipeline stage.

    :raises CheckpointError: the KV cache of the model cannot be priced, or its dtype is unknown.
    """
    if target.unpriced:
        raise CheckpointError(
            target.unpriced, hint="Only the engine can tell; start it, or read the pool from its log."
        )
    first, end = parallel.stage(target.layers, stage)
    dtype = settings.kv_cache_dtype
    layers = target.of_kind("full", first, end)
    one = _layer_bytes(target, parallel, dtype, scaled=_scaled(target, settings))
    index = _index_bytes(target, settings.release, first, end)
    window = target.of_kind("window", first, end) * _window_bytes(target, parallel, dtype)
    full = one * layers + index
    counted, held = _draft_cell(target, draft, parallel, settings, one, layers)
    return Cell(full, window, counted, held)


def _scaled(target: ModelShape, settings: EngineSettings) -> bool:
    return bool(target.indexer) and settings.sparse_scaled and settings.release.scaled_sparse_layout


def _layer_bytes(shape: ModelShape, parallel: Parallel, dtype: str, *, scaled: bool = False) -> int:
    size = element_bytes(dtype, shape)
    if latent := shape.latent:
        if scaled and dtype not in _FP4 and size == 1:
            # FP8 latent, a 4-byte scale for 128 of its elements, the rotary key in 16 bits.
            return latent.kv_rank + latent.kv_rank // _INDEX_BLOCK * 4 + latent.rope * 2
        elements = latent.width
        return elements // 2 + elements // 16 if dtype in _FP4 else elements * size
    heads = max(1, shape.kv_heads // parallel.attn_tp)
    return _heads_bytes(heads, shape.head_dim + shape.v_head_dim, dtype, size)


def _heads_bytes(heads: int, elements: int, dtype: str, size: int) -> int:
    count = heads * elements
    if dtype in _FP4:
        return count // 2 + count // 16
    return count * size + (count // 32 if dtype == "mxfp8" else 0)


def _window_bytes(shape: ModelShape, parallel: Parallel, dtype: str) -> int:
    if not shape.window:
        return 0
    heads = max(1, shape.window.kv_heads // parallel.attn_tp)
    return _heads_bytes(heads, shape.window.head_dim + shape.window.v_head_dim, dtype, element_bytes(dtype, shape))


def _index_bytes(shape: ModelShape, release: Release, first: int, end: int) -> int:
    if not shape.indexer:
        return 0
    layers = (
        sum(first <= layer < end for layer in shape.indexer.owners) if release.shared_index_is_free else end - first
    )
    return _index_key_bytes(shape) * layers


def _index_key_bytes(shape: ModelShape) -> int:
    index = shape.indexer
    return -(-(index.dim + index.dim // _INDEX_BLOCK * 4) // index.pool) if index else 0


def _draft_cell(
    target: ModelShape, draft: ModelShape | None, parallel: Parallel, settings: EngineSettings, one: int, layers: int
) -> tuple[int, int]:
    """Return what the engine counts for the draft, and what the draft's pool takes."""
    if settings.own_config_draft and draft:
        own = _own_cell(draft, parallel, settings)
        return (own, own) if settings.release.draft_counted else (0, own)
    if not settings.eagle:
        return 0, 0
    if draft is None:
        heads = (target.mtp_layers or 1) if settings.draft_is_mtp else 0
        as_target = heads * (one + _index_key_bytes(target))
        return (as_target if settings.release.draft_counted else 0), as_target
    own = _own_cell(draft, parallel, settings)
    if not settings.release.draft_counted:
        return 0, own
    if draft.mtp_layers:
        return draft.mtp_layers * (one + _index_key_bytes(target)), own
    if settings.release.draft_by_config:
        return own, own
    # Upstream: as so many more layers of the target; a config that names 0 MTP layers counts as none at all.
    counted_layers = 0 if draft.mtp_stated else draft.layers
    return counted_layers * (one + _index_key_bytes(target)) if layers else 0, own


def _own_cell(draft: ModelShape, parallel: Parallel, settings: EngineSettings) -> int:
    dtype = settings.draft_kv_cache_dtype or settings.kv_cache_dtype
    return draft.layers * (_layer_bytes(draft, parallel, dtype) + _index_key_bytes(draft))


def pool(
    rest: float,
    target: ModelShape,
    draft: ModelShape | None,
    parallel: Parallel,
    settings: EngineSettings,
    stage: int = 0,
    *,
    bytes_per_token: Cell | None = None,
) -> Pool:
    """Divide ``rest`` bytes as the engine does.

    :param rest: what weights and slack leave.
    :param bytes_per_token: when it is known better than from the shapes.
    :raises CheckpointError: see :func:`cell`.
    """
    one = bytes_per_token or cell(target, draft, parallel, settings, stage)
    states = None
    if target.linear:
        states = _states(rest, target, parallel, settings, stage)
        rest -= states.bytes + states.draft_bytes
    price = one.priced(settings.swa_ratio)
    tokens = int(rest // price) if price else settings.max_total_tokens or settings.context_length
    if settings.max_total_tokens:
        tokens = min(tokens, settings.max_total_tokens)
    tokens = tokens // settings.page_size * settings.page_size
    return Pool(tokens, one, states, max_requests(tokens, parallel, settings, states))


def max_requests(tokens: int, parallel: Parallel, settings: EngineSettings, states: States | None = None) -> int:
    """Return the most requests that run at once, for each attention group."""
    if tokens <= 0:
        return 0
    if settings.max_running_requests:
        most = max(1, settings.max_running_requests // parallel.dp)
    else:
        estimated = int(tokens / max(1, settings.context_length) * 512)
        most = max(min(estimated, _MOST_REQUESTS), _LEAST_REQUESTS)
    if settings.release.version >= (0, 5, 14) or not settings.max_running_requests:
        most = min(most, max(1, tokens // 2))
    return min(most, states.slots // states.per_request) if states else most


def state_bytes(state: LinearState, attn_tp: int, layers: int, dtype: str | None = None) -> int:
    """Return the bytes of one request's state on one GPU."""
    size = {"float32": 4, "bfloat16": 2, "float16": 2}.get(dtype or "", state.state_bytes)
    groups = state.key_heads if state.key_heads % attn_tp == 0 else state.key_heads + attn_tp - state.key_heads
    channels = (state.value_heads * state.value_dim + 2 * groups * state.key_dim) // attn_tp
    convolution = channels * (state.kernel - 1) * _CONV_BYTES
    return layers * (convolution + state.value_heads // attn_tp * state.value_dim * state.key_dim * size)


def _states(rest: float, target: ModelShape, parallel: Parallel, settings: EngineSettings, stage: int) -> States:
    assert target.linear is not None
    layers = max(target.of_kind("linear", *parallel.stage(target.layers, index)) for index in range(parallel.pp))
    one = state_bytes(target.linear, parallel.attn_tp, layers, settings.mamba_dtype)
    release = settings.release
    padding = release.state_padding
    running = max(1, (settings.max_running_requests or _MOST_REQUESTS) // parallel.dp)
    per_request = _slots_per_request(settings)
    verified = settings.draft_tokens if settings.algorithm else 0
    draft_bytes = 0
    if verified and not release.state_shares_budget:
        draft_bytes = one * running * verified
    if settings.max_mamba_cache_size:
        slots = settings.max_mamba_cache_size // parallel.dp
    elif settings.disable_radix_cache and settings.max_running_requests:
        slots = running
    else:
        budget = (rest - draft_bytes) * settings.mamba_ratio / (1 + settings.mamba_ratio)
        shared = verified if release.state_shares_budget else 0
        fixed = one * padding * (1 + shared)
        slots = int(max(0.0, budget - fixed) // (one * (1 + shared / per_request)))
    if verified and release.state_shares_budget:
        draft_bytes = one * (min(running, slots // per_request) + padding) * verified
    return States(slots, one * (slots + padding), draft_bytes, per_request)


def _slots_per_request(settings: EngineSettings) -> int:
    if settings.disable_radix_cache:
        return 1
    tracking = {"none": 0, "lazy": 1, "full": 1 if settings.disable_overlap else 2}
    return 3 + tracking[settings.mamba_extra_buffer]
