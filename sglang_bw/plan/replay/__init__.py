"""Predict every row of a published table from its inputs alone, and compare.

Four forms of table are known, by their columns (``forms``). ``cells`` and ``bundle`` predict the speedup of
speculation, :mod:`sglang_bw.plan.memory_rows` KV tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sglang_bw.plan import memory_rows
from sglang_bw.plan.replay import bundle, cells
from sglang_bw.plan.replay.forms import Form, Table, read
from sglang_bw.plan.replay.result import Prediction, Replay

__all__ = ["Replay", "replay"]


def replay(path: Path, *, accept_length_given: bool = False) -> Replay:
    """Predict each row of a CSV file.

    :param accept_length_given: accept lengths of the file are inputs, known before the run with speculation. Without
        it they count as answers and are not read.
    :raises ReplayError: when the file cannot be read or has none of the known forms.
    """
    table = read(path)
    if table.form is Form.CELLS:
        predictions = cells.predict(table.rows, accept_length_given=accept_length_given)
    elif table.form is Form.BUNDLE:
        predictions = bundle.predict(table.rows, accept_length_given=accept_length_given)
    else:
        predictions = [_tokens(row) for row in table.rows]
    return Replay(table.form, tuple(_whole(table, predictions)))


def _whole(table: Table, predictions: list[Prediction]) -> list[Prediction]:
    """Return the predictions with those of damaged rows replaced by the damage."""
    return [
        Prediction(None, None, reason=table.damage[number]) if number in table.damage else prediction
        for number, prediction in enumerate(predictions)
    ]


def _tokens(row: Mapping[str, str]) -> Prediction:
    observed = cells.positive(row.get("max_total_num_tokens")) or cells.positive(row.get("obs_tokens"))
    found = memory_rows.predict(row)
    basis, reason = (found.reason, "") if found.tokens is not None else ("", found.reason)
    return Prediction(found.tokens, observed, basis=basis, reason=reason)
