"""What of the memory arithmetic changed between engine releases, read from the wheels of 0.5.9 to 0.5.23."""

from __future__ import annotations

import re
from dataclasses import dataclass

Version = tuple[int, int, int]
FIRST, LAST = (0, 5, 9), (0, 5, 23)

# Vision models whose prefill may be captured; other multimodal models lose the prefill graph.
_QWEN35 = frozenset({"Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"})
_CAPTURED: tuple[tuple[Version, frozenset[str]], ...] = (
    (
        (0, 5, 20),
        _QWEN35
        | {
            "Cohere2VisionForConditionalGeneration",
            "Glm5NextForConditionalGeneration",
            "InternS2MobiusForConditionalGeneration",
            "KimiK25ForConditionalGeneration",
            "KimiK3ForConditionalGeneration",
            "MiniMaxM3SparseForConditionalGeneration",
            "MuseGlimmerForConditionalGeneration",
            "PaddleOCRVLForConditionalGeneration",
            "Qwen4ExpForConditionalGeneration",
        },
    ),
    ((0, 5, 16), _QWEN35),
    ((0, 0, 0), frozenset()),
)
_NOT_CAPTURED = {
    "DeepseekV32ForCausalLM": (0, 5, 16), "GlmMoeDsaForCausalLM": (0, 5, 16), "DeepseekV4ForCausalLM": (9, 0, 0),
    "Qwen3NextForCausalLM": (0, 5, 23), "BailingMoeV2_5ForCausalLM": (0, 5, 23), "LLaDAModelLM": (9, 0, 0),
}  # fmt: skip


@dataclass(frozen=True)
class Release:
    """The arithmetic of one release.

    :ivar version: three numbers.
    :ivar patched: whether this project's series is in it.
    """

    version: Version
    patched: bool = False

    @property
    def known(self) -> bool:
        """Whether its wheel was read."""
        return FIRST <= self.version <= LAST

    @property
    def draft_counted(self) -> bool:
        """Whether the draft is loaded before the pool is sized, and its KV is part of a token's bytes."""
        return self.version >= (0, 5, 14)

    @property
    def draft_by_config(self) -> bool:
        """Whether an EAGLE draft's KV is priced by the draft's own config: only with this project's patch 0022."""
        return self.patched and self.version >= (0, 5, 23)

    def draft_reserve_mib(self, algorithm: str | None) -> int:
        """Return the flat reserve for a draft in the default fraction, in MiB."""
        if algorithm is None or algorithm == "NGRAM" or self.draft_counted:
            return 0
        if algorithm == "STANDALONE":
            return 6 * 1024
        return 2 * 1024 if self.version < (0, 5, 10) else 4 * 1024

    @property
    def large_small_boards(self) -> bool:
        """Whether boards below 35 GiB get a chunk of 4096 tokens and graphs up to 48 or 160."""
        return self.version >= (0, 5, 20)

    @property
    def graphs_follow_requests(self) -> bool:
        """Whether ``--max-running-requests`` cuts the default of the largest decode graph."""
        return self.version >= (0, 5, 22)

    @property
    def requests_known_first(self) -> bool:
        """Whether the limit of a speculative run, 48, cuts the graphs too: only with this project's patch 0006."""
        return self.patched and self.version >= (0, 5, 23)

    @property
    def multimodal_reserve_mib(self) -> int:
        """What is kept from the pool for a multimodal model's caches, in MiB."""
        return 100 if self.version >= (0, 5, 18) else 0

    @property
    def deepep_reserve(self) -> bool:
        """Whether DeepEP's buffers are reserved in the default fraction."""
        return self.version >= (0, 5, 16)

    @property
    def state_shares_budget(self) -> bool:
        """Whether the states of verified drafts come out of the states' share, and not out of the whole pool."""
        return self.version >= (0, 5, 13)

    @property
    def state_padding(self) -> int:
        """Unused slots that the pools of states are allocated with."""
        return 1 if self.version >= (0, 5, 17) else 0

    @property
    def scaled_sparse_layout(self) -> bool:
        """Whether the scales of FP8 sparse MLA are part of a token's bytes."""
        return self.version >= (0, 5, 17)

    @property
    def shared_index_is_free(self) -> bool:
        """Whether layers that reuse a neighbour's index keep no keys."""
        return self.version >= (0, 5, 18)

    @property
    def a2a_tokens_follow_chunk(self) -> bool:
        """Whether FlashInfer's all-to-all workspace follows the prefill chunk; before, 1024 tokens a GPU."""
        return self.version >= (0, 5, 20)

    def captures_prefill(self, architecture: str, *, multimodal: bool) -> bool:
        """Tell whether the prefill graph is on by default for a model."""
        if self.version < (0, 5, 10) or self.version < _NOT_CAPTURED.get(architecture, (0, 0, 0)):
            return False
        if not multimodal:
            return True
        return architecture in next(names for since, names in _CAPTURED if self.version >= since)


def parse(version: str, *, patched: bool | None = None) -> Release:
    """Read ``0.5.23``, ``v0.5.16-cu130``, ``0.5.23+bw.1``.

    :param patched: whether the series is in it; ``None``: when the version says ``+bw``.
    """
    match = re.search(r"(\d+)\.(\d+)\.(\d+)", version)
    numbers = (int(match[1]), int(match[2]), int(match[3])) if match else LAST
    return Release(numbers, "+bw" in version if patched is None else patched)
