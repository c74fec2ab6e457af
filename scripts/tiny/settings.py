"""Shapes and training settings of the pair."""

from __future__ import annotations

from dataclasses import dataclass

VOCAB = 260
BOS, EOS, PAD, UNK = 256, 257, 258, 259
"""Token ids 0..255 are the byte values themselves."""

LAYERS, HIDDEN, FEED_FORWARD = 12, 192, 320
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
"""Head size 64 and 4 / 2 heads: GPU attention kernels take it, and tensor parallelism to 4 divides it."""
DRAFT_FEED_FORWARD = 512
MAX_POSITION = 2048
NORM_EPS = 1e-5
ROPE_THETA = 10000.0

CAPTURED = (2, LAYERS // 2, LAYERS - 3)
"""Layers whose *input* (the residual stream before the layer's norm) feeds the draft.

`LlamaForCausalLM.set_eagle3_layers_to_capture` of SGLang captures the input of layers [2, n // 2, n - 3] when the
draft's configuration names none. In transformers that is `hidden_states[2], [n // 2], [n - 3]`.
"""


@dataclass(frozen=True)
class Settings:
    """One way to train the pair. Row lengths are in tokens (= bytes); a batch is in rows."""

    target_steps: int
    target_batch: int
    target_row: int
    target_rate: float
    rollout_batches: int
    """Batches of the target's own continuations that the draft is trained on."""
    rollout_rows: int
    rollout_row: int
    draft_steps: int
    draft_batch: int
    draft_rate: float
    unroll: int = 5
    """Draft steps of the training-time test; the engine's `--speculative-num-steps` may go to this."""


PRESETS = {
    "gpu": Settings(
        target_steps=1300, target_batch=128, target_row=1024, target_rate=3e-3,
        rollout_batches=6, rollout_rows=4096, rollout_row=384,
        draft_steps=1000, draft_batch=128, draft_rate=2e-3,
    ),
    "cpu": Settings(
        target_steps=1500, target_batch=8, target_row=512, target_rate=2e-3,
        rollout_batches=4, rollout_rows=256, rollout_row=256,
        draft_steps=500, draft_batch=16, draft_rate=2e-3,
    ),
    "smoke": Settings(
        target_steps=4, target_batch=2, target_row=128, target_rate=1e-3,
        rollout_batches=2, rollout_rows=8, rollout_row=96,
        draft_steps=3, draft_batch=4, draft_rate=1e-3, unroll=3,
    ),
}  # fmt: skip
