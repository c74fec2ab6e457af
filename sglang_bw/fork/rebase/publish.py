"""Writing the new base: everything is made and checked beside ``patches/``, and appears there in one rename."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_bw.errors import LintError, OutputError, RebaseFailedError
from sglang_bw.fork import lint
from sglang_bw.fork.apply import Progress, apply_in, named_paths, text_files
from sglang_bw.fork.build import BuiltWheel, pack
from sglang_bw.fork.mail import read_patch
from sglang_bw.fork.patchtests import PatchRun, named_tests, run_patches, run_tests
from sglang_bw.fork.rebase.outcome import PatchOutcome, Word
from sglang_bw.fork.rebase.state import RebaseState
from sglang_bw.fork.refresh import write_pins
from sglang_bw.fork.scratch import Scratch
from sglang_bw.fork.series import ORDER_FILE, PINS_FILE, Pins, Series, has_tests, root_option
from sglang_bw.fork.wheel import Wheel


@dataclass(frozen=True)
class Made:
    """The new base as it was checked: where it lies, the wheel that was built from it, and its tests' rows."""

    series: Series
    wheel: BuiltWheel
    tests: tuple[PatchRun, ...] = ()


@contextmanager
def staged(scratch: Scratch, state: RebaseState, source: Wheel, progress: Progress) -> Iterator[Made]:
    """Export the moved series, apply it with both readers, pin it, lint it and build its wheel.

    :param source: the new release.
    :raises BwError: what the checks found; nothing was written outside of the scratch folder.
    """
    with tempfile.TemporaryDirectory(prefix="staged-", dir=scratch.folder) as folder:
        place = Path(folder)
        target = place / "patches" / state.request.new
        target.mkdir(parents=True)
        exported = scratch.export(state.onto)
        for patch in exported:
            (target / patch.name).write_bytes(patch.data)
        (target / ORDER_FILE).write_text("".join(f"{patch.name}\n" for patch in exported), encoding="utf-8")
        pins = _pins(state)
        write_pins(target / PINS_FILE, pins)
        progress("applying the new series with both readers")
        patches = [read_patch(path) for path in Series.load(target.parent, pins.version).files]
        scratch.start(state.onto, work_on=named_paths(patches))
        applied = apply_in(scratch.repo, patches, text_files(source), progress)
        write_pins(
            target / PINS_FILE, replace(pins, tree=applied.tree, patched=applied.digests, removed=applied.removed)
        )
        series = Series.load(target.parent, pins.version)
        if findings := lint.lint(series, checkout=Path(state.request.root).parent):
            raise LintError(findings, hint=f"edit the commits in {scratch.tree}; the format is in docs/patch-format.md")
        (place / "made").mkdir()
        (place / "dist").mkdir()
        yield Made(series, pack(series, source, applied, place / "made", place / "dist", progress))


def _pins(state: RebaseState) -> Pins:
    """Return the new base's pins without a tree; a series that is there keeps its wheels and its last release."""
    if state.request.present:
        return replace(Series.load(Path(state.request.root), state.request.new).pins, tree="", patched={}, removed=())
    return Pins(version=state.request.new, wheels=state.request.new_wheels)


def require_tests(root: Path) -> None:
    """Refuse to promise tests where there are none.

    :raises RebaseFailedError: they do not lie beside the series.
    """
    if not has_tests(root):
        raise RebaseFailedError(
            f"{root.parent} has no tests/patches: the tests cannot run",
            hint="leave out --test; it works in a checkout of sglang-bw",
        )


