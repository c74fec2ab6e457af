"""Values that options of several commands take."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sglang_bw.experiment.verdict import Limits

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


class Real(click.FloatRange):
    """A number within bounds; ``inf`` and ``nan``, which no bound of click's keeps out, are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no number to work with.", param, ctx)
        return number


# Seconds, above 0: a request that takes no time is none.
LIMIT = Real(min=0, min_open=True)


class Place(click.Path):
    """A path; an empty one, which would be the working directory, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if value == "":
            self.fail("it is empty.", param, ctx)
        return super().convert(value, param, ctx)


class Share(click.ParamType[float]):
    """``3%`` or ``0.03``."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the share as a number between 0 and 1."""
        text = str(value)
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = 0.0
        if not 0 < share < 1:
            self.fail(f"{value!r} is no share such as 3% or 0.03.", param, ctx)
        return share


class Duration(click.ParamType[float]):
    """``90s``, ``20m``, ``2h``; a bare number is seconds; above 0."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(value).strip())
        seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
        if not 0 < seconds < math.inf:
            self.fail(f"{value!r} is no duration such as 90s, 20m or 2h.", param, ctx)
        return seconds


class Numbers(click.ParamType[tuple[int, ...]]):
    """``1,4,16``."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the numbers, each once."""
        if isinstance(value, tuple):
            return value
        parts = value.split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is no list of numbers such as 1,4,16.", param, ctx)
        return tuple(dict.fromkeys(int(part) for part in parts))


class LimitsType(click.ParamType["Limits"]):
    """``ttft=0.5,tpot=0.05``, seconds."""

    name = "limits"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Limits:
        """Return the limits of a good request."""
        from sglang_bw.experiment.verdict import Limits

        if isinstance(value, Limits):
            return value
        found = {}
        for part in value.split(","):
            name, _, number = part.partition("=")
            if name not in ("ttft", "tpot", "e2e"):
                self.fail(f"{part!r} is no limit such as ttft=0.5, tpot=0.05 or e2e=10 (seconds).", param, ctx)
            found[f"{name}_s"] = LIMIT.convert(number, param, ctx)
        return Limits(**found)
