"""A rebase from its start to the last patch: begins, goes on after a stop or a kill, and is thrown away.

Every step ends with the state on disk. What a person may have edited is never touched before he says ``--continue``,
``--skip`` or ``--abort``.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from sglang_bw import __version__
from sglang_bw.errors import DriftError, RebaseOpenError, ScratchError
from sglang_bw.fork.apply import PREFIX, Progress
from sglang_bw.fork.mail import read_patch
from sglang_bw.fork.rebase.move import Mover
from sglang_bw.fork.rebase.search import Tree
from sglang_bw.fork.rebase.state import Asked, Phase, RebaseState, Request, require_same
from sglang_bw.fork.rebase.units import forget
from sglang_bw.fork.rebase.wheels import Wheels
from sglang_bw.fork.scratch import Scratch
from sglang_bw.fork.series import Series, root_option

# A scratch repository is reused until it holds more than these.
_MOST_RELEASES = 4


def scratch_name(root: Path, kind: str = "rebase") -> str:
    """Return the name of the scratch repository of a ``patches/`` directory: one open rebase for each."""
    return f"{kind}-{hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:12]}"


def request_of(series: Series, wheels: Wheels, present: Series | None) -> Request:
    """Return what is asked, as the state keeps it.

    :param present: the new release's own series, when patches are put on top of it.
    """
    return Request(
        base=series.base,
        new=wheels.new.version,
        root=str(series.folder.parent.resolve()),
        base_wheel=wheels.base.wheels[wheels.base_name],
        new_wheel=wheels.new_name,
        new_wheels=wheels.new.wheels,
        series=digests(series.files),
        present=digests(present.files) if present else {},
    )


def digests(files: Iterable[Path]) -> dict[str, str]:
    """Return patch files with their sha256."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def begin(
    scratch: Scratch,
    series: Series,
    wheels: Wheels,
    present: Series | None,
    *,
    asked: Asked,
    progress: Progress,
) -> RebaseState:
    """Make the two releases and the old series commits, and remember the rebase.

    :param present: the new release's own series; only what it lacks is moved then.

    :raises DriftError: the patch files are not what git exports from them, or make another tree than the pinned one.
    """
    with ready(scratch, progress):
        origin, onto = import_both(scratch, wheels, progress)
        progress(f"the series on SGLang {series.base}")
        scratch.start(origin, work_on=[])
        commits = scratch.am_series(series.files)
        _require_no_drift(scratch, series, origin)
        there = present.order if present else ()
        moving = [(name, commit) for name, commit in zip(series.order, commits, strict=True) if name not in there]
        scratch.start(onto, work_on=[])
        head = [onto, *scratch.am_series(present.files if present else ())][-1]
    request = request_of(series, wheels, present)
    return remember(scratch, request, origin, moving, onto, head, asked)


@contextmanager
def ready(scratch: Scratch, progress: Progress) -> Iterator[None]:
    """Give a repository in which no rebase is open; one that is used again is looked at while the block works in it.

    :raises RebaseOpenError: one is open.
    :raises ScratchError: the repository is damaged, which the block's own error then may come from.
    """
    state = scratch.read_state(RebaseState)
    if state is not None:
        raise RebaseOpenError(
            f"a rebase from {state.request.base} to {state.request.new} is open", hint=ways_out(state, scratch)
        )
    if scratch.exists and len(scratch.releases()) > _MOST_RELEASES:
        scratch.remove()
    if not scratch.exists:
        scratch.create()
        yield
        return
    progress("checking the scratch repository")
    with ThreadPoolExecutor(1) as beside:
        check = beside.submit(scratch.require_sound, *scratch.releases())
        try:
            yield
        finally:
            check.result()


def import_both(scratch: Scratch, wheels: Wheels, progress: Progress) -> tuple[str, str]:
    """Return the commits of the two releases."""
    progress(f"importing SGLang {wheels.base.version}")
    origin = scratch.release(wheels.base.version, wheels.base.wheels[wheels.base_name])
    origin = origin or scratch.import_release(wheels.read_base())
    progress(f"importing SGLang {wheels.new.version}")
    onto = scratch.release(wheels.new.version, wheels.new.wheels[wheels.new_name])
    return origin, onto or scratch.import_release(wheels.read_new())


