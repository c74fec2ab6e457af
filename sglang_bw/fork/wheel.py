"""Reading an upstream wheel with suspicion, and writing a patched one that is the same on every day.

Only RECORD, one METADATA line (by bytes: every library round trip changes SGLang's multi-line licence field), the
version file and the files of the series differ from upstream's wheel.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from installer.exceptions import InstallerError
from installer.sources import WheelFile
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from sglang_bw.errors import BadWheelError, HashMismatchError

# Deflate level: 9 takes three times as long for half a percent.
_LEVEL = 6
_MAX_UNPACKED = 4 << 30

# Where a member's own header has the lengths of its name and its extra field, which its bytes follow.
_LOCAL_LENGTHS = struct.Struct("<HH")
_LENGTHS_AT = 26

COMPILED = (".so", ".pyd")

# What reading a damaged archive raises.
DAMAGE = (zipfile.BadZipFile, zlib.error, OSError, ValueError, EOFError, NotImplementedError)


@dataclass(frozen=True)
class Member:
    """One file of a wheel: its bytes and its permission bits.

    ``deflated`` is how the archive that it comes from holds it, which saves compressing it again; empty: not known.
    """

    data: bytes
    mode: int = 0o644
    deflated: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True)
class Wheel:
    """A wheel held in memory: path -> member, in the order of the archive, directories left out."""

    name: str
    sha256: str
    version: str
    date: tuple[int, int, int, int, int, int]
    members: dict[str, Member]

    @property
    def dist_info(self) -> str:
        """The name of the metadata directory."""
        return f"sglang-{self.version}.dist-info"


def read_wheel(path: Path, *, sha256: str, version: str) -> Wheel:
    """Check a wheel's hash, then everything else about it, then read it.

    :param sha256: the pinned digest; nothing is unpacked before it fits.
    :param version: the upstream version it must be.
    :raises HashMismatchError: another file than the pinned one.
    :raises BadWheelError: no wheel, truncated, of another release, unsafe paths, or a RECORD that does not hold.
    """
    data = _read(path)
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise HashMismatchError(
            f"{path.name}: sha256 is {found}, pinned is {sha256}",
            hint="the download is damaged or not the release the series was made for: delete it and fetch it again",
        )
    return parse_wheel(path, data, version=version)


def parse_wheel(path: Path, data: bytes, *, version: str) -> Wheel:
    """Read a wheel whose hash is known to be good; see :func:`read_wheel`."""
    try:
        name, found, _, _ = parse_wheel_filename(path.name)
        archive = _ReadOnce(io.BytesIO(data))
    except (InvalidWheelFilename, zipfile.BadZipFile) as error:
        raise BadWheelError(
            f"{path.name} is not a usable wheel: {error}", hint="it may be truncated: fetch it again"
        ) from None
    if name != "sglang" or str(found) != version:
        raise BadWheelError(
            f"{path.name} is {name} {found}, needed is sglang {version}", hint="name the wheel of that release"
        )
    with archive:
        _check_names(path.name, archive.infolist())
        try:
            archive.filename = path.name  # the name of the wheel, for `installer`
            WheelFile(archive).validate_record()
            infos = [info for info in archive.infolist() if not info.is_dir()]
            members = {info.filename: _member(data, info, archive.read(info)) for info in infos}
        except (InstallerError, *DAMAGE) as error:
            raise BadWheelError(f"{path.name}: {error}", hint="it is damaged: fetch or build it again") from None
        date = max(info.date_time for info in infos)
    return Wheel(path.name, hashlib.sha256(data).hexdigest(), version, date, members)


class _ReadOnce(zipfile.ZipFile):
    """An archive that unpacks a file once, however often it is read: for its hash, and for its bytes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._known: dict[str, bytes] = {}

    def open(
        self, name: str | zipfile.ZipInfo, mode: Literal["r", "w"] = "r", pwd: bytes | None = None, **options: bool
    ) -> IO[bytes]:
        key = name if isinstance(name, str) else name.filename
        if key not in self._known:
            with super().open(name, mode, pwd, **options) as file:
                self._known[key] = file.read()
        return io.BytesIO(self._known[key])


def _member(archive: bytes, info: zipfile.ZipInfo, data: bytes) -> Member:
    mode = (info.external_attr >> 16) & 0o777
    if info.compress_type != zipfile.ZIP_DEFLATED:
        return Member(data, mode)
    # The local header repeats the name; its lengths are its own, and the directory's need not be the same.
    name, extra = _LOCAL_LENGTHS.unpack_from(archive, info.header_offset + _LENGTHS_AT)
    begin = info.header_offset + _LENGTHS_AT + _LOCAL_LENGTHS.size + name + extra
    return Member(data, mode, archive[begin : begin + info.compress_size])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadWheelError(f"{path}: {error.strerror}", hint="name an sglang wheel with --wheel FILE") from None


def entry_problems(infos: list[zipfile.ZipInfo]) -> Iterator[str]:
    """Yield what an unpacker could be tricked with: paths that lead out, drives, links, devices, doubles."""
    seen: set[str] = set()
    for info in infos:
        pure = PurePosixPath(info.filename)
        if pure.is_absolute() or ".." in pure.parts or "\\" in info.filename or not pure.parts:
            yield f"{info.filename!r}: a path that leaves the directory"
        elif ":" in pure.parts[0]:
            yield f"{info.filename!r}: a drive letter"
        elif stat.S_ISLNK(info.external_attr >> 16):
            yield f"{info.filename!r}: a symbolic link"
        elif stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
            yield f"{info.filename!r}: no regular file"
        elif info.filename in seen:
            yield f"{info.filename!r}: a path that comes twice"
        seen.add(info.filename)


