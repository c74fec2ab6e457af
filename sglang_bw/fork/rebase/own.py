"""Moving a local series: from a release with our patches on it to another release with ours, by the same rules.

What lies below it on both sides is pinned already, so only the user's own patches get a word. The result is written
to a folder that does not exist yet, in one rename, after both readers, lint and a build were content.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_bw.errors import DriftError, OutputError, RebaseOpenError
from sglang_bw.fork import lint, strict
from sglang_bw.fork.apply import PREFIX, Progress
from sglang_bw.fork.build import BuiltWheel, build
from sglang_bw.fork.local import LocalSeries, load_for
from sglang_bw.fork.mail import read_patch
from sglang_bw.fork.rebase import resolution, session
from sglang_bw.fork.rebase.report import Report
from sglang_bw.fork.rebase.state import Asked, Phase, RebaseState, Request
from sglang_bw.fork.rebase.wheels import Wheels
from sglang_bw.fork.scratch import Scratch, opened
from sglang_bw.fork.series import ORDER_FILE, Series, local_option


@dataclass(frozen=True)
class Own:
    """A user's local series to move: its folder, and where the result goes (by default a folder in it, named NEW)."""

    folder: Path
    out: Path | None = None

    @property
    def options(self) -> str:
        """The options that name both, with a blank before each."""
        out = f" --out {shlex.quote(str(self.out.resolve()))}" if self.out else ""
        return out + local_option(self.folder)


@dataclass(frozen=True)
class Move:
    """A local series and the two bases between which it moves; ``out`` is where it goes."""

    local: LocalSeries
    old: Series
    new: Series
    out: Path

    @classmethod
    def between(cls, root: Path, base: str, new: str, folder: Path, out: Path | None) -> Move:
        """Read all three series and check them.

        :raises BwError: one is not there or breaks the format, or the place where the result goes is taken.
        """
        old, ours = Series.load(root, base), Series.load(root, new)
        for series in (old, ours):
            lint.require_clean(series)
        return cls(load_for(folder, old), old, ours, out or folder / new)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the result goes to another place than the usual one."""
        return self.out != self.local.folder / self.new.base

    def request(self, wheels: Wheels) -> Request:
        """Return what is asked, as the state keeps it."""
        asked = session.request_of(self.old, wheels, None)
        return asked.model_copy(
            update={
                "series": session.digests(self.local.files),
                "local": str(self.local.folder.resolve()),
                "below": (session.digests(self.old.files), session.digests(self.new.files)),
            }
        )


def scratch_name(root: Path, folder: Path) -> str:
    """Return the scratch repository's name: one open rebase for each local series and ``patches/``."""
    return session.scratch_name(root / "local" / str(folder.resolve()).lstrip("/"), "rebase-local")


def start(root: Path, move: Move, wheels: Wheels, *, keep_going: bool, dry_run: bool, progress: Progress) -> Report:
    """Move a local series; goes on when the same rebase was killed.

    :raises BwError: every cause has its own class, see :mod:`sglang_bw.errors`.
    """
    if not dry_run:
        _require_free(move.out)
    with opened(scratch_name(root, move.local.folder) + ("-check" if dry_run else "")) as scratch:
        if dry_run:
            scratch.write_state(None)
        state = scratch.read_state(RebaseState)
        if state and state.phase is Phase.STOPPED:
            raise RebaseOpenError(
                f"a rebase of {move.local.folder} from {state.request.base} to {state.request.new} is open",
                hint=session.ways_out(state, scratch),
            )
        if state:
            session.resume(scratch, state, move.request(wheels))
        else:
            asked = Asked(keep_going=keep_going or dry_run, out=str(move.out.resolve()) if move.is_elsewhere else "")
            state = _begin(scratch, move, wheels, asked, progress)
        return _finish(scratch, state, move, dry_run=dry_run, progress=progress)


