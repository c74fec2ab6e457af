"""Building the patched wheel: upstream's file in, the same bytes out on every day."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from installer.sources import WheelFile

from sglang_bw.errors import OutputError
from sglang_bw.fork import index, lint, mail, sbom, upstream
from sglang_bw.fork.apply import Applied, Bench, Progress, check_pins, text_files
from sglang_bw.fork.local import LocalApplied, LocalSeries, apply_after, load_for, local_version
from sglang_bw.fork.notice import LOCAL_TEXT, TEXT, notice_file, with_notice
from sglang_bw.fork.record import (
    RECORD_PATH,
    BwRecord,
    PatchRecord,
    UpstreamRecord,
    content_digest,
)
from sglang_bw.fork.series import Series
from sglang_bw.fork.wheel import Wheel, read_wheel, repack, set_version_module

VERSION_MODULE = "sglang/_version.py"
DIGEST_SUFFIX = ".digest"


@dataclass(frozen=True)
class BuiltWheel:
    """A finished wheel.

    ``digest`` is the content digest, which depends neither on zip nor on zlib; ``left_out`` names files of the
    patches that are no part of a wheel.
    """

    path: Path
    version: str
    digest: str
    index: Path
    patches: tuple[str, ...]
    left_out: tuple[str, ...]


def build(
    root: Path,
    base: str,
    *,
    python: str | None = None,
    machine: str | None = None,
    wheel: Path | None = None,
    local: Path | None = None,
    out: Path,
    progress: Progress = lambda step: None,
) -> BuiltWheel:
    """Build the patched wheel of ``base`` into ``out`` and bring the index there up to date.

    :param root: the directory with one folder per base.
    :param python: major.minor, default the running one; ignored when ``wheel`` is given.
    :param machine: ``x86_64`` or ``aarch64``, default this one; ignored when ``wheel`` is given.
    :param wheel: upstream's wheel as a file, for hosts without a network.
    :param local: folder of a local series, applied after ours.
    :raises BwError: each cause has its own class, see :mod:`sglang_bw.errors`.
    """
    series = Series.load(root, base)
    return _build(series, _upstream(series, python, machine, wheel, progress), local, out, progress)[0]


def build_all(
    root: Path, base: str, *, local: Path | None = None, out: Path, progress: Progress = lambda step: None
) -> list[BuiltWheel]:
    """Build every wheel of a release, for all its Pythons and machines; see :func:`build`.

    :raises BwError: each cause has its own class, see :mod:`sglang_bw.errors`.
    """
    series = Series.load(root, base)
    wheels = (_fetched(series, name, progress) for name in sorted(series.pins.wheels))
    return _build(series, wheels, local, out, progress)


def _build(
    series: Series, sources: Iterable[Wheel], local: Path | None, out: Path, progress: Progress
) -> list[BuiltWheel]:
    lint.require_clean(series)
    asked = load_for(local, series) if local else None
    built = []
    with _scratch(out) as scratch:
        files: dict[str, bytes] | None = None
        for source in sources:
            # The wheels of a release differ in compiled files: what is applied to one holds for the next.
            if files != text_files(source):
                files = text_files(source)
                with tempfile.TemporaryDirectory(prefix="sglang-bw-build-") as repo:
                    applied, own = _applied(series, asked, source, Path(repo), progress)
            built.append(pack(series, source, applied, scratch, out, progress, own=own))
    return built


def pack(
    series: Series,
    source: Wheel,
    applied: Applied,
    scratch: Path,
    out: Path,
    progress: Progress,
    *,
    own: LocalApplied | None = None,
) -> BuiltWheel:
    """Write the wheel of an applied series into ``out``, made beside it in ``scratch``.

    :param own: the release with the local patches on it as well.
    :raises PatchApplyError: the result is not what the series pins.
    """
    check_pins(applied, series.pins)
    progress("packing the wheel")
    content = _content(series, source, applied, own)
    version = content.record.version
    name, data = repack(source, content.changes(source), version)
    built = scratch / name
    built.write_bytes(data)
    progress("checking the wheel")
    digest = content_digest(check_built(built))
    (scratch / (name + DIGEST_SUFFIX)).write_text(digest + "\n", encoding="utf-8")
    for made in (name, name + DIGEST_SUFFIX):
        os.replace(scratch / made, out / made)  # noqa: PTH105
    page = index.write(out)
    patches = tuple(patch.name for patch in content.applied.patches)
    return BuiltWheel(out / name, version, digest, page, patches, content.applied.left_out)


def check_built(path: Path) -> list[str]:
    """Let `installer` judge our own result, every hash included, and return the lines of its RECORD."""
    with WheelFile.open(path) as wheel:
        wheel.validate_record()
        return wheel.read_dist_info("RECORD").splitlines()


def _upstream(
    series: Series, python: str | None, machine: str | None, wheel: Path | None, progress: Progress
) -> Iterator[Wheel]:
    if wheel is None:
        here = python or upstream.this_python(), machine or upstream.this_machine()
        yield _fetched(series, upstream.pick_wheel(series.pins, *here), progress)
    else:
        yield _checked(series, wheel, progress)


def _fetched(series: Series, name: str, progress: Progress) -> Wheel:
    progress(f"fetching {name}")
    return _checked(series, upstream.fetch(series.pins, name), progress)


def _checked(series: Series, wheel: Path, progress: Progress) -> Wheel:
    progress(f"checking {wheel.name}")
    pins = series.pins
    return read_wheel(wheel, sha256=upstream.pinned_digest(pins, wheel), version=pins.version)


@dataclass(frozen=True)
class _Content:
    """What a wheel is to hold: the patched release, the record, and the bytes of every file that differs."""

    applied: Applied
    record: BwRecord
    files: dict[str, bytes | None]
    modified: tuple[str, ...]

    def changes(self, source: Wheel) -> dict[str, bytes | None]:
        """Return everything that differs from upstream's wheel, the record, NOTICE and SBOM included."""
        info, record = source.dist_info, self.record
        return self.files | {
            RECORD_PATH: record.text().encode(),
            f"{info}/licenses/NOTICE": notice_file(record, self.modified).encode(),
            f"{info}/sboms/{sbom.SBOM_FILE}": sbom.render(record, self.applied.patches, source.date).encode(),
        }


