from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bw.recipes import flags
from sglang_bw.recipes.flags import Flag

_NAMES = st.from_regex(r"[a-z]{2,8}(-[a-z]{2,6}){0,2}", fullmatch=True).filter(lambda name: not name.startswith("no-"))
_VALUES = st.text(min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param(["--port", "1"], (Flag("port", ("1",)),), id="value in its own token"),
        pytest.param(["--port=1"], (Flag("port", ("1",)),), id="value behind ="),
        pytest.param(["--a=b=c"], (Flag("a", ("b=c",)),), id="only the first = counts"),
        pytest.param(["--a="], (Flag("a", ("",)),), id="empty value"),
        pytest.param(["--a", "--b"], (Flag("a"), Flag("b")), id="switches"),
        pytest.param(["--a", "1", "2", "--b"], (Flag("a", ("1", "2")), Flag("b")), id="a list"),
        pytest.param(
            ["--a", "-1", "--b", "-1.5e3", "-.5"], (Flag("a", ("-1",)), Flag("b", ("-1.5e3", "-.5"))), id="negative"
        ),
        pytest.param(["--a", "-"], (Flag("a", ("-",)),), id="a lone dash is a value"),
        pytest.param(["--a", '{"x": [1, 2]}'], (Flag("a", ('{"x": [1, 2]}',)),), id="JSON"),
        pytest.param(["-h"], (Flag("h", dashes="-"),), id="short"),
        pytest.param([], (), id="none"),
    ],
)
def test_parse(tokens: list[str], expected: flags.Flags) -> None:
    assert flags.parse(tokens) == expected


def test_a_value_without_a_flag_is_refused() -> None:
    with pytest.raises(flags.NotAFlagError) as error:
        flags.parse(["tiny", "--a"])
    assert error.value.token == "tiny"


@given(st.lists(st.tuples(_NAMES, st.lists(_VALUES, max_size=1)), max_size=6))
def test_what_is_written_is_read_back(pairs: list[tuple[str, list[str]]]) -> None:
    written = tuple(Flag(name, tuple(values)) for name, values in pairs)
    assert flags.parse(flags.tokens(written)) == written


@pytest.mark.parametrize(
    ("base", "winning", "expected"),
    [
        pytest.param("--a 1 --b 2", "--a 3", "--b 2 --a 3", id="replaced, not doubled"),
        pytest.param("--a 1", "--a=3", "--a 3", id="written with ="),
        pytest.param("--tp-size 8", "--tp 2", "--tp 2", id="an alias"),
        pytest.param("--tp-size 8", "--tensor-parallel-size=2", "--tensor-parallel-size 2", id="another alias"),
        pytest.param("--model-path a", "--model b", "--model b", id="model"),
        pytest.param("--enable-x", "--no-enable-x", "--no-enable-x", id="the negative form"),
        pytest.param("--no-enable-x", "--enable-x", "--enable-x", id="the positive form"),
        pytest.param("--a 1 2 3 --b", "--a 4", "--b --a 4", id="a list"),
        pytest.param("--a 1", "--a 2 --a 3", "--a 2 --a 3", id="the user's own repetition stays"),
        pytest.param("--a 1", "", "--a 1", id="nothing"),
    ],
)
def test_merge(base: str, winning: str, expected: str) -> None:
    merged = flags.merge(flags.parse(base.split()), flags.parse(winning.split()))
    assert flags.tokens(merged) == expected.split()


def test_value_is_the_one_that_the_engine_takes() -> None:
    given_flags = flags.parse(["--tp", "2", "--tensor-parallel-size=4", "--switch"])
    assert flags.value(given_flags, "tp-size") == "4"
    assert flags.value(given_flags, "switch") is None
    assert flags.value(given_flags, "absent", "7") == "7"
    assert flags.has(given_flags, "switch")
    assert not flags.has(flags.parse(["--no-switch"]), "switch")


def test_recipe_values() -> None:
    args = {
        "number": 16384,
        "fraction": 0.3,
        "switch": True,
        "off": False,
        "gone": None,
        "list": [1, "b"],
        "text": "a b",
    }
    assert flags.tokens(flags.from_mapping(args)) == (
        ["--number", "16384", "--fraction", "0.3", "--switch", "--list", "1", "b", "--text", "a b"]
    )


def test_a_value_that_looks_like_a_flag_is_written_behind_an_equals_sign() -> None:
    assert Flag("a", ("--b",)).tokens() == ["--a=--b"]
    assert Flag("a", ("-1",)).tokens() == ["--a", "-1"]
