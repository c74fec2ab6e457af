"""Strict checks of a series: everything that is wrong is found and reported at once."""

from __future__ import annotations

import codecs
import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from sglang_bw.errors import LintError, PatchApplyError
from sglang_bw.fork import mail, strict
from sglang_bw.fork.series import ORDER_FILE, Series

REQUIRED = ("Upstream-Status", "Bug", "Why", "Removal", "Applies-To", "Test", "Verified-On")
_NAME = re.compile(r"\d{4}-[a-z0-9]+(-[a-z0-9]+)*\.patch")
_VERIFIED = re.compile(r"[a-z0-9]+(:[a-z0-9]+)?( \([^)]+\))?")
_BUG = re.compile(r"https://\S+|none \(.+\)")
# What `patches new` writes where the author has to write something.
TODO = "TODO"
UNFILLED = "is still to be filled in"
_LF = b"\n"
# In the lines that git writes; in those of a hunk it is the file's own.
_CRLF = re.compile(rb"^(From |diff --git ).*\r$", re.MULTILINE)
_ZERO = b"From 0000000000000000000000000000000000000000 "


def lint(series: Series, *, checkout: Path | None = None) -> list[str]:
    """Return every finding about a series, in the order of the series; none means good.

    :param checkout: where the tests named in trailers are, default the folder that ``patches/`` lies in.
    """
    place = checkout or series.folder.parent.parent
    findings = folder_findings(
        series.folder,
        series.order,
        lambda patch: _mail(patch) + _trailers(patch, series.base, place) + diff_findings(patch) + _blanks(patch),
    )
    if not series.pins.tree:
        findings.append("upstream.toml: the tree id is not pinned; run `sglang-bw patches refresh`")
    return findings


def require_clean(series: Series) -> None:
    """Raise when a series has findings.

    :raises LintError: with all of them.
    """
    if findings := lint(series):
        raise LintError(
            findings, hint="`sglang-bw patches lint` checks again; the format is described in docs/patch-format.md"
        )


def folder_findings(folder: Path, order: Sequence[str], judge: Callable[[mail.Patch], list[str]]) -> list[str]:
    """Return what is wrong with a folder of patches: with its order file, and what ``judge`` says of each patch."""
    findings = _order(folder, order)
    for path in (folder / name for name in order):
        if not path.is_file() or path.is_symlink():
            continue
        try:
            patch = mail.read_patch(path)
        except LintError as error:
            findings += error.findings
            continue
        findings += [f"{patch.name}: {text}" for text in _bytes(path.read_bytes()) + judge(patch)]
    return findings


def _bytes(raw: bytes) -> list[str]:
    """Return what editors, mail programs and killed copies do to a patch file, which git would tell in other words."""
    findings = []
    if raw.startswith(codecs.BOM_UTF8):
        findings.append("begins with a byte order mark: save it as UTF-8 without one")
    if _CRLF.search(raw):
        findings.append("its lines end in CRLF, so no line of it is one of the release: `sed -i 's/\\r$//' FILE`")
    if not raw.endswith(_LF):
        findings.append("its last line has no end: the file is cut off, or an editor took the newline away")
    return findings


def _order(folder: Path, order: Sequence[str]) -> list[str]:
    on_disk = {path.name for path in folder.glob("*.patch")}
    findings = [f"series: {name} is listed {n} times" for name, n in Counter(order).items() if n > 1]
    findings += [f"series: {name} is listed, but there is no such file" for name in order if name not in on_disk]
    findings += [f"series: {name} is on disk, but not listed" for name in sorted(on_disk - set(order))]
    there = [name for name in order if name in on_disk]
    findings += [
        f"{name} is a symbolic link, which an export would replace: put the file itself there"
        for name in (ORDER_FILE, *there)
        if (folder / name).is_symlink()
    ]
    findings += [f"{name} is no file" for name in there if (folder / name).is_dir()]
    findings += [f"series: {name}: a name is NNNN-topic.patch" for name in order if not _NAME.fullmatch(name)]
    if list(order) != sorted(order):
        findings.append("series: the numbers are not in the order of the list")
    return findings


def _mail(patch: mail.Patch) -> list[str]:
    findings = []
    if not patch.subject:
        findings.append("no subject")
    if not mail.description(patch):
        findings.append("no description: say what hurts and why this is the cure")
    if not patch.path.read_bytes().startswith(_ZERO):
        findings.append("not as exported: the first line names a commit (format-patch --zero-commit)")
    return findings + [f"not as exported: {text}" for text in _blank_lines(patch.path.read_bytes())]


