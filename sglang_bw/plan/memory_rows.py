"""Predict the KV tokens of a row of a table of field data, from the row's inputs alone.

Two forms are known, by their columns: ``memory_points`` (``mem_fraction``, ``avail_before_GiB``,
``avail_after_weights_GiB``, ``weights_GiB``, ``bytes_per_token_per_gpu``) and ``memory_logs`` (``mem_fraction_static``,
``avail_before_GB``, ``avail_after_GB``, ``cell_B``). What was observed or predicted there is never read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import yaml

from sglang_bw.errors import CheckpointError
from sglang_bw.host.gpus import GIB
from sglang_bw.plan import kv, releases
from sglang_bw.plan.config import read_shape
from sglang_bw.plan.settings import EngineSettings
from sglang_bw.plan.shapes import ModelShape, Parallel

_FRACTION = ("mem_fraction_static", "mem_fraction")
_BEFORE = ("avail_before_GB", "avail_before_GiB")
_AFTER = ("avail_after_GB", "avail_after_weights_GiB", "avail_after_GiB")
_WEIGHTS = ("weights_GiB", "weights_GB")
_CELL = ("cell_B", "bytes_per_token_per_gpu")
_MARKS = (*_FRACTION, *_AFTER, *_CELL)
# The logs of the first months of 2026, and rows that name no release.
_OLD_RELEASE = "0.5.9"
_OTHER_ENGINES = re.compile(r"vllm|trt|llama\.cpp|exllama|ktransformers|sglang-kt", re.IGNORECASE)


@dataclass(frozen=True)
class RowPrediction:
    """What was made of a row.

    :ivar tokens: of the KV pool; ``None`` when the row does not say enough.
    :ivar reason: why ``tokens`` is ``None``; else how it was found.
    """

    tokens: int | None
    reason: str


def is_memory_form(columns: Mapping[str, Any] | list[str]) -> bool:
    """Tell whether a table with these columns is one of the two forms."""
    names = set(columns)
    return bool(names & set(_FRACTION)) and bool(names & set(_AFTER)) and bool(names & set(_CELL))


def predict_memory_row(row: Mapping[str, str]) -> int | None:
    """Return the KV tokens of a row, or ``None`` when it does not say enough."""
    return predict(row).tokens


def predict(row: Mapping[str, str]) -> RowPrediction:
    """Predict a row, and say how or why not."""
    try:
        return _predict(_Row(row))
    except (_UnknownError, CheckpointError) as error:
        return RowPrediction(None, str(error.args[0]))


class _UnknownError(Exception):
    """The row lacks something; the message says what."""


class _Row:
    """A row's inputs."""

    def __init__(self, row: Mapping[str, str]) -> None:
        self._row = row

    def text(self, *names: str) -> str:
        return next((str(self._row[name]).strip() for name in names if self._row.get(name)), "")

    def number(self, *names: str) -> float | None:
        """Return a number, positive and finite; ``None`` for an empty cell."""
        for name in names:
            text = str(self._row.get(name) or "").strip().replace(",", "")
            if not text:
                continue
            try:
                value = float(text)
            except ValueError:
                continue
            if not math.isfinite(value) or value < 0:
                raise _UnknownError(f"{name} is {text}")
            return value
        return None

    @property
    def model(self) -> str:
        return f"{self.text('model', 'case', 'name')} {self.text('quant')}".strip()

    @property
    def described(self) -> str:
        """All free text that describes the launch."""
        return " ".join((self.model, self.text("engine"), self.text("note")))


def _predict(row: _Row) -> RowPrediction:
    engine = row.text("engine")
    if _OTHER_ENGINES.search(engine):
        raise _UnknownError(f"{engine} sizes its pool otherwise")
    settings = _settings(row)
    shape = known(row.model)
    parallel = _parallel(row)
    rest = _rest(row, settings, shape)
    if rest <= 0:
        return RowPrediction(0, f"{-rest / GIB:.2f} GiB are missing: the engine refuses to start")
    cell, how = _cell(row, settings, shape, parallel)
    target = shape if shape and shape.linear else _PLAIN_SHAPE
    if target.linear and not (settings.max_mamba_cache_size or row.number("mamba_full_memory_ratio")):
        raise _UnknownError("the row does not give the size of the pool of linear-attention states")
    made = kv.pool(rest, target, None, parallel, settings, bytes_per_token=cell)
    return RowPrediction(made.tokens, f"{rest / GIB:.3f} GiB by {cell.full} B a token ({how})")


_PLAIN_SHAPE = ModelShape("", "", 1, 1, 1, 1, 1, 1, 1, ("full",), context=1)


