"""Every patch of every base: red on the stock engine for the declared reason, green on the patched one."""

from __future__ import annotations

import pytest

from sglang_bw.fork.series import bases
from tests.conftest import PATCHES
from tests.patches.series_run import run_series

# An older base costs as many minutes as the newest: `make test-all` runs it.
*OLDER, NEWEST = bases(PATCHES)


@pytest.mark.engine
@pytest.mark.alone
@pytest.mark.timeout(1800)  # some 700 tests on two engines: four and a half minutes on two busy cores
@pytest.mark.parametrize("base", [*(pytest.param(base, marks=pytest.mark.slow) for base in OLDER), NEWEST])
def test_each_patch_is_red_on_stock_and_green_on_patched(base: str) -> None:
    rows, output = run_series(base)
    assert not output, output
    assert rows
    assert not [(row.patch, row.problems) for row in rows if row.problems]