def _blank_lines(raw: bytes) -> list[str]:
    """Return where a mail has more or fewer blank lines than git exports; a rebase would call that an edit by hand.

    What else may differ (the summary, hash lengths) only an export tells: that takes the release.
    """
    message, _, rest = raw.partition(b"\n---\n")
    summary, _, diff = rest.partition(b"\ndiff --git ")
    findings = []
    if (at := message.find(b"\n\n\n")) >= 0:
        findings.append(f"line {message.count(_LF, 0, at) + 3} is a second blank line")
    if message.endswith(b"\n"):
        findings.append("a blank line before ---")
    if summary.startswith(b"\n") or not summary.endswith(b"\n") or summary.endswith(b"\n\n"):
        findings.append("between --- and the diff come the summary and one blank line")
    before = len(raw) - len(diff)
    if (at := diff.find(b"\n\n")) >= 0:
        findings.append(f"line {raw.count(_LF, 0, before + at) + 2} is empty: a line of a hunk begins with a sign")
    return findings


def _trailers(patch: mail.Patch, base: str, checkout: Path) -> list[str]:
    findings = [f"trailer {key} is missing" for key in REQUIRED if not patch.trailer(key)]
    findings += unfilled(patch) or value_findings(patch, base)
    return findings + _tests(patch, checkout)


def unfilled(patch: mail.Patch) -> list[str]:
    """Return which parts of the message are still what ``patches new`` wrote for its author to fill in."""
    findings = [f"{key} {UNFILLED}" for key, value in patch.trailers if value.startswith(TODO)]
    if patch.subject.startswith(TODO):
        findings.append(f"the subject {UNFILLED}")
    if any(line.startswith(TODO) for line in mail.description(patch).splitlines()):
        findings.append(f"the description {UNFILLED}")
    return findings


def value_findings(patch: mail.Patch, base: str) -> list[str]:
    """Return what is wrong with the trailers that are there, for a patch that is to apply to ``base``."""
    findings = []
    status = patch.trailer("Upstream-Status")
    if status and not mail.STATUS_FORM.fullmatch(status):
        findings.append(
            f"Upstream-Status {status!r}: must be Pending, Submitted [url], Backport [url, in X], Denied [url] "
            "or Inappropriate [reason]"
        )
    findings += [
        f"Bug {bug!r}: a public https reference or none (symptom)"
        for bug in patch.all("Bug")
        if not _BUG.fullmatch(bug)
    ]
    if applies := patch.trailer("Applies-To"):
        try:
            if not SpecifierSet(applies).contains(base, prereleases=True):
                findings.append(f"Applies-To {applies} leaves out {base}")
        except InvalidSpecifier:
            findings.append(f"Applies-To {applies!r} is no version range")
    for word in filter(None, (part.strip() for part in patch.trailer("Verified-On").split(","))):
        if not _VERIFIED.fullmatch(word):
            findings.append(f"Verified-On {word!r}: one of cpu, smNN, resolver:smNN, with a remark in brackets at most")
    return findings


def _tests(patch: mail.Patch, checkout: Path) -> list[str]:
    if not (checkout / "tests" / "patches").is_dir():
        return []  # the copy inside an installed tool travels without the tests
    return [
        f"Test {test}: no such file"
        for test in patch.all("Test")
        if not test.startswith(TODO) and not (checkout / test).is_file()
    ]


def diff_findings(patch: mail.Patch) -> list[str]:
    """Return what a diff does that no patch of a wheel can do."""
    try:
        files = strict.parse(patch.name, patch.diff)
    except PatchApplyError as error:
        return [error.message.removeprefix(f"{patch.name}: ")]
    findings = []
    for file in files:
        if file.is_binary_file or (not file and not file.is_rename):
            findings.append(f"{file.path}: binary or mode change; a patch changes text only")
        if not file.path.startswith("python/sglang/") and not file.is_added_file:
            findings.append(f"{file.path}: the wheel does not hold this file, so it cannot be changed")
        elif file.path.startswith("sglang/"):
            findings.append(
                f"{file.path}: in upstream's tree the package is python/sglang/; here it would not be packed"
            )
    return findings


def _blanks(patch: mail.Patch) -> list[str]:
    try:
        files = strict.parse(patch.name, patch.diff)
    except PatchApplyError:
        return []  # found already
    findings = []
    for file in files:
        for line in itertools.chain.from_iterable(file):
            text = line.value.rstrip("\n").removesuffix("\r")
            if line.is_added and text != text.rstrip():
                findings.append(f"{file.path}:{line.target_line_no}: trailing blanks")
    return findings
