"""The tables and fitted parameters that ship with the tool; each file names its sources in its first lines."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Parameters:
    """What ``scripts/fit_speculation.py`` found; none has a unit.

    :ivar traffic: kind of draft -> exponent that turns a golden curve into one of mixed traffic.
    :ivar draft_step: time of a draft step over that of a plain decode step of one request.
    :ivar attention: engine -> share of the attention cost that further query tokens of a request pay again; 1 when a
        kernel treats every query token as a request of its own.
    :ivar bundle: weights of what makes up log R of a target nobody measured.
    :ivar sigma: basis of a cost -> standard deviation of the logarithm of the predicted speedup.
    :ivar accept_sigma: the same for an accept length nobody measured.
    """

    traffic: dict[str, float]
    draft_step: float
    attention: dict[str, float]
    bundle: dict[str, float]
    sigma: dict[str, float]
    accept_sigma: float


@cache
def table(name: str) -> tuple[dict[str, str], ...]:
    """Return the rows of ``plan/data/<name>.csv``; lines that begin with # are comments."""
    text = files("sglang_bw.plan").joinpath(f"data/{name}.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


@cache
def parameters() -> Parameters:
    """Return the parameters of ``plan/data/speculation.json``."""
    text = files("sglang_bw.plan").joinpath("data/speculation.json").read_text(encoding="utf-8")
    return Parameters(**json.loads(text)["parameters"])
