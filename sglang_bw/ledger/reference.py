"""What others reported not to work: rows that come with the tool, marked as reported, never as seen here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, time
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources

import yaml
from pydantic import BaseModel, ConfigDict, Field

from sglang_bw.ledger.entry import Entry
from sglang_bw.ledger.failure import FailureClass
from sglang_bw.recipes import flags as engine_flags
from sglang_bw.recipes.flags import Flags

_PREFIX = "reported-"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class When(_Part):
    """What a launch must have in common with a row.

    :ivar archs: one of these; none: any.
    :ivar models: one of these is a part of the target's or the draft's name; none: any.
    :ivar flags: all of these are set: ``name``, or ``name=value``.
    :ivar env: all of these are set: ``NAME``, or ``NAME=pattern``.
    """

    archs: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    env: tuple[str, ...] = ()


class Source(_Part):
    """Who reported it, and when it was published, or read where that is not known."""

    says: str
    at: date


class Row(_Part):
    """One reported failure."""

    id: str
    failure: FailureClass = Field(alias="class")
    says: str
    cause: str
    fix: str
    source: str = Field(alias="from")
    models: str = ""
    when: When | None = None


class _Table(_Part):
    sources: dict[str, Source]
    rows: tuple[Row, ...]


class Launch(_Part):
    """A launch to hold the rows against.

    :ivar arch: ``sm120``...; ``None`` when it is not known: then no row is left out for it.
    """

    models: tuple[str, ...]
    flags: Flags
    env: Mapping[str, str]
    arch: str | None = None


@cache
def table() -> tuple[Row, ...]:
    """Return the rows as they are written."""
    return _load().rows


@cache
def entries() -> tuple[Entry, ...]:
    """Return the rows as entries of a ledger."""
    return tuple(map(_entry, table()))


def matching(launch: Launch) -> list[Entry]:
    """Return the rows that a launch has everything in common with."""
    return [_entry(row) for row in table() if row.when and _holds(row.when, launch)]


@cache
def _load() -> _Table:
    text = resources.files("sglang_bw.ledger").joinpath("reference.yaml").read_text(encoding="utf-8")
    return _Table.model_validate(yaml.safe_load(text))


def _entry(row: Row) -> Entry:
    source = _load().sources[row.source]
    return Entry(
        id=_PREFIX + row.id,
        kind="start",
        at=datetime.combine(source.at, time(), UTC),
        recipe=row.models or None,
        result="failed",
        failure=row.failure,
        summary=row.cause,
        evidence=(row.says,),
        fix=row.fix,
        origin="reported",
        source=source.says,
    )


def _holds(when: When, launch: Launch) -> bool:
    names = " ".join(launch.models).lower()
    return (
        (not when.archs or launch.arch is None or launch.arch in when.archs)
        and (not when.models or any(re.search(rf"{re.escape(part)}(?!\d)", names) for part in when.models))
        and all(_has_flag(launch.flags, wanted) for wanted in when.flags)
        and all(_has_variable(launch.env, wanted) for wanted in when.env)
    )


def _has_flag(flags: Flags, wanted: str) -> bool:
    name, equals, value = wanted.partition("=")
    if equals:
        return engine_flags.value(flags, name) == value
    return engine_flags.has(flags, name)


def _has_variable(env: Mapping[str, str], wanted: str) -> bool:
    name, equals, pattern = wanted.partition("=")
    return name in env and (not equals or fnmatchcase(env[name], pattern))
