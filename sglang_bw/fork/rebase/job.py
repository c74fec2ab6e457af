"""The rebase as a user asks for it: from two version numbers to a report and a new base."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sglang_bw.errors import BwError, OutputError, RebaseOpenError, RebaseStoppedError, UnknownBaseError
from sglang_bw.fork import lint, releases
from sglang_bw.fork.apply import Progress
from sglang_bw.fork.local import load_for
from sglang_bw.fork.mail import read_patch
from sglang_bw.fork.rebase import own as local_rebase
from sglang_bw.fork.rebase import publish, resolution, session
from sglang_bw.fork.rebase.own import Move, Own
from sglang_bw.fork.rebase.report import Report
from sglang_bw.fork.rebase.state import Asked, Phase, RebaseState
from sglang_bw.fork.rebase.wheels import Wheels, find_wheels, known_wheels, pick_any, with_readers
from sglang_bw.fork.scratch import Scratch, opened
from sglang_bw.fork.series import Series, bases, is_packaged, newest_base, root_option


@dataclass(frozen=True)
class Options:
    """What applies to a whole rebase.

    ``dry_run``: nothing is written, and patches that need a person are left out instead of stopping. ``keep_going``:
    the base is written without the patches that need a person. ``append``: the new release has a series already, and
    gets the patches that it lacks on top.
    """

    test: bool = False
    keep_going: bool = False
    dry_run: bool = False
    append: bool = False


def base_for(root: Path, new: str, base: str | None) -> str:
    """Return the base to move from: the one named, else the newest older than ``new``, else the oldest newer.

    :raises UnknownBaseError: there is none.
    """
    wanted = releases.parse_version(new)
    if base == new:
        raise UnknownBaseError(
            f"{new} is the base itself", hint="name another release to move to, or another base with --from"
        )
    if base:
        return base
    known = [name for name in bases(root) if name != new]
    if not known:
        raise UnknownBaseError(f"no base under {root} to move from", hint="a base is a folder with an upstream.toml")
    older = [name for name in known if releases.parse_version(name) < wanted]
    return older[-1] if older else known[0]


def start(root: Path, new: str, base: str | None, wheel: Path | None, options: Options, progress: Progress) -> Report:
    """Move the series of ``base`` to ``new``; goes on when the same rebase was killed.

    :param wheel: the new release's wheel as a file: nothing is asked of an index, and only this file is pinned.
    :raises BwError: every cause has its own class, see :mod:`sglang_bw.errors`.
    """
    started = time.monotonic()
    series = _series(root, base_for(root, new, base))
    publish.recover(root, new)
    _require_writable(root, new, options)
    if options.test:
        publish.require_tests(root)
    present = _series(root, new) if options.append else None
    name = session.scratch_name(root, "check" if options.dry_run else "rebase")
    with opened(name) as scratch, ThreadPoolExecutor(1) as beside:
        if options.dry_run:
            scratch.write_state(None)
        else:
            _forget_finished(scratch, root, new)
        state = scratch.read_state(RebaseState)
        if state and state.phase is Phase.STOPPED:
            raise RebaseOpenError(
                f"a rebase from {state.request.base} to {state.request.new} is open",
                hint=session.ways_out(state, scratch),
            )
        wheels = find_wheels(series, new, wheel, progress).reading(beside)
        if state:
            session.resume(scratch, state, session.request_of(series, wheels, present))
            progress(f"going on after {len(state.outcomes)} patches")
        else:
            asked = Asked(
                keep_going=options.keep_going or options.dry_run,
                test=options.test,
                wheel=str(wheel.resolve()) if wheel else "",
            )
            state = session.begin(scratch, series, wheels, present, asked=asked, progress=progress)
        return _finish(scratch, state, series, wheels, options, progress, started)


def go_on(
    root: Path,
    wheel: Path | None,
    progress: Progress,
    *,
    test: bool = False,
    skip: bool = False,
    new: str | None = None,
) -> Report:
    """Go on with the open rebase: take what a person made of the patch, or leave the patch out (``skip``).

    :param test: run the patches' tests, also when that was not asked for at the start.
    :param new: the release that it must go to, any by default.
    :raises RebaseOpenError: none is open, or it is another one.
    """
    started = time.monotonic()
    with opened(session.scratch_name(root)) as scratch, ThreadPoolExecutor(1) as beside:
        state = _open_state(scratch)
        publish.recover(root, state.request.new)
        _forget_finished(scratch, root, state.request.new)
        state = _open_state(scratch, new)
        if test:
            publish.require_tests(root)
        series = _series(root, state.request.base)
        wheels = known_wheels(series, state.request, wheel).reading(beside)
        present = _series(root, state.request.new) if state.request.present else None
        session.resume(scratch, state, session.request_of(series, wheels, present))
        if skip:
            state = resolution.skip(scratch, state)
        elif state.phase is Phase.STOPPED:
            state = resolution.accept(scratch, state, read_patch(series.folder / state.patches[state.stopped_at]))
        return _finish(scratch, state, series, wheels, Options(test=test), progress, started)


def start_own(root: Path, new: str, base: str | None, own: Own, options: Options, progress: Progress) -> list[Report]:
    """Move a local series to ``new``; our own series goes first where ``new`` has none yet.

    :raises BwError: every cause has its own class, see :mod:`sglang_bw.errors`.
    """
    base = base_for(root, new, base)
    reports = []
    if new not in bases(root):
        # A typing error must not be told after ours has been written.
        load_for(own.folder, Series.load(root, base))
        ours = start(root, new, base, None, options, progress)
        if ours.needs_a_person or ours.folder is None:
            return [replace(ours, then=f"sglang-bw rebase {new} --from {base}{own.options}{root_option(root)}")]
        reports.append(ours)
    move = Move.between(root, base, new, own.folder, own.out)
    wheels = with_readers(move.old, move.new.pins, pick_any(move.new.pins))
    leaves_out, is_dry = options.keep_going, options.dry_run
    reports.append(local_rebase.start(root, move, wheels, keep_going=leaves_out, dry_run=is_dry, progress=progress))
    return reports


def go_on_own(root: Path, own: Own, progress: Progress, *, skip: bool, new: str | None = None) -> Report:
    """Go on with the open rebase of a local series; the result goes where it was asked for, or to ``own.out``.

    :raises RebaseOpenError: none is open, or it is another one than that to ``new``.
    """
    with opened(local_rebase.scratch_name(root, own.folder)) as scratch:
        state = _open_state(scratch, new)
        if own.out:
            asked = state.asked.model_copy(update={"out": str(own.out.resolve())})
            state = state.model_copy(update={"asked": asked})
        out = Path(state.asked.out) if state.asked.out else None
        move = Move.between(root, state.request.base, state.request.new, own.folder, out)
        wheels = with_readers(move.old, move.new.pins, pick_any(move.new.pins))
        return local_rebase.go_on(scratch, state, move, wheels, skip=skip, progress=progress)


def abort(root: Path, own: Own | None = None, new: str | None = None) -> tuple[str, str]:
    """Throw the open rebase away, all patches untouched, and return the two versions.

    :param own: the one of this local series.
    :param new: the release that it must go to, any by default.
    :raises RebaseOpenError: none is open, or it is another one.
    """
    name = local_rebase.scratch_name(root, own.folder) if own else session.scratch_name(root)
    with opened(name) as scratch:
        try:
            state = _open_state(scratch, new)
            versions = state.request.base, state.request.new
            publish.recover(root, state.request.new)
        except RebaseOpenError:
            raise
        except BwError:
            # Whatever is wrong with it, it can be thrown away.
            versions = "unknown", "unknown"
        scratch.remove()
        if own is None:
            publish.tidy(root, versions[1])
        return versions


def check(root: Path, new: str | None, base: str | None, wheel: Path | None, progress: Progress) -> list[Report]:
    """Return what a rebase of ``base`` (the newest) to each newer release (or to ``new``) would give; writes nothing.

    :raises UnknownBaseError: there is no such base.
    """
    if new:
        wanted = [new]
    else:
        base = _series(root, base or newest_base(root)).base
        progress("asking the index for releases")
        wanted = [str(release.version) for release in releases.newer(base, releases.listed())]
    options = Options(dry_run=True)
    return [start(root, version, base, wheel, options, progress) for version in wanted]


def _finish(
    scratch: Scratch,
    state: RebaseState,
    series: Series,
    wheels: Wheels,
    options: Options,
    progress: Progress,
    started: float,
) -> Report:
    state = session.move_all(scratch, state, series.folder, progress)
    report = partial(Report.of, state, tree=scratch.tree)
    if state.phase is Phase.STOPPED:
        return report(seconds=time.monotonic() - started)
    with publish.staged(scratch, state, wheels.read_new(), progress) as made:
        root = series.folder.parent
        if options.test or state.asked.test:
            made = publish.try_tests(made, state.outcomes, wheels.fetch_new(), root, progress)
        folder = None if options.dry_run else publish.write(made, root, replaces=bool(state.request.present))
        result = report(seconds=time.monotonic() - started, made=made, folder=folder)
    scratch.write_state(None)
    if folder:
        publish.tidy(root, folder.name)
    return result


def _forget_finished(scratch: Scratch, root: Path, new: str) -> None:
    """End a rebase that was killed when its base had taken the place of the one before."""
    if publish.is_replaced(root, new):
        scratch.write_state(None)
        publish.tidy(root, new)


def _open_state(scratch: Scratch, new: str | None = None) -> RebaseState:
    """Return what is open; with ``new`` it has to go there."""
    state = scratch.read_state(RebaseState)
    if state is None:
        raise RebaseOpenError("no rebase is open", hint="`sglang-bw rebase NEW` begins one")
    if new and new != state.request.new:
        raise RebaseOpenError(
            f"the open rebase goes to {state.request.new}, not to {new}", hint=session.ways_out(state, scratch)
        )
    return state


def _series(root: Path, base: str) -> Series:
    series = Series.load(root, base)
    lint.require_clean(series)
    return series


def _require_writable(root: Path, new: str, options: Options) -> None:
    if options.dry_run:
        return
    if is_packaged(root):
        raise OutputError(
            f"{root} is the copy inside the installed tool", hint="work in a checkout, or use --patches DIR"
        )
    if (root / new).exists() and not options.append:
        raise OutputError(
            f"{root / new} exists already",
            hint="--append puts the patches that it lacks on top of it; to make it anew, move it away",
        )


def require_finished(report: Report) -> None:
    """Raise when a person is needed.

    :raises RebaseStoppedError: naming the patch and the way on.
    """
    if report.stopped:
        raise RebaseStoppedError(
            f"{report.stopped.patch}: {report.stopped.word}, a person must decide",
            hint=(
                f"edit {report.tree} with your own tools, then `{report.next_steps[0]}`; "
                "`--skip` leaves the patch out, `--abort` throws the rebase away"
            ),
        )
    if report.left_out and not report.is_dry:
        names = ", ".join(outcome.patch for outcome in report.left_out if outcome.word.needs_a_person)
        # What was there before an --append must stay; what the folder lacks is tried again.
        first = "" if report.state.request.present else "remove the folder and "
        raise RebaseStoppedError(
            f"{report.folder} was written without {names}",
            hint=f"look at each: {first}run `{report.state.command}`",
        )
