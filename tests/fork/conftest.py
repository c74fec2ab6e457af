from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakeupstream import FakeUpstream, patched


@pytest.fixture
def upstream(tmp_path: Path) -> FakeUpstream:
    """A release with a pinned series of two patches."""
    made = patched(FakeUpstream(tmp_path / "upstream"))
    made.pin()
    return made