def try_tests(made: Made, outcomes: Sequence[PatchOutcome], stock: Path, root: Path, progress: Progress) -> Made:
    """Run the tests named in the trailers on the stock and the patched new release.

    :param stock: upstream's wheel.
    :raises RebaseFailedError: a patch's test is not red on stock or not green on the patched engine, or the test of a
        patch that was dropped as merged is still red on stock.
    """
    checkout = root.parent
    with tempfile.TemporaryDirectory(prefix="sglang-bw-trial-") as folder:
        trees = [Path(folder) / kind for kind in ("stock", "patched")]
        for tree, wheel in zip(trees, (stock, made.wheel.path), strict=True):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(tree)
        base, patches = made.series.base, [read_patch(path) for path in made.series.files]
        progress(f"testing {len(named_tests(patches))} files on the stock and the patched engine")
        rows, output = run_patches(checkout, base, made.series.folder, patches, trees[0], trees[1])
        problems = [f"{row.patch}: {problem}" for row in rows for problem in row.problems]
        problems += _still_needed(checkout, base, made.series.folder, outcomes, trees[0], progress)
    if problems or output:
        listed = "".join(f"\n  {problem}" for problem in problems or [output])
        raise RebaseFailedError(
            f"the tests are not content with the series on SGLang {base}:{listed}",
            hint="nothing was written; --continue tries again, --abort ends the rebase\n" + output[-4000:],
        )
    return replace(made, tests=tuple(rows))


def _still_needed(
    checkout: Path, base: str, folder: Path, outcomes: Sequence[PatchOutcome], stock: Path, progress: Progress
) -> list[str]:
    """Return patches that were dropped as merged although the fault that they fix is still there."""
    dropped = [outcome for outcome in outcomes if outcome.word is Word.MERGED and outcome.tests]
    problems = []
    for outcome in dropped:
        progress(f"testing that upstream has {outcome.patch}")
        # As on a patched engine: what the patch was for must work.
        done = run_tests(checkout, base, folder, outcome.tests, "patched", stock)
        if not done.rows or any(row["outcome"] == "failed" for row in done.rows):
            problems.append(f"{outcome.patch}: dropped as merged, but its tests fail on the stock release")
    return problems


def recover(root: Path, base: str) -> None:
    """Bring a base back that a kill left under its name with a dot, see :func:`write`."""
    before = _aside(root, base)
    if before.exists() and not (root / base).exists():
        os.rename(before, root / base)  # noqa: PTH104


def is_replaced(root: Path, base: str) -> bool:
    """Whether a new base took the place of one that still lies beside it: the rebase is finished but for tidying up."""
    return _aside(root, base).exists() and (root / base).exists()


def tidy(root: Path, base: str) -> None:
    """Delete the base that was replaced; only after the rebase is forgotten, since it tells that it was finished."""
    shutil.rmtree(_aside(root, base), ignore_errors=True)


def _aside(root: Path, base: str) -> Path:
    return root / f".{base}.old"


def write(made: Made, root: Path, *, replaces: bool) -> Path:
    """Put the base into ``patches/`` in one rename and return its folder.

    :param replaces: a base of that name is there; it keeps what is no part of the series (its locks). It stays
        under a name with a dot until :func:`tidy`; after a kill in between the next call brings it back.
    :raises OutputError: nothing can be written, or another base of that name is there.
    """
    target = root / made.series.base
    beside, before = root / f".{target.name}.new", _aside(root, target.name)
    if target.exists() and not replaces:
        if _is_written(made, target):
            return target
        raise OutputError(
            f"{target} appeared meanwhile, with another content",
            hint=f"move it away and run `sglang-bw rebase --continue{root_option(root)}`, or end the rebase with"
            " `--abort`",
        )
    try:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.copytree(made.series.folder, beside)
        _keep_the_rest(target, beside)
        for path in [*beside.rglob("*"), beside]:
            _sync(path)
        if target.exists():
            os.rename(target, before)  # noqa: PTH104
        os.rename(beside, target)  # noqa: PTH104
        _sync(root)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise OutputError(
            f"cannot write {target}: {error.strerror}",
            hint=f"the rebase is kept: `sglang-bw rebase --continue{root_option(root)}`",
        ) from None
    return target


def _is_written(made: Made, target: Path) -> bool:
    """Whether a folder holds this base already: a kill came after the rename."""
    return all(
        (target / path.name).is_file() and (target / path.name).read_bytes() == path.read_bytes()
        for path in made.series.folder.iterdir()
    )


def _keep_the_rest(target: Path, beside: Path) -> None:
    for path in target.iterdir() if target.exists() else ():
        if path.is_dir():
            shutil.copytree(path, beside / path.name)
        elif path.suffix != ".patch" and not (beside / path.name).exists():
            shutil.copyfile(path, beside / path.name)


def _sync(path: Path) -> None:
    """Bring a file or directory to the disk, so that a power cut cannot leave half a base."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