def go_on(scratch: Scratch, state: RebaseState, move: Move, wheels: Wheels, *, skip: bool,
          progress: Progress) -> Report:  # fmt: skip
    """Go on with an open one: take what a person made of the patch, or leave it out."""
    _require_free(move.out)
    session.resume(scratch, state, move.request(wheels))
    if skip:
        state = resolution.skip(scratch, state)
    elif state.phase is Phase.STOPPED:
        state = resolution.accept(scratch, state, read_patch(move.local.files[state.stopped_at]))
    return _finish(scratch, state, move, dry_run=False, progress=progress)


def _begin(scratch: Scratch, move: Move, wheels: Wheels, asked: Asked, progress: Progress) -> RebaseState:
    with session.ready(scratch, progress):
        old, new = session.import_both(scratch, wheels, progress)
        progress(f"our series on SGLang {move.new.base}")
        onto = _with_series(scratch, new, move.new)
        progress(f"our series and yours on SGLang {move.old.base}")
        origin = _with_series(scratch, old, move.old)
        commits = scratch.am_series(move.local.files)
        _require_exact(scratch, move.local, commits)
    moving = list(zip(move.local.order, commits, strict=True))
    return session.remember(scratch, move.request(wheels), origin, moving, onto, onto, asked)


def _with_series(scratch: Scratch, release: str, series: Series) -> str:
    """Return the commit of a release with our series on it; HEAD is there."""
    scratch.start(release, work_on=[])
    scratch.am_series(series.files)
    tree = scratch.repo.tree("HEAD", PREFIX.rstrip("/"))
    if tree != series.pins.tree:
        raise DriftError(
            f"the series of {series.base} makes tree {tree}, pinned is {series.pins.tree}",
            hint=f"run `{session.refresh_command(series)}` if the patches are right",
        )
    return scratch.repo.run("rev-parse", "HEAD").text


def _require_exact(scratch: Scratch, local: LocalSeries, commits: Sequence[str]) -> None:
    """Let the strict reader confirm what git made of the local patches: git allows offsets.

    :raises PatchApplyError: a patch does not lie exactly where it says.
    """
    for patch, commit in zip(local.patches, commits, strict=True):
        named = strict.touched(patch.name, patch.diff)
        before = scratch.repo.read_many(f"{commit}^", named)
        strict.apply_exactly(patch.name, patch.diff, before.get)


def _finish(scratch: Scratch, state: RebaseState, move: Move, *, dry_run: bool, progress: Progress) -> Report:
    started = time.monotonic()
    state = session.move_all(scratch, state, move.local.folder, progress)
    report = Report.of(state, tree=scratch.tree, seconds=time.monotonic() - started)
    if state.phase is Phase.STOPPED:
        return report
    exported = scratch.export(state.onto)
    if exported:
        with tempfile.TemporaryDirectory(prefix="staged-", dir=scratch.folder) as place:
            staged = Path(place) / move.new.base
            staged.mkdir()
            for one in exported:
                (staged / one.name).write_bytes(one.data)
            (staged / ORDER_FILE).write_text("".join(f"{one.name}\n" for one in exported), encoding="utf-8")
            progress("building with both series")
            made = _build(move, staged, Path(place) / "dist")
            folder = None if dry_run else _write(staged, move.out)
        report = replace(report, folder=folder, version=made.version, wheel=made.path.name, digest=made.digest)
    scratch.write_state(None)
    return replace(report, seconds=time.monotonic() - started)


def _build(move: Move, staged: Path, out: Path) -> BuiltWheel:
    load_for(staged, move.new)
    return build(move.new.folder.parent, move.new.base, local=staged, out=out)


def _require_free(out: Path) -> None:
    if out.exists():
        raise OutputError(f"{out} exists already", hint="name another folder with --out DIR, or move it away")


def _write(staged: Path, out: Path) -> Path:
    """Put the moved series to its place in one rename."""
    beside = out.with_name(f".{out.name}.new")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        shutil.copytree(staged, beside)
        os.rename(beside, out)  # noqa: PTH104
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise OutputError(
            f"cannot write {out}: {error.strerror}", hint="the rebase is kept: the same command goes on"
        ) from None
    return out
