"""The EAGLE-3 draft, as SGLang's `models/llama_eagle3.py` computes it, and its training-time test.

Shapes: B rows, T positions, h hidden size. At position p the draft reads the embedding of token p + 1 (the target's
embedding table) and a hidden vector: for a position that the target has seen, `fc` of the target's three captured
states at p; for a position that is only drafted, the draft's own output (before the last norm) at p - 1. It predicts
token p + 2. Method: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test", 2025.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from tiny import settings as s
from tiny.target import optimizer_for


class Attention(nn.Module):
    """Grouped-query attention over [embedding, hidden] (width 2h)."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * s.HIDDEN, s.HEADS * s.HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(2 * s.HIDDEN, s.KV_HEADS * s.HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(2 * s.HIDDEN, s.KV_HEADS * s.HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(s.HEADS * s.HEAD_DIM, s.HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Attend with x [B, T, 2h] at unroll depth len(past); appends its keys and values to `past`.

        A query at depth j and position p belongs to the chain that left the target's states at p - j. It sees the
        depth-0 keys up to p - j, and of its own chain the depth-i key at p - j + i.
        """
        depth, length = len(past), x.shape[1]
        q, k, v = (_heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q), rotate(k)
        repeat = s.HEADS // s.KV_HEADS
        past.append((k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)))
        first_k, first_v = past[0]
        scale = 1 / math.sqrt(s.HEAD_DIM)
        rows = torch.arange(length, device=x.device)
        # A chain cannot begin before position 0; those rows (p < depth) are dropped from the loss and must stay finite.
        seen = rows[None, :] <= (rows[:, None] - depth).clamp(min=0)
        scores = [(q @ first_k.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))]
        chain = [(_shift(pk, depth - i), _shift(pv, depth - i)) for i, (pk, pv) in enumerate(past) if i > 0]
        scores += [(q * pk).sum(-1, keepdim=True) * scale for pk, _ in chain]
        weights = torch.cat(scores, -1).float().softmax(-1).to(first_v.dtype)
        out = weights[..., :length] @ first_v
        for i, (_, pv) in enumerate(chain):
            out = out + weights[..., length + i : length + i + 1] * pv
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """The gated feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.HIDDEN, s.DRAFT_FEED_FORWARD, bias=False)
        self.up_proj = nn.Linear(s.HIDDEN, s.DRAFT_FEED_FORWARD, bias=False)
        self.down_proj = nn.Linear(s.DRAFT_FEED_FORWARD, s.HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., h] to [..., h]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The draft's one decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = MLP()
        self.hidden_norm = nn.RMSNorm(s.HIDDEN, eps=s.NORM_EPS)
        self.input_layernorm = nn.RMSNorm(s.HIDDEN, eps=s.NORM_EPS)
        self.post_attention_layernorm = nn.RMSNorm(s.HIDDEN, eps=s.NORM_EPS)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """One draft step: embeddings and hidden states [B, T, h] to the hidden states before the last norm."""
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(x, past)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Draft(nn.Module):
    """Parameter names are those of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * s.HIDDEN, s.HIDDEN, bias=False)
        self.midlayer = MidLayer()
        self.norm = nn.RMSNorm(s.HIDDEN, eps=s.NORM_EPS)
        self.lm_head = nn.Linear(s.HIDDEN, s.VOCAB, bias=False)

    def forward(self, embeds: torch.Tensor, captured: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """Unroll `depth` draft steps: embeds [B, T, h] of tokens 1..T, captured [B, T, 3h] of positions 0..T-1.

        Returns `depth` logits [B, T, vocabulary]; those of step j are meaningful at positions p >= j.
        """
        hidden = self.fc(captured)
        past: list[tuple[torch.Tensor, torch.Tensor]] = []
        logits = []
        for step in range(depth):
            if step:
                hidden = _shift(hidden, 1)
            hidden = self.midlayer(embeds, hidden, past)
            logits.append(self.lm_head(self.norm(hidden)))
        return logits


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, s.HEAD_DIM)).transpose(1, 2)


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Move positions (the last but one dimension) later by `by`; zeros come in at the front."""
    return functional.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :] if by else x


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding in the half-split (NeoX) form; x [..., T, head size]."""
    half = s.HEAD_DIM // 2
    inverse = s.ROPE_THETA ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * inverse
    a, b = x.float().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


@torch.no_grad()
def target_states(target: LlamaForCausalLM, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of tokens [B, T + 1]: embeddings of tokens 1..T, captured states of 0..T-1 [B, T, 3h], logits after 1..T."""
    out = target(input_ids=tokens, use_cache=False, output_hidden_states=True)
    captured = torch.cat([out.hidden_states[i] for i in s.CAPTURED], -1)
    embeds = target.get_input_embeddings()(tokens)
    return embeds[:, 1:], captured[:, :-1], out.logits[:, 1:]


