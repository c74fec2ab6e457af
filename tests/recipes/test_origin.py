"""What a measurement was taken on, against what a launch is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bw.recipes.flags import parse
from sglang_bw.recipes.origin import Origin, of_flags

_LINE = parse(["--model-path", "m", "--tp-size", "8", "--port", "30000", "--max-running-requests", "16"])
_WHOLE = Origin("host", "mine", "0.5.23+bw.6", "cuda", of_flags(_LINE))

words = st.text(max_size=4)
origins = st.builds(Origin, words, words, words, words, st.dictionaries(words, words, max_size=3))


def test_only_what_changes_a_round_counts() -> None:
    assert of_flags(_LINE) == {"model-path": "m", "tp-size": "8"}


@given(one=origins, other=origins)
def test_what_is_not_known_differs_from_nothing(one: Origin, other: Origin) -> None:
    assert not one.differs(one)
    assert not Origin().differs(other)
    assert not one.differs(Origin())
    assert bool(one.differs(other)) == bool(other.differs(one))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Origin(host="another"), "another host"),
        (Origin(engine="0.5.9"), "engine 0.5.23+bw.6, not 0.5.9"),
        (Origin(launch={"model-path": "m"}), "--tp-size 8, not unset"),
        (Origin(launch={**_WHOLE.launch, "quantization": "fp8"}), "--quantization unset, not fp8"),
    ],
)
def test_it_says_what_is_different(other: Origin, says: str) -> None:
    assert _WHOLE.differs(other) == says