def _settings(row: _Row) -> EngineSettings:
    fraction = row.number(*_FRACTION)
    if fraction is None:
        raise _UnknownError("the row has no memory fraction")
    if not 0 < fraction <= 1:
        raise _UnknownError(f"the memory fraction is {fraction:g}")
    engine = row.text("engine")
    version = re.search(r"\d+\.\d+\.\d+\S*", engine)
    release = releases.parse(version[0] if version else _OLD_RELEASE)
    settings = EngineSettings(
        release=release,
        mem_fraction_static=fraction,
        kv_cache_dtype=_dtype(row),
        page_size=int(_setting(row, "page_size", "page-size") or 1),
        max_total_tokens=_whole(_setting(row, "max_total_tokens", "max-total-tokens")),
        max_mamba_cache_size=_whole(_setting(row, "max_mamba_cache_size", "max-mamba-cache-size")) or _state_pool(row),
        mamba_ratio=_setting(row, "mamba_full_memory_ratio", "mamba-full-memory-ratio") or 0.9,
        mamba_dtype="bfloat16"
        if re.search(r"(mamba|ssm|state)\b[^;]*\bbf16", row.text("note"), re.IGNORECASE)
        else None,
    )
    settings.check()
    if re.search(r"\b(eagle3?|mtp|nextn)\b", row.text("model", "case"), re.IGNORECASE):
        settings = replace(settings, algorithm="EAGLE", draft_is_mtp=True)
    return settings


def _setting(row: _Row, column: str, flag: str) -> float | None:
    """Return a setting from its own column, or from a flag that the note quotes."""
    value = row.number(column)
    if value is not None:
        return value
    match = re.search(rf"--{flag}[ =](\d+(?:\.\d+)?)", row.text("note"))
    return float(match[1]) if match else None


def _whole(value: float | None) -> int | None:
    return int(value) if value else None


def _state_pool(row: _Row) -> int | None:
    match = re.search(r"(?:mamba|state) pool (\d+) (?:reqs|requests|slots)", row.text("note"), re.IGNORECASE)
    return int(match[1]) if match else None


def _dtype(row: _Row) -> str:
    text = (row.text("kv_dtype") or row.text("case")).lower()
    for pattern, name in ((r"fp8|e4m3|e5m2", "fp8_e4m3"), (r"nvfp4|fp4", "nvfp4"), (r"mxfp8", "mxfp8")):
        if re.search(rf"({pattern})\w*( kv|$)" if not row.text("kv_dtype") else pattern, text):
            return name
    return "bf16"


def _parallel(row: _Row) -> Parallel:
    text = row.text("tp")
    match = re.match(r"\d+", text) or re.search(r"(?<=\btp)\d+", row.text("case", "model"), re.IGNORECASE)
    return Parallel(tp=max(1, int(match[0]))) if match else Parallel()


def _rest(row: _Row, settings: EngineSettings, shape: ModelShape | None) -> float:
    before, after, weights = row.number(*_BEFORE), row.number(*_AFTER), row.number(*_WEIGHTS)
    if after is None and before is not None and weights is not None:
        after = before - weights
    if before is None and after is not None and weights is not None:
        before = after + weights
    if before is None or after is None:
        raise _UnknownError("the row does not give the memory free before and after the load")
    if after > before:
        raise _UnknownError(f"more memory is free after the load ({after:g}) than before ({before:g})")
    kept = settings.release.multimodal_reserve_mib << 20 if shape and shape.multimodal else 0
    return (after - before * (1 - settings.mem_fraction_static)) * GIB - kept


def _cell(row: _Row, settings: EngineSettings, shape: ModelShape | None, parallel: Parallel) -> tuple[kv.Cell, str]:
    given = row.number(*_CELL)
    if given:
        return kv.Cell(int(given)), "given"
    if shape is None:
        raise _UnknownError("the row gives no bytes per token, and the model is not in the table of known ones")
    parallel.check(shape)
    made = kv.cell(shape, None, parallel, settings)
    return kv.Cell(made.full + made.draft, made.window), "from the model's shape"


@cache
def _table() -> list[tuple[tuple[re.Pattern[str], ...], ModelShape]]:
    text = resources.files("sglang_bw.plan").joinpath("known.yaml").read_text(encoding="utf-8")
    entries = yaml.safe_load(text)
    return [(tuple(map(re.compile, entry["names"])), read_shape(entry["config"])) for entry in entries]


def known(name: str) -> ModelShape | None:
    """Return the shape of a published model by a name such as ``Kimi-K2.5 INT4``; quantization is not part of it."""
    text = name.lower()
    return next((shape for patterns, shape in _table() if any(pattern.search(text) for pattern in patterns)), None)
