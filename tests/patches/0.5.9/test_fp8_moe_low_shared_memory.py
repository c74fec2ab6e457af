"""The default tile of FP8 experts fits into the shared memory of a block."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patches.engine_059 import stand_in_for_the_kernels

EXPERTS = 128
SHARED_MEMORY = {
    "sm80": 166_912,
    "sm89": 101_376,
    "sm90": 232_448,
    "sm100": 232_448,
    "sm120": 101_376,
    "sm121": 101_376,
}
LARGE = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 32}
SMALL = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128}


def default_config(arch: str, tokens: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, int]:
    """Return the engine's tile for ``tokens`` tokens on a board of ``arch``, where nothing is tuned."""
    stand_in_for_the_kernels()
    from sglang.srt.layers.moe.fused_moe_triton import fused_moe_triton_config as module

    board = SimpleNamespace(shared_memory_per_block_optin=SHARED_MEMORY[arch])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: board)
    monkeypatch.setattr(module, "get_global_server_args", lambda: SimpleNamespace(enable_deterministic_inference=False))
    arguments = {"M": tokens, "E": EXPERTS, "N": 768, "K": 2048, "topk": 8, "dtype": "fp8_w8a8", "is_marlin": False}
    config: dict[str, int] = module.get_default_config(**arguments | changes)
    return config


@pytest.fixture(autouse=True)
def forget_the_board() -> Iterator[None]:
    yield
    from sglang.srt.layers.moe.fused_moe_triton import fused_moe_triton_config as module

    for remembered in vars(module).values():
        if hasattr(remembered, "cache_clear"):
            remembered.cache_clear()


def shared_bytes(config: dict[str, int]) -> int:
    """What Triton's pipeline of one-byte operands takes: a buffer less than it has stages.

    ``sglang-bw doctor kernels`` counts the same with the compiler.
    """
    tiles = (config["BLOCK_SIZE_M"] + config["BLOCK_SIZE_N"]) * config["BLOCK_SIZE_K"]
    return (config["num_stages"] - 1) * tiles


@pytest.mark.stock_failure(AssertionError, r"^147456 of 101376 bytes")
@pytest.mark.parametrize("arch", ["sm89", "sm120", "sm121"])
def test_a_long_prompt_fits(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = default_config(arch, 8192, monkeypatch)
    taken = shared_bytes(config)
    assert taken <= SHARED_MEMORY[arch], f"{taken} of {SHARED_MEMORY[arch]} bytes"
    assert config.items() >= SMALL.items()
    assert config["GROUP_SIZE_M"] == 32


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100"])
def test_boards_with_more_keep_the_large_tile(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_config(arch, 8192, monkeypatch).items() >= LARGE.items()


@pytest.mark.parametrize("arch", list(SHARED_MEMORY))
def test_few_tokens_have_the_small_tile_everywhere(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = default_config(arch, EXPERTS, monkeypatch)
    assert config.items() >= SMALL.items()
    assert shared_bytes(config) == 73_728


@pytest.mark.parametrize("changes", [{"block_shape": [128, 128]}, {"dtype": None}, {"dtype": "int4_w4a16"}])
def test_other_formats_are_as_before(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_config("sm120", 8192, monkeypatch, **changes) == default_config("sm90", 8192, monkeypatch, **changes)
