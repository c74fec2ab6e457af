"""Which engine release has which flag, and what a flag of one release is called in another.

The names come from the releases' own argument parsers: ``scripts/flags.py`` reads the wheels and writes
``data/flags.json``. What replaces a retired flag is in ``data/renames.yaml``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import resources
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

from sglang_bw.recipes.flags import ALIASES, Flag, Flags


class Fate(Enum):
    """What became of a flag in another release."""

    SAME = "same"
    DEPRECATED = "deprecated"  # still taken, with a warning
    RENAMED = "renamed"  # gone; other flags say the same
    REMOVED = "removed"  # gone without one
    NOT_YET = "not yet"  # came with a later release
    ABBREVIATED = "abbreviated"  # the parser completes it, as long as no other flag begins like it
    AMBIGUOUS = "ambiguous"  # the parser refuses it: several flags begin like it
    UNKNOWN = "unknown"  # in no release that we know


#: Fates with which the engine does not start.
BROKEN = frozenset({Fate.RENAMED, Fate.REMOVED, Fate.NOT_YET, Fate.AMBIGUOUS, Fate.UNKNOWN})


@dataclass(frozen=True)
class Translation:
    """A flag as another release takes it.

    :ivar flag: as it was written.
    :ivar flags: to be written instead; the flag itself where nothing changed, empty where there is none.
    :ivar reason: one plain sentence, empty for ``SAME``.
    """

    flag: Flag
    fate: Fate
    flags: Flags
    reason: str = ""

    @property
    def breaks(self) -> bool:
        """Whether the other release refuses the flag as it was written."""
        return self.fate in BROKEN

    def as_json(self) -> dict[str, Any]:
        """Return the fields, flags as command-line tokens."""
        return {
            "flag": self.flag.tokens(),
            "fate": self.fate.value,
            "instead": [token for flag in self.flags for token in flag.tokens()],
            "reason": self.reason,
        }


def releases() -> tuple[str, ...]:
    """Return the releases whose flags are known, the oldest first."""
    return tuple(_table()["releases"])


def known(version: str) -> bool:
    """Tell whether the flags of a version were read; of others the nearest older release is taken."""
    return _base(version) in {Version(release) for release in releases()}


def translate(flag: Flag, from_version: str | None, to_version: str) -> Translation:
    """Say what a flag that ``from_version`` understood is called in ``to_version``.

    Versions may carry a local or post part (``0.5.23+bw.1``); one that is not in the table counts as the nearest
    older release. Works in both directions.

    :param from_version: ``None`` when it is not known for which release the flag was written.
    :raises ValueError: a version that is none.
    """
    target = _release(to_version)
    name = flag.name.removeprefix("no-") if not flag.values and not _in(flag.name, target) else flag.name
    if _in(name, target):
        return _present(flag, name, target)
    full = _completions(name, target)
    if not _spans().get(name) and len(full) == 1:
        return Translation(flag, Fate.ABBREVIATED, (Flag(full[0], flag.values),), f"short for --{full[0]}")
    if instead := _instead(flag, name, target):
        reason = f"sglang {target} has {_words(instead)} instead of --{flag.name}"
        return Translation(flag, Fate.RENAMED, instead, reason)
    return _absent(flag, name, from_version, target, full)


def translate_all(flags: Flags, from_version: str | None, to_version: str) -> tuple[Translation, ...]:
    """Translate every flag of a command line; short flags such as ``-h`` are left alone."""
    return tuple(translate(flag, from_version, to_version) for flag in flags if flag.dashes == "--")


def patch_of(name: str) -> str | None:
    """Return the topic of the patch that brings a flag, ``None`` for upstream's own flags."""
    ours = _renames()["series"].get(name)
    return str(ours["patch"]) if ours else None


def _present(flag: Flag, name: str, target: str) -> Translation:
    since = _table()["deprecated"].get(name)
    if not since or Version(since) > Version(target):
        return Translation(flag, Fate.SAME, (flag,))
    instead = _instead(flag, name, target)
    advice = f"write {_words(instead)}" if instead else _renames()["reason"].get(name, "it will go")
    return Translation(flag, Fate.DEPRECATED, instead or (flag,), f"--{name} is deprecated since {since}: {advice}")


def _absent(flag: Flag, name: str, from_version: str | None, target: str, full: list[str]) -> Translation:
    if len(full) > 1 and not _spans().get(name):
        choice = " or ".join(f"--{candidate}" for candidate in full[:3])
        return Translation(flag, Fate.AMBIGUOUS, (), f"--{name} may mean {choice}: spell it in full")
    spans = _spans().get(name)
    if not spans:
        where = f", and sglang {from_version} is not known to have it" if from_version else ""
        return Translation(flag, Fate.UNKNOWN, (), f"no release from {releases()[0]} on has --{name}{where}")
    first, last = spans[0][0], spans[-1][1]
    if Version(first) > Version(target):
        return Translation(flag, Fate.NOT_YET, (), f"--{name} came with sglang {first}")
    why = _renames()["reason"].get(name, "no flag took its place")
    return Translation(flag, Fate.REMOVED, (), f"--{name} went after sglang {last}: {why}")


def _instead(flag: Flag, name: str, target: str) -> Flags:
    """Return what says the same in ``target``: forward by the table, or back to an old name that kept its value."""
    renamed: dict[str, list[str]] = _renames()["renamed"]
    if name in renamed:
        parts = [part.partition("=") for part in renamed[name]]
        new = tuple(Flag(to, (value,) if equals else flag.values) for to, equals, value in parts)
        if all(_in(part.name, target) for part in new):
            return new
        further = tuple(part for one in new for part in _instead(one, one.name, target))
        return further if len(further) >= len(new) else ()
    back = [old for old, new in renamed.items() if new == [name] and _in(old, target)]
    return (Flag(back[0], flag.values),) if back else ()


def _words(flags: Flags) -> str:
    return " ".join(token for flag in flags for token in (f"--{flag.name}", *flag.values))


def _completions(name: str, release: str) -> list[str]:
    """Return the flags of a release that begin with ``name``, one for aliases of the same."""
    found = {ALIASES.get(flag, flag): flag for flag in sorted(_flags_of(release)) if flag.startswith(name)}
    return sorted(found.values())


def _in(name: str, release: str) -> bool:
    return name in _flags_of(release)


def _base(version: str) -> Version:
    try:
        return Version(Version(version).public)
    except InvalidVersion as error:
        raise ValueError(f"{version!r} is not a version") from error


def _release(version: str) -> str:
    base = _base(version)
    older = [release for release in releases() if Version(release) <= base]
    return older[-1] if older else releases()[0]


@cache
def _flags_of(release: str) -> frozenset[str]:
    at = Version(release)
    return frozenset(
        name for name, spans in _spans().items() if any(Version(first) <= at <= Version(last) for first, last in spans)
    )


@cache
def _spans() -> dict[str, list[tuple[str, str]]]:
    newest = releases()[-1]
    spans: dict[str, list[tuple[str, str]]] = {}
    for text, names in _table()["flags"].items():
        runs = [run.partition("..") for run in text.split(",")]
        for name in names:
            spans[name] = [(first, last or newest) for first, _, last in runs]
    # Not in upstream's wheels: whether an engine has the patch is asked with `patch_of`.
    for name, ours in _renames()["series"].items():
        spans.setdefault(name, [(ours["base"], newest)])
    return spans


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(_read("flags.json"))
    return table


@cache
def _renames() -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(_read("renames.yaml"))
    return table


def _read(name: str) -> str:
    return (resources.files("sglang_bw.recipes") / "data" / name).read_text(encoding="utf-8")
