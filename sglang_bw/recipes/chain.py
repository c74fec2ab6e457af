"""A chain of drafts, topk 1: the engine verifies what was drafted and the root, whatever tokens are asked for."""

from __future__ import annotations

from sglang_bw.recipes import flags
from sglang_bw.recipes.flags import Flag, Flags

STEPS = "speculative-num-steps"
TOPK = "speculative-eagle-topk"
DRAFT_TOKENS = "speculative-num-draft-tokens"


def draft_tokens(steps: int) -> int:
    """Return how many tokens a chain verifies."""
    return steps + 1


def candidates(steps: int) -> tuple[int, ...]:
    """Return the draft steps that the engine's goodput policy chooses from when no configuration names any."""
    return tuple(sorted({0, steps, *(fewer for fewer in (1, 3, 5, 7) if fewer < steps)}))


def follow(launch: Flags, changed: Flags) -> Flags:
    """Return the draft tokens that follow from a change of a chain's steps, or of a tree into a chain.

    :param launch: the flags with the change in them.
    :param changed: what was changed; draft tokens that stand there themselves are left to the engine's judgement.
    """
    steps = flags.value(launch, STEPS) or ""
    is_chain = flags.value(launch, TOPK) == "1" and steps.isascii() and steps.isdigit()
    shape_changed = flags.has(changed, STEPS) or flags.has(changed, TOPK)
    if not is_chain or not shape_changed or flags.has(changed, DRAFT_TOKENS):
        return ()
    return (Flag(DRAFT_TOKENS, (str(draft_tokens(int(steps))),)),)
