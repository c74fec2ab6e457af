"""Building the patched wheel: upstream's file in, the same bytes out on every day."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from installer.sources import WheelFile

from sglang_bw.errors import OutputError
from sglang_bw.fork import index, lint, sbom, upstream
from sglang_bw.fork.apply import Applied, Progress, apply_series, check_pins
from sglang_bw.fork.notice import notice_file, with_notice
from sglang_bw.fork.record import RECORD_PATH, BwRecord, PatchRecord, UpstreamRecord, content_digest
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
    out: Path,
    progress: Progress = lambda step: None,
) -> BuiltWheel:
    """Build the patched wheel of ``base`` into ``out`` and bring the index there up to date.

    :param root: the directory with one folder per base.
    :param python: major.minor, default the running one; ignored when ``wheel`` is given.
    :param machine: ``x86_64`` or ``aarch64``, default this one; ignored when ``wheel`` is given.
    :param wheel: upstream's wheel as a file, for hosts without a network.
    :raises BwError: each cause has its own class, see :mod:`sglang_bw.errors`.
    """
    series = Series.load(root, base)
    lint.require_clean(series)
    with _scratch(out) as scratch:
        source = _upstream(series, python, machine, wheel, progress)
        with tempfile.TemporaryDirectory(prefix="sglang-bw-build-") as repo:
            applied = apply_series(series, source, Path(repo), progress)
        return pack(series, source, applied, scratch, out, progress)


def pack(series: Series, source: Wheel, applied: Applied, scratch: Path, out: Path, progress: Progress) -> BuiltWheel:
    """Write the wheel of an applied series into ``out``, made beside it in ``scratch``.

    :raises PatchApplyError: the result is not what the series pins.
    """
    check_pins(applied, series.pins)
    progress("packing the wheel")
    version = series.pins.full_version
    name, data = repack(source, _content(series, source, applied, version), version)
    built = scratch / name
    built.write_bytes(data)
    progress("checking the wheel")
    digest = content_digest(check_built(built))
    (scratch / (name + DIGEST_SUFFIX)).write_text(digest + "\n", encoding="utf-8")
    for made in (name, name + DIGEST_SUFFIX):
        os.replace(scratch / made, out / made)  # noqa: PTH105
    page = index.write(out)
    return BuiltWheel(out / name, version, digest, page, series.order, applied.left_out)


def check_built(path: Path) -> list[str]:
    """Let `installer` judge our own result, every hash included, and return the lines of its RECORD."""
    with WheelFile.open(path) as wheel:
        wheel.validate_record()
        return wheel.read_dist_info("RECORD").splitlines()


def _upstream(series: Series, python: str | None, machine: str | None, wheel: Path | None, progress: Progress) -> Wheel:
    pins = series.pins
    if wheel is None:
        name = upstream.pick_wheel(pins, python or upstream.this_python(), machine or upstream.this_machine())
        progress(f"fetching {name}")
        wheel = upstream.fetch(pins, name)
    progress(f"checking {wheel.name}")
    return read_wheel(wheel, sha256=upstream.pinned_digest(pins, wheel), version=pins.version)


def _content(series: Series, source: Wheel, applied: Applied, version: str) -> dict[str, bytes | None]:
    """Return everything that differs from upstream's wheel, the record and the SBOM included."""
    changes: dict[str, bytes | None] = {}
    modified = []
    for path, data in applied.changes.items():
        is_modified = data is not None and path in source.members
        changes[path] = with_notice(path, data) if data is not None and is_modified else data
        if is_modified:
            modified.append(path)
    changes[VERSION_MODULE] = set_version_module(source.members[VERSION_MODULE].data, source.version, version)
    record = BwRecord(
        version=version,
        base=series.base,
        series=series.pins.local,
        tree=applied.tree,
        upstream=UpstreamRecord(wheel=source.name, sha256=source.sha256),
        patches=tuple(
            PatchRecord(
                file=patch.name,
                subject=patch.subject,
                upstream_status=patch.trailer("Upstream-Status"),
                why=patch.trailer("Why"),
                sha256=patch.sha256,
            )
            for patch in applied.patches
        ),
        files={path: _sha256(data) for path, data in sorted(changes.items()) if data is not None},
        removed=applied.removed,
    )
    changes[RECORD_PATH] = (record.model_dump_json(indent=1) + "\n").encode()
    changes[f"{source.dist_info}/licenses/NOTICE"] = notice_file(record, [*modified, VERSION_MODULE]).encode()
    changes[f"{source.dist_info}/sboms/{sbom.SBOM_FILE}"] = sbom.render(record, applied.patches, source.date).encode()
    return changes


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
