"""Models that travel with the tool: a tiny EAGLE-3 pair, so that every machine can start an engine and speculate."""

from pathlib import Path

BUNDLED = Path(__file__).parent
"""Directory of all of them."""

TINY_PAIR = BUNDLED / "tiny_pair"
"""Directory of the pair and its model card."""

TINY_TARGET = TINY_PAIR / "target"
"""A byte-level Llama with its tokenizer and chat template (`--model-path`)."""

TINY_DRAFT = TINY_PAIR / "draft"
"""Its EAGLE-3 draft (`--speculative-draft-model-path`)."""

TINY_PROMPTS = TINY_PAIR / "prompts.jsonl"
"""Held-out prompts, one JSON object a line: `id`, `kind`, `prompt`, and for a chat its `messages`."""