def remember(
    scratch: Scratch,
    request: Request,
    origin: str,
    moving: Sequence[tuple[str, str]],
    onto: str,
    head: str,
    asked: Asked,
) -> RebaseState:
    """Write the state of a rebase that begins.

    :param moving: file name and commit of each patch that goes from ``origin`` to ``onto``.
    :param head: the commit on ``onto`` that they come after.
    """
    state = RebaseState(
        tool=__version__,
        request=request,
        phase=Phase.MOVING,
        origin=origin,
        patches=tuple(name for name, _ in moving),
        series=tuple(commit for _, commit in moving),
        onto=onto,
        head=head,
        asked=asked,
    )
    scratch.write_state(state)
    return state


def _require_no_drift(scratch: Scratch, series: Series, origin: str) -> None:
    for exported, path in zip(scratch.export(origin), series.files, strict=True):
        if exported.data != path.read_bytes():
            raise DriftError(
                f"{path.name} was edited by hand: git exports other bytes from it",
                hint="`git am` it in a repository and export it again, as docs/patch-format.md describes",
            )
    tree = scratch.repo.tree("HEAD", PREFIX.rstrip("/"))
    if series.pins.tree and tree != series.pins.tree:
        raise DriftError(
            f"the series makes tree {tree}, pinned is {series.pins.tree}",
            hint=f"run `{refresh_command(series)}` if the patches are right",
        )


def refresh_command(series: Series) -> str:
    """Return the command line that pins what the patches of a series make now."""
    return f"sglang-bw patches refresh --base {series.base}{root_option(series.folder.parent)}"


def ways_out(state: RebaseState, scratch: Scratch) -> str:
    """Return what a user can do with an open rebase."""
    go_on = f"`{state.request.then('continue')}`"
    if state.phase is Phase.STOPPED:
        stopped = state.outcomes[-1]
        return (
            f"it waits at {stopped.patch}: edit {scratch.tree} and run {go_on}, leave the patch out with `--skip`, or"
            " throw everything away with `--abort`"
        )
    return f"go on with {go_on}, or throw it away with `{state.request.then('abort')}`"


def resume(scratch: Scratch, state: RebaseState, request: Request) -> None:
    """Look whether an open rebase is the one that is asked for, and can go on.

    :raises RebaseOpenError: it is another one.
    :raises ScratchError: the repository is gone or damaged.
    """
    require_same(state, request)
    if state.tool != __version__:
        raise RebaseOpenError(
            f"the open rebase was begun by sglang-bw {state.tool}, this is {__version__}",
            hint=f"finish it with that version, or end it with `{state.request.then('abort')}`",
        )
    scratch.require_sound()
    for commit in (state.origin, state.onto, state.head, *state.series):
        if scratch.repo.run("cat-file", "-e", f"{commit}^{{commit}}", check=False).code:
            raise ScratchError(
                f"{scratch.tree} has lost commit {commit[:12]}",
                hint=f"end the rebase with `{state.request.then('abort')}` and start again",
            )


@contextmanager
def _with_trees() -> Iterator[None]:
    """Let Python look for no cycles: in millions of syntax nodes it finds none, and takes half of the time for that."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        forget()
        if was_on:
            gc.enable()


@_with_trees()
def move_all(scratch: Scratch, state: RebaseState, folder: Path, progress: Progress) -> RebaseState:
    """Move the patches of ``folder`` until one needs a person, or all have their word."""
    files = [folder / name for name in state.patches]
    scratch.start(state.head, work_on=[])
    tree = Tree(lambda: scratch.files(state.onto), lambda: scratch.files(state.origin))
    mover = Mover(scratch, state.request.new, state.onto, tree)
    for number in range(len(state.outcomes), len(files)):
        progress(f"patch {number + 1}/{len(files)} {files[number].name}")
        outcome = mover.move(read_patch(files[number]), state.series[number])
        stops = outcome.word.needs_a_person and not state.asked.keep_going
        if outcome.word.needs_a_person and state.asked.keep_going:
            outcome = outcome.model_copy(update={"left_out": True})
        head = scratch.repo.run("rev-parse", "HEAD").text
        if head != state.head:
            scratch.set_names({head: outcome.patch})
        if stops:
            mover.hand_over(state.series[number])
        phase = Phase.STOPPED if stops else Phase.MOVING
        state = state.model_copy(update={"outcomes": (*state.outcomes, outcome), "head": head, "phase": phase})
        scratch.write_state(state)
        if stops:
            return state
    state = state.model_copy(update={"phase": Phase.MOVED})
    scratch.write_state(state)
    return state
