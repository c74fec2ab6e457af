"""A user's own patches, applied after a base's series: a folder with ``series`` and patch mails.

The form is the series' own (docs/patch-format.md), but it asks for less: a subject and a ``Why``. What else a mail
says is checked all the same. Nothing is pinned: which patches an engine has is told by the sha256 of their files,
and what they make by the tree id, which is in the version.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.version import Version

from sglang_bw.errors import LintError, LocalSeriesError, PatchApplyError
from sglang_bw.fork import lint as checks
from sglang_bw.fork import mail, strict
from sglang_bw.fork.apply import PREFIX, Applied, Bench
from sglang_bw.fork.record import LocalRecord, PatchRecord
from sglang_bw.fork.series import ORDER_FILE, Pins, Series, local_option, read_order, root_option

MARK = ".local."
_FORM = "docs/own-patches.md describes a local series"


@dataclass(frozen=True)
class LocalSeries:
    """The folder and the patch files in the order they are applied."""

    folder: Path
    order: tuple[str, ...]

    @classmethod
    def load(cls, folder: Path) -> LocalSeries:
        """Read the folder's order file; the patches are read when they are asked for.

        :raises LocalSeriesError: no such folder, no ``series`` in it, or an empty one.
        """
        if not (folder / ORDER_FILE).is_file():
            what = "has no file named series" if folder.is_dir() else "is no folder"
            raise LocalSeriesError(
                [f"{folder} {what}"],
                hint="a local series is a folder with `series` (one patch file a line) and the patches;"
                f" `sglang-bw patches new TOPIC{local_option(folder)}` begins one",
            )
        try:
            order = read_order(folder / ORDER_FILE)
        except LintError as error:
            raise LocalSeriesError(error.findings, hint=_FORM) from None
        if not order:
            raise LocalSeriesError([f"{folder / ORDER_FILE} lists no patch"], hint="leave out --local, or name patches")
        return cls(folder, tuple(order))

    @property
    def files(self) -> tuple[Path, ...]:
        """The patch files, in the order they are applied."""
        return tuple(self.folder / name for name in self.order)

    @cached_property
    def patches(self) -> tuple[mail.Patch, ...]:
        """The patches, read.

        :raises LocalSeriesError: a file cannot be read, or is no mail that git understands.
        """
        try:
            return tuple(mail.read_patch(path) for path in self.files)
        except LintError as error:
            raise LocalSeriesError(error.findings, hint=_FORM) from None

    @property
    def identity(self) -> tuple[str, ...]:
        """The sha256 of each patch file: two local series with the same ones are the same."""
        return tuple(patch.sha256 for patch in self.patches)

    def is_in(self, recorded: LocalRecord | None, series: Series) -> bool:
        """Whether a wheel's record says: this series, and on it exactly these patches."""
        if recorded is None or recorded.series_tree != series.pins.tree:
            return False
        return self.identity == tuple(patch.sha256 for patch in recorded.patches)


def lint(local: LocalSeries, base: str) -> list[str]:
    """Return every finding about a local series that is to lie on ``base``; none means good."""

    def judge(patch: mail.Patch) -> list[str]:
        found = checks.unfilled(patch) + checks.value_findings(patch, base) + checks.diff_findings(patch)
        if not patch.subject:
            found.append("no subject")
        if not patch.trailer("Why"):
            found.append("trailer Why is missing: one sentence, what the patch is for")
        return found

    return checks.folder_findings(local.folder, local.order, judge)


def load_for(folder: Path, series: Series) -> LocalSeries:
    """Read a local series and check it for the base of ``series``, on which it is to lie.

    :raises LocalSeriesError: it cannot be read, or has findings; carries all of them.
    """
    local = LocalSeries.load(folder)
    if findings := lint(local, series.base):
        where = f"--base {series.base}{local_option(folder)}{root_option(series.folder.parent)}"
        raise LocalSeriesError(findings, hint=f"`sglang-bw patches lint {where}` checks again; {_FORM}")
    return local


@dataclass(frozen=True)
class LocalApplied:
    """A release with both series on it; ``applied`` counts the patches of both."""

    local: LocalSeries
    applied: Applied

    @property
    def touched(self) -> frozenset[str]:
        """Paths in the wheel that local patches change."""
        named = (path for patch in self.local.patches for path in strict.touched(patch.name, patch.diff))
        return frozenset(path.removeprefix(PREFIX) for path in named)

    def record(self, pins: Pins, series_tree: str) -> LocalRecord:
        """Return what the wheel's record says of them."""
        patches = tuple(map(PatchRecord.of, self.local.patches))
        return LocalRecord(series=pins.local, series_tree=series_tree, patches=patches)


def apply_after(bench: Bench, local: LocalSeries, series: Series) -> LocalApplied:
    """Put a local series on a bench that has the base's series on it already.

    :raises PatchApplyError: a patch does not apply exactly on top of the series.
    """
    where = local_option(local.folder) + root_option(series.folder.parent)
    try:
        return LocalApplied(local, bench.put(local.patches))
    except PatchApplyError as error:
        raise PatchApplyError(
            f"local series {local.folder}: {error.message}",
            hint=f"it has to apply exactly on SGLang {series.base} with series {series.pins.local}."
            f" Made for another base? `sglang-bw rebase {series.base}{where}` moves it (`--from` names that base)",
        ) from None


def local_version(pins: Pins, tree: str) -> str:
    """Return the series id of ``tree``, which has local patches: ``bw.N.local.<first 8 of the tree id>``."""
    # Through Version, since a segment of digits alone is a number there: leading zeros go.
    return str(Version(f"{pins.version}+bw.{pins.release.number}{MARK}{tree[:8]}").local)


def planned_version(pins: Pins) -> str:
    """Return the full version of a build with local patches before it: its tree is not known yet."""
    return f"{pins.version}+bw.{pins.release.number}{MARK}<tree>"