def build_draft(target: LlamaForCausalLM) -> Draft:
    """Make a new draft; the head and the last norm begin as copies of the target's."""
    draft = Draft()
    for weight in draft.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.02)
    with torch.no_grad():
        draft.norm.weight.copy_(target.model.norm.weight)
        draft.lm_head.weight.copy_(target.lm_head.weight)
    return draft


def train_draft(
    draft: Draft,
    target: LlamaForCausalLM,
    rows: torch.Tensor,
    settings: s.Settings,
    device: torch.device,
    log: Callable[[str], None],
) -> tuple[list[float], list[float]]:
    """Train in place on rows [N, T + 1]; the target (bf16, as it will be served) is fixed.

    Loss of step j: half cross-entropy to the target's distribution, half to its most likely token, weight 0.8^j.
    Returns the last 50 steps' mean loss (nats) and share of agreeing tokens, per unrolled step.
    """
    draft.to(device).train()
    optimizer, schedule = optimizer_for(draft, settings.draft_rate, settings.draft_steps)
    shuffle = torch.Generator().manual_seed(1)
    order = torch.cat([torch.randperm(len(rows), generator=shuffle) for _ in range(_passes(rows, settings))])
    recent: list[torch.Tensor] = []
    begun = time.monotonic()
    for step in range(settings.draft_steps):
        batch = rows[order[step * settings.draft_batch : (step + 1) * settings.draft_batch]].to(device)
        embeds, captured, logits = target_states(target, batch)
        with torch.autocast(device.type, torch.bfloat16):
            guesses = draft(embeds.float(), captured.float(), settings.unroll)
        losses, matches = _losses(guesses, logits.float())
        weight = 0.8 ** torch.arange(settings.unroll, device=device)
        (losses * weight).sum().backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        recent = [*recent[-49:], torch.stack([losses.detach(), matches])]
        if step % max(1, settings.draft_steps // 16) == 0 or step == settings.draft_steps - 1:
            loss, match = torch.stack(recent).mean(0).tolist()
            shown = " ".join(f"{m:.3f}" for m in match)
            log(f"draft step {step}: loss {loss[0]:.3f}, agreement {shown}, {time.monotonic() - begun:.0f} s")
    draft.eval()
    loss, match = torch.stack(recent).mean(0).tolist()
    return loss, match


def _passes(rows: torch.Tensor, settings: s.Settings) -> int:
    return -(-settings.draft_steps * settings.draft_batch // len(rows))


def _losses(guesses: list[torch.Tensor], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wanted, best = logits.softmax(-1), logits.argmax(-1)
    losses, matches = [], []
    for depth, guess in enumerate(guesses):
        log_p = guess[:, depth:].float().log_softmax(-1)
        soft = -(wanted[:, depth:] * log_p).sum(-1).mean()
        hard = -log_p.gather(-1, best[:, depth:, None]).mean()
        losses.append(0.5 * (soft + hard))
        matches.append((guess[:, depth:].argmax(-1) == best[:, depth:]).float().mean())
    return torch.stack(losses), torch.stack(matches)