def _check_names(wheel: str, infos: list[zipfile.ZipInfo]) -> None:
    for problem in entry_problems(infos):
        raise BadWheelError(f"{wheel}: {problem}", hint="do not use this file")
    if sum(info.file_size for info in infos) > _MAX_UNPACKED:
        raise BadWheelError(f"{wheel}: unpacks to more than {_MAX_UNPACKED >> 30} GiB", hint="do not use this file")


def repack(upstream: Wheel, changes: Mapping[str, bytes | None], version: str) -> tuple[str, bytes]:
    """Return file name and bytes of the wheel with ``changes`` applied.

    :param changes: path below the archive -> new bytes, ``None`` to leave a file out. Paths in the old
        ``.dist-info`` follow it to its new name; METADATA's version line is changed here.
    :param version: the full version of the result.
    """
    old, new = upstream.dist_info, f"sglang-{version}.dist-info"
    members = dict(upstream.members)
    for path, data in changes.items():
        if data is None:
            members.pop(path, None)
        else:
            mode = members[path].mode if path in members else 0o644
            members[path] = Member(data, mode)
    metadata = f"{old}/METADATA"
    members[metadata] = Member(add_notice(set_version(members[metadata].data, upstream.version, version)))
    record = members.pop(f"{old}/RECORD", Member(b""))
    renamed = {_move(path, old, new): member for path, member in members.items()}
    return built_name(upstream.name, version), write_zip(recorded(renamed, new, record.mode), upstream.date)


def recorded(members: Mapping[str, Member], dist_info: str, mode: int = 0o644) -> list[tuple[str, Member]]:
    """Return a wheel's files in the order of its archive, RECORD made and last.

    :param dist_info: name of the metadata folder.
    :param mode: permission bits of RECORD.
    """
    # Python files first and the metadata directory last, as the format asks; sorted, so that order never differs.
    ordered = sorted(members.items(), key=lambda item: (item[0].startswith(dist_info + "/"), item[0]))
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    for path, member in ordered:
        writer.writerow((path, "sha256=" + _urlsafe(member.data), len(member.data)))
    writer.writerow((f"{dist_info}/RECORD", "", ""))
    return [*ordered, (f"{dist_info}/RECORD", Member(lines.getvalue().encode(), mode))]


def built_name(upstream_name: str, version: str) -> str:
    """Return the file name of the wheel made from an upstream wheel."""
    return f"sglang-{version}-{upstream_name.split('-', 2)[2]}"


def _move(path: str, old: str, new: str) -> str:
    return new + path.removeprefix(old) if path.startswith(old + "/") else path


def write_zip(members: list[tuple[str, Member]], date: tuple[int, int, int, int, int, int]) -> bytes:
    """Return the archive of these files, the same on every day."""
    buffer = io.BytesIO()
    with _Writer(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as archive:
        for path, member in members:
            info = zipfile.ZipInfo(path, date)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3
            info.external_attr = (stat.S_IFREG | member.mode) << 16
            archive.add(info, member)
    return buffer.getvalue()


class _Writer(zipfile.ZipFile):
    """An archive that takes files as they were deflated elsewhere, too."""

    def add(self, info: zipfile.ZipInfo, member: Member) -> None:
        """Write one file; what comes out has the same form either way."""
        if not member.deflated:
            self.writestr(info, member.data)
            return
        assert self.fp is not None
        info.CRC, info.file_size, info.compress_size = zlib.crc32(member.data), len(member.data), len(member.deflated)
        info.header_offset = self.fp.tell()
        self.fp.write(info.FileHeader() + member.deflated)
        self.start_dir = self.fp.tell()
        self.filelist.append(info)
        self.NameToInfo[info.filename] = info
        self._didModify = True


def set_version(metadata: bytes, old: str, new: str) -> bytes:
    """Return METADATA with its one ``Version:`` line replaced, every other byte kept.

    :raises BadWheelError: not exactly one such line in the header part.
    """
    header, gap, rest = metadata.partition(b"\n\n")
    pattern = re.compile(rb"^Version: " + re.escape(old.encode()) + rb"(\r?)$", re.MULTILINE)
    changed, count = pattern.subn(lambda match: b"Version: " + new.encode() + match[1], header)
    if count != 1:
        raise BadWheelError(f"METADATA has {count} lines 'Version: {old}', needed is one")
    return changed + gap + rest


def add_notice(metadata: bytes) -> bytes:
    """Return METADATA naming NOTICE beside LICENSE (PEP 639), where upstream names its licence that way."""
    return re.sub(rb"^(License-File: )LICENSE(\r?\n)", rb"\g<0>\1NOTICE\2", metadata, count=1, flags=re.MULTILINE)


def set_version_module(source: bytes, old: str, new: str) -> bytes:
    """Return upstream's ``_version.py`` saying the full version, so that the server's own replies say it too.

    :raises BadWheelError: the file is not in the form of the releases known so far.
    """
    release = tuple(int(part) for part in old.split(".") if part.isdigit())
    local = new.partition("+")[2]
    text, strings = re.subn(rb"= '" + re.escape(old.encode()) + rb"'", b"= '" + new.encode() + b"'", source)
    old_tuple = re.escape(repr(release)[:-1].encode())
    text, tuples = re.subn(rb"= " + old_tuple + rb"([^)]*)\)", _tuple_with(local), text)
    if (strings, tuples) != (1, 1):
        raise BadWheelError(f"_version.py: found {strings} version strings and {tuples} tuples, needed is one of each")
    return text


def _tuple_with(local: str) -> Callable[[re.Match[bytes]], bytes]:
    def replacement(match: re.Match[bytes]) -> bytes:
        return match[0][:-1] + b", " + repr(local).encode() + b")"

    return replacement


def _urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
