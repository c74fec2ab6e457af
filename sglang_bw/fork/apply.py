"""Applying a series to a release: git and the strict reader must agree, byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_bw.errors import PatchApplyError
from sglang_bw.fork import mail, strict
from sglang_bw.fork.gitrepo import GitRepo
from sglang_bw.fork.series import Pins, Series
from sglang_bw.fork.wheel import COMPILED, Wheel

Progress = Callable[[str], None]

# Upstream's repository has the package here; patches are kept in upstream's form, so that they can be mailed there.
PREFIX = "python/"


@dataclass(frozen=True)
class Applied:
    """A release with the series on it.

    ``changes`` maps paths of the wheel to new bytes, ``None`` for deleted; ``tree`` is the git tree id of
    ``python/`` without compiled files, the same for every wheel of a release; ``left_out`` are files that patches
    add outside the package (upstream's tests), which are no part of a wheel.
    """

    tree: str
    changes: dict[str, bytes | None]
    patches: tuple[mail.Patch, ...]
    left_out: tuple[str, ...] = field(default=())

    @property
    def digests(self) -> dict[str, str]:
        """Path -> sha256 of each changed or added file."""
        return {
            path: hashlib.sha256(data).hexdigest() for path, data in sorted(self.changes.items()) if data is not None
        }

    @property
    def removed(self) -> tuple[str, ...]:
        """Paths that the series deletes."""
        return tuple(sorted(path for path, data in self.changes.items() if data is None))


def text_files(wheel: Wheel) -> dict[str, bytes]:
    """Return upstream's path -> bytes of what a series may touch: all but metadata and compiled files.

    These are the same in every wheel of a release (tested), so one series and one tree id serve all of them.
    """
    return {
        PREFIX + path: member.data
        for path, member in wheel.members.items()
        if not path.startswith(wheel.dist_info + "/") and not path.endswith(COMPILED)
    }


class Bench:
    """A repository whose HEAD is a release, and the patches that are put on it one after another."""

    def __init__(self, repo: GitRepo, files: Mapping[str, bytes], progress: Progress) -> None:
        """Begin at HEAD, which is the release that ``files`` holds."""
        self._repo = repo
        self._files = files
        self._base = repo.run("rev-parse", "HEAD").text
        self._state: dict[str, bytes | None] = {}
        self._done: list[mail.Patch] = []
        self._progress = progress

    @classmethod
    def new(cls, wheel: Wheel, folder: Path, patches: Iterable[mail.Patch], progress: Progress) -> Bench:
        """Import a release below ``folder``; only files that ``patches`` name are checked out."""
        progress("importing the release")
        files = text_files(wheel)
        repo = GitRepo.create(folder / "repo")
        repo.commit_files(files, f"sglang {wheel.version}", work_on=named_paths(patches))
        return cls(repo, files, progress)

    def put(self, patches: Sequence[mail.Patch]) -> Applied:
        """Put more patches on and return the release with all of them so far.

        :raises PatchApplyError: a patch does not apply exactly, or the two readers disagree.
        """
        for number, patch in enumerate(patches, start=1):
            self._progress(f"patch {number}/{len(patches)} {patch.name}")
            self._state |= strict.apply_exactly(patch.name, patch.diff, self._read)
        self._am(patches)
        self._done += patches
        _agree(self._repo, self._base, self._state, self._files)
        inside = {path.removeprefix(PREFIX): data for path, data in self._state.items() if path.startswith(PREFIX)}
        outside = tuple(sorted(path for path in self._state if not path.startswith(PREFIX)))
        return Applied(self._repo.tree("HEAD", PREFIX.rstrip("/")), inside, tuple(self._done), outside)

    def _am(self, patches: Sequence[mail.Patch]) -> None:
        if not patches:
            return
        before = self._repo.run("rev-parse", "HEAD").text
        done = self._repo.am(*(patch.path for patch in patches))
        if done.code:
            said = (done.stderr or done.text).strip().splitlines()
            failed = patches[int(self._repo.run("rev-list", "--count", f"{before}..HEAD").text)]
            raise PatchApplyError(
                f"{failed.name}: git am refuses it: {said[0] if said else 'no reason given'}",
                hint="`sglang-bw patches lint` may say more; export the patch again from a commit",
            )

    def _read(self, path: str) -> bytes | None:
        return self._state[path] if path in self._state else self._files.get(path)


def apply_series(series: Series, wheel: Wheel, folder: Path, progress: Progress) -> Applied:
    """Apply a series in a scratch repository below ``folder``.

    :raises PatchApplyError: a patch does not apply exactly, or the two readers disagree.
    """
    patches = [mail.read_patch(path) for path in series.files]
    return Bench.new(wheel, folder, patches, progress).put(patches)


def named_paths(patches: Iterable[mail.Patch]) -> set[str]:
    """Return every path that the patches name."""
    return {path for patch in patches for path in strict.touched(patch.name, patch.diff)}


def apply_in(repo: GitRepo, patches: Sequence[mail.Patch], files: Mapping[str, bytes], progress: Progress) -> Applied:
    """Apply patches on the HEAD of a repository, which is the release that ``files`` holds.

    :raises PatchApplyError: a patch does not apply exactly, or the two readers disagree.
    """
    return Bench(repo, files, progress).put(patches)


def _agree(repo: GitRepo, base: str, state: dict[str, bytes | None], files: Mapping[str, bytes]) -> None:
    """Compare what git made of the series with what the strict reader made of it."""
    changed = repo.changed(base)
    made = repo.read_many("HEAD", changed)
    # A file that one patch adds and a later one deletes is in neither tree.
    expected = {path for path in state if state[path] is not None or path in files}
    if set(changed) - expected:
        raise PatchApplyError(f"git changed files that the patches do not name: {sorted(set(changed) - expected)}")
    for path in sorted(expected):
        here = made.get(path)
        if path not in changed or here != state[path]:
            raise PatchApplyError(f"{path}: git and the strict reader disagree about the patched file")


def check_pins(applied: Applied, pins: Pins) -> None:
    """Compare a patched release with its pins.

    :raises PatchApplyError: naming the first file that differs.
    """
    hint = "the series was edited: `sglang-bw patches refresh` records it (and gives it a version of its own)"
    for path, digest in applied.digests.items():
        pinned = pins.patched.get(path)
        if pinned != digest:
            said = f"pinned is {pinned}" if pinned else "it is not pinned"
            raise PatchApplyError(f"{path}: the patched file has sha256 {digest}, {said}", hint=hint)
    if missing := sorted(set(pins.patched) - set(applied.digests)):
        raise PatchApplyError(f"{missing[0]}: pinned as patched, but no patch changes it", hint=hint)
    if applied.removed != tuple(sorted(pins.removed)):
        raise PatchApplyError(f"the series deletes {list(applied.removed)}, pinned is {list(pins.removed)}", hint=hint)
    if applied.tree != pins.tree:
        raise PatchApplyError(f"the patched tree is {applied.tree}, pinned is {pins.tree or 'nothing'}", hint=hint)
