"""What an examination of the host found: one line each, what it costs, and the command that fixes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """How bad it is, worst first."""

    FAIL = "fail"  # a server will not start, will hang, or will not be the patched one
    WARN = "warn"  # it will run, slower or with a risk that `costs` names
    UNSEEN = "not seen"  # this process may not or cannot look; `fix` says who can
    OK = "ok"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    :ivar group: the heading it stands under.
    :ivar name: what was looked at, a few words, the same on every host.
    :ivar says: what is there, with its numbers.
    :ivar costs: what it does to a server, empty for ``ok``.
    :ivar fix: a command or a setting, empty when there is nothing to do.
    """

    group: str
    name: str
    verdict: Verdict
    says: str
    costs: str = ""
    fix: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {**asdict(self), "verdict": self.verdict.value}


@dataclass(frozen=True)
class Group:
    """Makes the findings of one heading."""

    title: str

    def ok(self, name: str, says: str, *, fix: str = "") -> Finding:
        """Return a finding that needs nothing; ``fix`` is then a suggestion."""
        return Finding(self.title, name, Verdict.OK, says, fix=fix)

    def warn(self, name: str, says: str, *, costs: str, fix: str) -> Finding:
        """Return a finding that costs speed or is a risk."""
        return Finding(self.title, name, Verdict.WARN, says, costs, fix)

    def fail(self, name: str, says: str, *, costs: str, fix: str) -> Finding:
        """Return a finding that keeps a server from working."""
        return Finding(self.title, name, Verdict.FAIL, says, costs, fix)

    def unseen(self, name: str, says: str, *, fix: str = "") -> Finding:
        """Return what could not be looked at, with the reason."""
        return Finding(self.title, name, Verdict.UNSEEN, says, fix=fix)


def listed(things: list[str] | tuple[str, ...], most: int = 4) -> str:
    """Return ``a, b, c, d and 3 more``."""
    shown = ", ".join(things[:most])
    return shown + (f" and {len(things) - most} more" if len(things) > most else "")


def numbers(indices: list[int]) -> str:
    """Return GPU numbers as people write them: ``0-3, 6``."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
