from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_bw.fork.rebase.semantic import examine, join_lines, twice
from sglang_bw.fork.rebase.units import split_lines, things, units

OLD = b"""import os

TABLE = {
    9: 1,
    10: 2,
}


class Model:
    \"\"\"A model.\"\"\"

    size = 1

    def load(self):
        return self.size

    @property
    def name(self):
        return "x"


def run(model):
    model.load()
    return model
"""


def edit(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) == 1, old
    return data.replace(old, new)


def test_units_hold_every_line_once() -> None:
    found = units("a.py", OLD)
    assert b"".join(line for unit in found for line in unit.lines) == OLD
    keys = [unit.key for unit in found]
    assert keys == [
        "import os", "TABLE", "Model", "Model.<text>", "Model.size", "Model.load", "Model.name", "run",
    ]  # fmt: skip


@given(st.text(alphabet="ab()=:#\n \\\"'@\r\x0c", max_size=60))
def test_units_hold_every_line_of_any_text(text: str) -> None:
    data = text.encode()
    assert b"".join(line for unit in units("a.py", data) for line in unit.lines) == data


def test_things_are_members_functions_and_entries() -> None:
    names = things("a.py", OLD)
    assert {"TABLE[9]", "Model.load", "Model.size", "run", "os"} <= set(names)
    nested = things("a.py", b"SIZES = {'a': {12: 1}, 'b': [1, 'x']}\ndef f():\n    t = {1: 2}\n")
    assert {"SIZES['a'][12]", "SIZES['b'][has 'x']", "f.t[1]"} <= set(nested)


def test_equal_results_are_trusted() -> None:
    patched = edit(OLD, b"return self.size", b"return self.size + 1")
    new = b"# moved\nX = 1\n" + edit(OLD, b"size = 1", b"size = 2")
    assert examine("a.py", OLD, patched, new, edit(new, b"return self.size", b"return self.size + 1")) == []


def test_member_defined_twice_is_found() -> None:
    patched = edit(OLD, b"def run", b"def helper():\n    pass\n\n\ndef run")
    new = OLD + b"\n\ndef helper():\n    return 1\n"
    result = edit(new, b"def run", b"def helper():\n    pass\n\n\ndef run")
    [doubt, *_] = examine("a.py", OLD, patched, new, result)
    assert "upstream has a helper of its own" in doubt.why


def test_arms_of_a_branch_may_define_the_same() -> None:
    arms = b"if x:\n    from a import f\nelse:\n    from b import f\n"
    assert twice("a.py", b"", b"", arms) == []
    [doubt] = twice("a.py", b"", arms, arms.replace(b"else", b"    def f(): pass\nelse"))
    assert doubt.unit == "f"


def test_hunk_at_the_wrong_one_of_two_functions_is_found() -> None:
    block = b"def f%d():\n    x = 1\n    return x\n\n\n"
    old = b"".join(block % n for n in range(5))
    patched = old.replace(block % 2, (block % 2).replace(b"x = 1", b"x = 2"))
    new = block % 9 + old
    wrong = new.replace(block % 1, (block % 1).replace(b"x = 1", b"x = 2"))
    assert examine("a.py", old, patched, new, wrong)
    right = new.replace(block % 2, (block % 2).replace(b"x = 1", b"x = 2"))
    assert examine("a.py", old, patched, new, right) == []


def test_equal_blocks_in_one_changed_function_are_no_certain_place() -> None:
    block = b"    a()\n    b()\n    c()\n"
    old = b"def f():\n" + block * 3
    patched = b"def f():\n" + block + block.replace(b"b()", b"b(1)") + block
    new = b"def f():\n" + block * 4
    result = b"def f():\n" + block * 2 + block.replace(b"b()", b"b(1)") + block
    [doubt] = examine("a.py", old, patched, new, result)
    assert "lines around" in doubt.why


def test_lost_upstream_code_is_found() -> None:
    patched = edit(OLD, b"model.load()", b"model.load(1)")
    new = edit(OLD, b"size = 1", b"size = 1\n    other = 2")
    assert examine("a.py", OLD, patched, new, edit(OLD, b"model.load()", b"model.load(1)"))


def test_function_that_is_gone_is_told() -> None:
    patched = edit(OLD, b"model.load()", b"model.load(1)")
    new = OLD[: OLD.index(b"def run")]
    [doubt] = examine("a.py", OLD, patched, new, new)
    assert doubt.gone
    assert doubt.unit == "run"


lines = st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n", b"\n"]), max_size=7).map(tuple)


@given(lines, st.integers(0, 7), st.integers(0, 3), lines)
def test_joining_with_an_unchanged_release_gives_the_patch_or_a_reason(
    old: tuple[bytes, ...], first: int, size: int, text: tuple[bytes, ...]
) -> None:
    patched = old[:first] + text + old[first + size :]
    joined, why = join_lines(old, patched, old)
    assert why or joined == patched


@given(lines, lines)
def test_lines_come_back(old: tuple[bytes, ...], other: tuple[bytes, ...]) -> None:
    data = b"".join(old + other)
    assert b"".join(split_lines(data)) == data


def test_block_between_blank_lines_goes_where_one_neighbour_changed() -> None:
    old = (b"first()\n", b"\n", b"block()\n", b"\n", b"last()\n")
    patched = (b"first()\n", b"\n", b"last()\n")
    # Which of the two blank lines goes is a matter of telling; each neighbour may have changed.
    for new in ((b"other()\n", *old[1:]), (*old[:-1], b"other()\n")):
        joined, why = join_lines(old, patched, new)
        assert (joined, why) == (tuple(line for line in (new[0], b"\n", new[-1])), "")
        back, why = join_lines(patched, old, tuple(joined))
        assert (back, why) == (new, "")
    # With both neighbours changed nothing holds it.
    assert "lines around" in join_lines(old, patched, (b"other()\n", *old[1:-1], b"other()\n"))[1]
