"""The rows of published field data, predicted from their inputs alone."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bw.plan.memory_rows import is_memory_form, known, predict, predict_memory_row

HERE = Path(__file__).parent / "data"
ANSWERS = ("obs_", "pred_", "max_total_num_tokens", "kv_pool_GiB", "avail_end_GiB", "token_err_pct")
Row = dict[str, str]


def rows(name: str) -> list[Row]:
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))


LOGS, POINTS = rows("memory_logs.csv"), rows("memory_points.csv")
EXACT = [
    row for row in POINTS if row["avail_before_GiB"] and row["weights_GiB"] and row["max_total_num_tokens"].isdigit()
]
CELLS = ("cell_B", "bytes_per_token_per_gpu")


def without(row: Row, *prefixes: str) -> Row:
    return {name: "" if name.startswith(prefixes) else value for name, value in row.items()}


def test_both_forms_are_recognised() -> None:
    assert is_memory_form(list(LOGS[0]))
    assert is_memory_form(list(POINTS[0]))
    assert not is_memory_form(["source", "model", "conc", "tps_nospec", "tps_spec", "speedup"])


@pytest.mark.parametrize("row", LOGS, ids=lambda row: row["case"])
def test_logs_within_two_percent(row: Row) -> None:
    assert predict_memory_row(row) == pytest.approx(int(row["obs_tokens"]), rel=0.02)


@pytest.mark.parametrize("row", EXACT, ids=lambda row: row["id"])
def test_points_within_two_percent(row: Row) -> None:
    assert predict_memory_row(row) == pytest.approx(int(row["max_total_num_tokens"]), rel=0.02)


@pytest.mark.parametrize("row", [*LOGS, *EXACT], ids=lambda row: row.get("id") or row["case"])
def test_the_cell_follows_from_the_model(row: Row) -> None:
    assert predict_memory_row(without(row, *CELLS)) == predict_memory_row(row)


@pytest.mark.parametrize("row", [*LOGS, *POINTS], ids=lambda row: row.get("id") or row["case"])
def test_answers_are_never_read(row: Row) -> None:
    assert predict(without(row, *ANSWERS)) == predict(row)
    wrong = {name: "12345" if name.startswith(ANSWERS) else value for name, value in row.items()}
    assert predict(wrong) == predict(row)


@pytest.mark.parametrize("row", POINTS, ids=lambda row: row["id"])
def test_a_row_without_a_prediction_says_why(row: Row) -> None:
    prediction = predict(row)
    assert prediction.reason
    if row["engine"].startswith("vLLM"):
        assert prediction.tokens is None


BASE = {
    "model": "Some-Model",
    "engine": "SGLang v0.5.20",
    "tp": "2",
    "mem_fraction": "0.9",
    "avail_before_GiB": "94.0",
    "avail_after_weights_GiB": "60.0",
    "bytes_per_token_per_gpu": "100000",
}


def test_settings_beside_the_fraction() -> None:
    rest = (60.0 - 94.0 * 0.1) * 2**30
    assert predict_memory_row(BASE) == int(rest // 100_000)
    assert predict_memory_row({**BASE, "page_size": "64"}) == int(rest // 100_000) // 64 * 64
    assert predict_memory_row({**BASE, "note": "started with --max-total-tokens 200000"}) == 200_000
    # Since 0.5.18 a multimodal model keeps 100 MiB out of the pool.
    kimi = {**BASE, "model": "Kimi-K2.5", "kv_dtype": "bf16"}
    assert predict_memory_row({**kimi, "engine": "SGLang 0.5.17"}) == int(rest // 100_000)
    assert predict_memory_row(kimi) == int((rest - 100 * 2**20) // 100_000)
    assert predict_memory_row({**kimi, "model": "Kimi-K2-Thinking"}) == int(rest // 100_000)
    mtp = {**BASE, "model": "GLM-5.1 + MTP", "kv_dtype": "fp8", "bytes_per_token_per_gpu": ""}
    assert predict_memory_row(mtp) == int(rest // (79 * (576 + 132)))
    assert predict_memory_row({**mtp, "engine": "SGLang 0.5.12"}) == int(rest // (78 * (576 + 132)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mem_fraction": ""}, "no memory fraction"),
        ({"mem_fraction": "1.7"}, "memory fraction is 1.7"),
        ({"mem_fraction": "nan"}, "mem_fraction is nan"),
        ({"avail_before_GiB": "-4"}, "avail_before_GiB is -4"),
        ({"avail_after_weights_GiB": ""}, "before and after the load"),
        ({"avail_after_weights_GiB": "95"}, "more memory is free after"),
        ({"bytes_per_token_per_gpu": ""}, "not in the table"),
        ({"engine": "vLLM 0.20"}, "otherwise"),
        ({"model": "Qwen3.5-397B", "tp": "4"}, "linear-attention states"),
        ({"model": "GLM-4.7", "tp": "7", "bytes_per_token_per_gpu": ""}, "neither divides"),
        ({"kv_dtype": "bf16", "page_size": "0.2"}, ""),
    ],
)
def test_what_cannot_be_predicted(change: Row, reason: str) -> None:
    prediction = predict({**BASE, **change})
    assert reason in prediction.reason
    assert prediction.tokens is None or not reason


@given(st.dictionaries(st.sampled_from([*BASE, "kv_dtype", "note", "case"]), st.text(max_size=20)))
def test_any_row_gives_a_number_or_a_reason(row: Row) -> None:
    prediction = predict(row)
    assert prediction.reason
    assert prediction.tokens is None or prediction.tokens >= 0


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("Kimi-K2-Thinking NVFP4", 61),
        ("moonshotai/Kimi-K2.6", 61),
        ("GLM-5", 78),
        ("GLM-5.2 NVFP4", 78),
        ("GLM-4.7-FP8", 92),
        ("MiniMax-M2.5", 62),
        ("DeepSeek-R1", 61),
        ("Llama-3.1-8B", 32),
    ],
)
def test_known_models(name: str, layers: int) -> None:
    shape = known(name)
    assert shape is not None
    assert shape.layers == layers


@pytest.mark.parametrize("name", ["GLM-5.3-Flash", "GLM-4.5-Air", "MiniMax-M3", "Kimi-Linear", "tiny", ""])
def test_other_models_are_not_taken_for_known_ones(name: str) -> None:
    assert known(name) is None
