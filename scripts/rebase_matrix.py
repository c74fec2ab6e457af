"""Run the series of 0.5.9 and of 0.5.23 over every release between them, and write docs/rebase-matrix.md.

    python -m scripts.rebase_matrix                       # what is missing in docs/rebase-matrix.json, then the page
    python -m scripts.rebase_matrix --base 0.5.9 --release 0.5.14 --again
    python -m scripts.rebase_matrix --page                # the page alone

Wheels are fetched with the user's pip into the tool's cache, one for each release (about 300 MB in all). A kill loses
the release that is being worked on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from scripts import matrix_page, rivals
from sglang_bw.errors import BwError
from sglang_bw.fork import releases, strict, upstream
from sglang_bw.fork.mail import Patch, read_patch
from sglang_bw.fork.rebase import session
from sglang_bw.fork.rebase.outcome import PatchOutcome, Word
from sglang_bw.fork.rebase.state import Asked, RebaseState
from sglang_bw.fork.rebase.wheels import pick_any, with_readers
from sglang_bw.fork.scratch import Scratch, opened
from sglang_bw.fork.series import Pins, Series, patches_root

CHECKOUT = Path(__file__).resolve().parent.parent
DATA = CHECKOUT / "docs" / "rebase-matrix.json"
PAGE = CHECKOUT / "docs" / "rebase-matrix.md"
BASES = ("0.5.9", "0.5.23")
FIRST, LAST = Version("0.5.9"), Version("0.5.23")
_APPLIES = re.compile(rb"^Applies-To: .*$", re.MULTILINE)


def between(listed: list[releases.Release]) -> list[Pins]:
    """Return the pins of the final and post releases of the matrix, oldest first."""
    return [
        Pins(version=str(release.version), wheels=release.pins)
        for release in listed
        if FIRST <= release.version <= LAST and not release.version.is_prerelease and not release.yanked
    ]


def cells(base: str, pins: Pins, folder: Path) -> list[dict[str, Any]]:
    """Return one cell for each patch of a base on a release.

    Every patch is tried, whatever its Applies-To says: the series is copied with the range removed.
    """
    ranges = {path.name: read_patch(path).trailer("Applies-To") for path in Series.load(patches_root(), base).files}
    series = _without_ranges(base, folder)
    name = pick_any(pins)
    wheels = with_readers(series, pins, name)
    upstream.fetch(pins, name)
    with opened(f"matrix-{base}") as scratch:
        scratch.write_state(None)
        quiet = lambda step: None  # noqa: E731
        state = session.begin(scratch, series, wheels, None, asked=Asked(keep_going=True), progress=quiet)
        state = session.move_all(scratch, state, series.folder, quiet)
        scratch.write_state(None)
        return list(_compared(scratch, state, series, ranges, folder))


def _without_ranges(base: str, folder: Path) -> Series:
    root = folder / "patches"
    (root / base).mkdir(parents=True)
    for path in (patches_root() / base).iterdir():
        if path.is_file():
            (root / base / path.name).write_bytes(_APPLIES.sub(b"Applies-To: >=0", path.read_bytes()))
    return Series.load(root, base)


def _compared(
    scratch: Scratch, state: RebaseState, series: Series, ranges: Mapping[str, str], folder: Path
) -> Iterator[dict[str, Any]]:
    carried = {
        scratch.name_of(commit): commit
        for commit in scratch.repo.run("rev-list", f"{state.onto}..{state.head}").text.split()
    }
    plain = Scratch(folder / "plain")
    plain.create()
    scratch.repo.run("update-ref", "refs/heads/matrix", state.head)
    plain.repo.run("fetch", "--quiet", "--no-tags", str(scratch.tree), "refs/heads/matrix")
    head = state.onto
    for outcome, path, commit in zip(state.outcomes, series.files, state.series, strict=True):
        patch, made = read_patch(path), carried.get(path.name)
        given = _given(scratch, patch, commit, head, made, outcome)
        results = {name: rivals.in_folder(name, given) for name in rivals.IN_FOLDER}
        results[rivals.AM] = rivals.am(plain, head, given)
        head = made or head
        yield _cell(outcome, SpecifierSet(ranges[path.name]).contains(state.request.new), results)


def _given(
    scratch: Scratch, patch: Patch, commit: str, head: str, made: str | None, outcome: PatchOutcome
) -> rivals.Given:
    touched = strict.touched(patch.name, patch.diff)
    there = {*touched, *(scratch.repo.changed(head, made) if made else ())}
    return rivals.Given(
        patch=patch,
        old=scratch.repo.read_many(f"{commit}^", touched),
        patched=scratch.repo.read_many(commit, touched),
        new=scratch.repo.read_many(head, there),
        right=scratch.repo.read_many(made, there) if made else None,
        merged=outcome.word is Word.MERGED,
        doubt=outcome.conflicts[0].why if outcome.conflicts else "",
    )


def _cell(outcome: PatchOutcome, in_range: bool, results: Mapping[str, rivals.Result]) -> dict[str, Any]:
    others = {
        name: {
            "verdict": str(one.verdict),
            "seconds": round(one.seconds, 3),
            **({"says": one.says} if one.says else {}),
        }
        for name, one in results.items()
    }
    return {
        "patch": outcome.patch.removesuffix(".patch"),
        "word": str(outcome.word),
        "in_range": in_range,
        "seconds": outcome.seconds,
        "says": outcome.says or (outcome.conflicts[0].why if outcome.conflicts else ""),
        "others": others,
    }


def _machine() -> dict[str, str]:
    """Return what the numbers were made with."""

    def version(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]

    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "git": version("git", "--version"),
        "patch": version("patch", "--version"),
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }


def _load() -> dict[str, Any]:
    if DATA.is_file():
        found: dict[str, Any] = json.loads(DATA.read_text())
        return found
    return {"schema_version": 1, "bases": {base: {} for base in BASES}}


def _write(data: dict[str, Any]) -> None:
    """Write the data, one line a cell, so that a change shows as what it is."""
    text = json.dumps({key: value for key, value in data.items() if key != "bases"}, indent=1)[:-2] + ',\n "bases": {\n'
    parts = []
    for base, by_release in data["bases"].items():
        rows = []
        for release in sorted(by_release, key=Version):
            lines = ",\n".join("    " + json.dumps(cell, separators=(",", ":")) for cell in by_release[release])
            rows.append(f"   {json.dumps(release)}: [\n{lines}\n   ]")
        parts.append(f"  {json.dumps(base)}: {{\n" + ",\n".join(rows) + "\n  }")
    scratch = DATA.with_suffix(".new")
    scratch.write_text(text + ",\n".join(parts) + "\n }\n}\n")
    scratch.replace(DATA)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--base", action="append", choices=BASES, help="only this series (may come twice)")
    parser.add_argument("--release", action="append", help="only this release (may come twice)")
    parser.add_argument("--again", action="store_true", help="also what the data has already")
    parser.add_argument("--page", action="store_true", help="write the page from the data, and run nothing")
    asked = parser.parse_args()
    data = _load()
    if not asked.page:
        data["made"] = _machine()
        try:
            data = _fill(data, asked)
        except BwError as error:
            print(f"error: {error.message}\n{error.hint}", file=sys.stderr)
            return error.exit_code
    PAGE.write_text(matrix_page.page(data, PAGE.read_text()))
    return 0


def _fill(data: dict[str, Any], asked: argparse.Namespace) -> dict[str, Any]:
    wanted = [one for one in between(releases.listed()) if not asked.release or one.version in asked.release]
    for pins in wanted:
        for base in asked.base or BASES:
            if pins.version in data["bases"][base] and not asked.again:
                continue
            print(f"{base} on {pins.version}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix="sglang-bw-matrix-") as folder:
                found = cells(base, pins, Path(folder))
            # The other series may be running elsewhere.
            data = {**_load(), "made": data["made"]}
            data["bases"][base][pins.version] = found
            data.setdefault("series", {})[base] = Series.load(patches_root(), base).pins.full_version
            _write(data)
    return data


if __name__ == "__main__":
    sys.exit(main())
