"""The target: a byte-level Llama, trained with the next-token loss on generated text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from tiny import settings as s
from tiny.corpus import Rows


def build_target() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=s.VOCAB,
        hidden_size=s.HIDDEN,
        intermediate_size=s.FEED_FORWARD,
        num_hidden_layers=s.LAYERS,
        num_attention_heads=s.HEADS,
        num_key_value_heads=s.KV_HEADS,
        head_dim=s.HEAD_DIM,
        max_position_embeddings=s.MAX_POSITION,
        rms_norm_eps=s.NORM_EPS,
        bos_token_id=s.BOS,
        eos_token_id=s.EOS,
        pad_token_id=s.PAD,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def train_target(
    model: LlamaForCausalLM, rows: Rows, settings: s.Settings, device: torch.device, log: Callable[[str], None]
) -> float:
    """Train in place (fp32 weights, bf16 arithmetic). Returns the mean loss of the last 50 steps, bits per byte."""
    model.to(device).train()
    step_model = torch.compile(model) if device.type == "cuda" else model
    optimizer, schedule = optimizer_for(model, settings.target_rate, settings.target_steps)
    recent: list[torch.Tensor] = []
    begun = time.monotonic()
    for step in range(settings.target_steps):
        lot = rows[step * settings.target_batch : (step + 1) * settings.target_batch]
        batch = torch.from_numpy(lot.astype("int64")).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = step_model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        recent = [*recent[-49:], loss.detach()]
        if step % max(1, settings.target_steps // 24) == 0 or step == settings.target_steps - 1:
            bits = torch.stack(recent).mean().item() / math.log(2)
            log(f"target step {step}: {bits:.4f} bits per byte, {time.monotonic() - begun:.0f} s")
    model.eval()
    return torch.stack(recent).mean().item() / math.log(2)


def optimizer_for(
    model: torch.nn.Module, rate: float, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW, no decay on norms; linear warm-up over 5 %, then a cosine to zero."""
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
    warm = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def rollouts(
    model: LlamaForCausalLM, rows: Rows, settings: s.Settings, device: torch.device, log: Callable[[str], None]
) -> torch.Tensor:
    """Let the target continue training rows cut at several lengths: [rows, rollout_row] tokens.

    Three quarters greedy, one quarter sampled at temperature 0.8. The end token does not stop a row: what the target
    writes next is a new document.
    """
    parts = []
    begun = time.monotonic()
    for i in range(settings.rollout_batches):
        lot = rows[i * settings.rollout_rows : (i + 1) * settings.rollout_rows]
        cut = (24, 48, 80, 120, 160)[i % 5] if settings.rollout_row > 200 else 24
        prompt = torch.from_numpy(lot[:, :cut].astype("int64")).to(device)
        sampled = i % 4 == 3
        choice = {"do_sample": True, "temperature": 0.8, "top_k": 0} if sampled else {"do_sample": False}
        parts.append(
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=settings.rollout_row - cut,
                eos_token_id=None,
                pad_token_id=s.PAD,
                **choice,
            ).cpu()
        )
        log(f"rollout batch {i}: {time.monotonic() - begun:.0f} s")
    return torch.cat(parts)
