"""Entries for tests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sglang_bw.ledger.entry import Entry
from tests.ledger.runs import host

AT = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def entry(number: int = 0, **more: Any) -> Entry:
    """An entry; each number is a minute later."""
    fields = {
        "id": f"20261129-12{number:02}00-00000{number % 10}", "kind": "start", "at": AT + timedelta(minutes=number),
        "recipe": "tiny", "result": "failed", "failure": "hang", "summary": "it hung", "host": host(), "launch": "abc",
    }  # fmt: skip
    return Entry.model_validate({**fields, **more})
