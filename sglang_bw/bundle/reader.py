"""Checking a bundle without unpacking it: whole or in parts, packed or unpacked, one part by itself."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from pydantic import ValidationError

from sglang_bw.bundle.archive import CHUNK
from sglang_bw.bundle.manifest import (
    HEAD,
    MANIFEST,
    PARTS,
    SUMS,
    WHEELS,
    Manifest,
    Part,
    digest_of,
    read_parts,
    read_sums,
)
from sglang_bw.bundle.members import check_member, check_name, check_wheel
from sglang_bw.errors import BundleDamagedError, BundleDigestError
from sglang_bw.fork.installers import Report

# What is read as text; everything else is only hashed.
_READ = (SUMS, MANIFEST)
_KEPT_BYTES = 32 << 20
_AGAIN = "copy it again from where it was made"

# What tarfile raises for archives that somebody damaged.
_TAR_DAMAGE = (tarfile.TarError, ValueError, OverflowError, EOFError, IndexError, UnicodeError)


@dataclass(frozen=True)
class Verified:
    """What was checked: ``manifest`` and ``digest`` are ``None`` and empty for one part by itself."""

    files: int
    size: int
    digest: str = ""
    manifest: Manifest | None = None
    part: str = ""


@dataclass(frozen=True)
class _Found:
    """A file of a bundle: what it hashes to, how long it is, and the bytes of a small one."""

    sha256: str
    size: int
    data: bytes


def verify(path: Path, report: Report, expect: str | None = None) -> Verified:
    """Check every file of a bundle against its checksums.

    :param path: the folder with the parts, an unpacked bundle, its archive, or one part beside its ``PARTS``.
    :param expect: the digest that the bundle must have.
    :raises BundleDigestError: it has another one, or is one part, which has none.
    :raises BundleUnsafeError: a member leads out of the folder, is a link or a device.
    :raises BundleDamagedError: something is missing, too much or not what its checksum says; lists everything.
    """
    try:
        if path.is_file() and (parts := _parts_beside(path)):
            return _verify_part(path, parts, expect)
        if (path / PARTS).is_file():
            parts = read_parts(_text(path / PARTS))
            report.step(f"checking {len(parts)} parts")
            _refuse(_wrong_parts(path, parts, report))
            report.step("checking the files in them")
            with _Chain(path / part.file for part in parts) as stream:
                found = _read_archive(path.name, stream, report)
            verified = _verified(found, expect)
            _refuse(_wrong_beside(path, found))
            return verified
        if path.is_dir():
            report.step("checking the unpacked files")
            return _verified_folder(path, expect, report)
        report.step("checking the files in the archive")
        with path.open("rb") as file:
            return _verified(_read_archive(path.name, file, report), expect)
    except OSError as error:
        raise BundleDamagedError(f"cannot read {error.filename or path}: {error.strerror}", hint=_AGAIN) from None


def _parts_beside(path: Path) -> tuple[Part, ...]:
    listed = path.parent / PARTS
    parts = read_parts(_text(listed)) if listed.is_file() else ()
    return parts if len(parts) > 1 and any(part.file == path.name for part in parts) else ()


def _verify_part(path: Path, parts: tuple[Part, ...], expect: str | None) -> Verified:
    if expect:
        raise BundleDigestError(
            f"{path.name} is one part: the digest is of the whole bundle, and no part has it",
            hint="check the part without --expect, or the folder of all parts with it",
        )
    part = next(part for part in parts if part.file == path.name)
    _refuse(_wrong_part(path.parent, part))
    return Verified(1, part.size, part=part.file)


def _wrong_parts(folder: Path, parts: tuple[Part, ...], report: Report) -> Iterator[str]:
    for part in parts:
        report.detail(part.file)
        yield from _wrong_part(folder, part)


def _wrong_beside(folder: Path, found: dict[str, _Found]) -> Iterator[str]:
    """Yield which of the small files beside the parts, the installer first, are not those of the archive."""
    for name in (name for name in HEAD if name in found):
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing beside the parts"
            continue
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != found[name].sha256:
                yield f"{name} beside the parts is not the one that is in them"


def _wrong_part(folder: Path, part: Part) -> Iterator[str]:
    path = folder / part.file
    if not path.is_file():
        yield f"{part.file} is missing"
    elif path.stat().st_size != part.size:
        yield f"{part.file} has {path.stat().st_size} bytes, should have {part.size}"
    else:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != part.sha256:
                yield f"{part.file} is not what its checksum says"


class _Chain:
    """Files one after the other, as one stream."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = iter(paths)
        self._file: BinaryIO | None = None

    def __enter__(self) -> _Chain:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes; nothing at the end of the last file."""
        while True:
            if self._file is None:
                path = next(self._paths, None)
                if path is None:
                    return b""
                self._file = path.open("rb")
            if data := self._file.read(size):
                return data
            self._file.close()
            self._file = None


def _read_archive(where: str, stream: _Chain | BinaryIO, report: Report) -> dict[str, _Found]:
    """Read an archive once, refuse what is unsafe in it, and return its files by path below the folder."""
    found: dict[str, _Found] = {}
    top = ""
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=CHUNK) as archive:  # type: ignore[call-overload]
            for member in archive:
                check_member(where, member)
                folder, _, name = member.name.partition("/")
                top = top or folder
                if not name or folder != top or name in found:
                    raise BundleDamagedError(f"{where}: {member.name!r} comes twice or is outside of {top}/")
                report.detail(name)
                file = archive.extractfile(member)
                assert file is not None
                found[name] = _hashed(file, kept=name in _READ)
                if found[name].size != member.size:
                    raise BundleDamagedError(f"{where} ends within {member.name}", hint=_AGAIN)
    except _TAR_DAMAGE as error:
        raise BundleDamagedError(f"{where} is no archive of a bundle, or is cut off: {error}", hint=_AGAIN) from None
    return found


def _hashed(file: BinaryIO | IO[bytes], *, kept: bool) -> _Found:
    digest, data, size = hashlib.sha256(), io.BytesIO(), 0
    while chunk := file.read(CHUNK):
        digest.update(chunk)
        size += len(chunk)
        if kept and size <= _KEPT_BYTES:
            data.write(chunk)
    return _Found(digest.hexdigest(), size, data.getvalue())


def _verified_folder(folder: Path, expect: str | None, report: Report) -> Verified:
    found = {}
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()):
        name = check_name(folder.name, path.relative_to(folder).as_posix())
        report.detail(name)
        if path.is_symlink() or not path.is_file():
            raise BundleDamagedError(f"{name} is no regular file", hint=_AGAIN)
        with path.open("rb") as file:
            found[name] = _hashed(file, kept=name in _READ)
        if name.startswith(f"{WHEELS}/"):
            check_wheel(path)
    return _verified(found, expect)


def _verified(found: dict[str, _Found], expect: str | None) -> Verified:
    """Hold the files against the checksums among them, and the manifest against both."""
    if SUMS not in found:
        raise BundleDamagedError(f"there is no {SUMS}: this is no bundle, or not all of one", hint=_AGAIN)
    digest = digest_of(found[SUMS].data)
    if expect and digest != expect.lower():
        raise BundleDigestError(
            f"the digest of this bundle is {digest}, expected is {expect}",
            hint="it is another bundle than the one you were told of: do not install it",
        )
    sums = read_sums(found[SUMS].data.decode("ascii", errors="replace"))
    _refuse(_wrong_files(found, sums))
    manifest = _manifest(found)
    listed = {f"{WHEELS}/{wheel.file}": wheel.sha256 for wheel in manifest.wheels}
    if listed != {name: value for name, value in sums.items() if name.startswith(f"{WHEELS}/")}:
        raise BundleDamagedError(f"{MANIFEST} and {SUMS} do not name the same wheels")
    return Verified(len(found), sum(file.size for file in found.values()), digest, manifest)


def _wrong_files(found: dict[str, _Found], sums: dict[str, str]) -> Iterator[str]:
    for name in sorted(sums.keys() - found.keys()):
        yield f"{name} is missing"
    for name in sorted(found.keys() - sums.keys() - {SUMS}):
        yield f"{name} is in no checksum"
    for name in sorted(found.keys() & sums.keys()):
        if found[name].sha256 != sums[name]:
            yield f"{name} is not what its checksum says"


def _manifest(found: dict[str, _Found]) -> Manifest:
    if MANIFEST not in found:
        raise BundleDamagedError(f"there is no {MANIFEST}: this is no bundle")
    try:
        return Manifest.model_validate_json(found[MANIFEST].data)
    except ValidationError as error:
        raise BundleDamagedError(
            f"{MANIFEST} is not of this release of the tool: {error.errors(include_url=False)[0]['msg']}",
            hint="check it with the release that made it",
        ) from None


def _refuse(problems: Iterator[str]) -> None:
    if found := list(problems):
        text = "\n".join(["the bundle is not whole:", *(f"  {line}" for line in found)])
        raise BundleDamagedError(text, hint="copy these again, and check again with `sglang-bw bundle --verify`")


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace")
