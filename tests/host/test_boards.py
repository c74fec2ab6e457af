from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bw.errors import UnknownBoardError
from sglang_bw.host.boards import BOARDS, find, parse_gpus


@pytest.mark.parametrize(
    ("text", "count", "name", "mib"),
    [
        ('8x"RTX PRO 6000"', 8, "RTX PRO 6000", 97887),
        ("8xRTX PRO 6000", 8, "RTX PRO 6000", 97887),
        ("2 x rtx-5090", 2, "RTX 5090", 32607),
        ("NVIDIA GeForce RTX 5090", 1, "RTX 5090", 32607),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 1, "RTX PRO 6000", 97887),
        ("DGX Spark", 1, "GB10", 124611),
        ("8xb200", 8, "B200", 183359),
        ("4*H200", 4, "H200", 143771),
        ("4xRTX PRO 4500:32623MiB:sm120", 4, "RTX PRO 4500", 32623),
    ],
)
def test_names(text: str, count: int, name: str, mib: int) -> None:
    found, board = parse_gpus(text)
    assert (found, board.name, board.memory_mib) == (count, name, mib)


@pytest.mark.parametrize(
    ("text", "near"), [("8xRTX PRO 600", "RTX PRO 6000"), ("H20O", "H200"), ("RTX 5900", "RTX 5090"), ("b20", "B200")]
)
def test_unknown_names_tell_the_nearest(text: str, near: str) -> None:
    with pytest.raises(UnknownBoardError) as raised:
        parse_gpus(text)
    assert "Nearest: " in raised.value.hint
    assert near in raised.value.hint


@pytest.mark.parametrize("text", ["0xB200", "5000xB200", "", "x", "8x", "banana"])
def test_no_board_at_all(text: str) -> None:
    with pytest.raises(UnknownBoardError) as raised:
        parse_gpus(text)
    assert raised.value.hint


@given(st.text())
def test_any_text_is_a_board_or_a_clear_error(text: str) -> None:
    with suppress(UnknownBoardError):
        count, board = parse_gpus(text)
        assert count >= 1
        assert board.memory_mib > 0


def test_every_alias_finds_its_own_board() -> None:
    for board in BOARDS:
        for name in (board.name, *board.aliases):
            assert find(f"nvidia {name.lower()}") is board