def _applied(
    series: Series, local: LocalSeries | None, source: Wheel, folder: Path, progress: Progress
) -> tuple[Applied, LocalApplied | None]:
    """Apply the series, then the local one on top of it."""
    ours = [mail.read_patch(path) for path in series.files]
    bench = Bench.new(source, folder, [*ours, *(local.patches if local else ())], progress)
    applied = bench.put(ours)
    return applied, apply_after(bench, local, series) if local else None


def _content(series: Series, source: Wheel, ours: Applied, own: LocalApplied | None) -> _Content:
    pins = series.pins
    applied = own.applied if own else ours
    series_id = local_version(pins, applied.tree) if own else pins.local
    version = f"{series.base}+{series_id}"
    by_builder = own.touched if own else frozenset()
    files: dict[str, bytes | None] = {}
    for path, data in applied.changes.items():
        text = LOCAL_TEXT if path in by_builder else TEXT
        files[path] = with_notice(path, data, text) if data is not None and path in source.members else data
    modified = [path for path, data in files.items() if data is not None and path in source.members]
    files[VERSION_MODULE] = set_version_module(source.members[VERSION_MODULE].data, source.version, version)
    record = BwRecord(
        version=version,
        base=series.base,
        series=series_id,
        tree=applied.tree,
        upstream=UpstreamRecord(wheel=source.name, sha256=source.sha256),
        patches=tuple(map(PatchRecord.of, ours.patches)),
        files={path: _sha256(data) for path, data in sorted(files.items()) if data is not None},
        removed=applied.removed,
        local=own.record(pins, ours.tree) if own else None,
    )
    return _Content(applied, record, files, (*modified, VERSION_MODULE))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """Give a directory beside the results, so that a finished file only has to be renamed.

    :raises OutputError: nothing can be written there, or the disk is full.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".build-", dir=out)
    except OSError as error:
        raise OutputError(
            f"cannot write to {out}: {error.strerror}", hint="choose another place with --out DIR"
        ) from None
    try:
        with folder:
            yield Path(folder.name)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        raise OutputError(
            f"{error.strerror} ({error.filename or out})", hint="free about 1 GB, or choose another disk with --out DIR"
        ) from None
