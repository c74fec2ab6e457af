"""Which names and kinds of files may be in a bundle: what its writer makes, its reader and ``install.sh`` accept."""

from __future__ import annotations

import re
import tarfile
import zipfile
from pathlib import Path

from sglang_bw.errors import BundleDamagedError, BundleUnsafeError
from sglang_bw.fork.wheel import DAMAGE, entry_problems

# Printable ASCII without what a shell, `tar t` or sha256sum would write in another way than it is.
_PLAIN = re.compile(r"[A-Za-z0-9 ._+=@,~()!%&#/-]+")


def check_name(where: str, name: str) -> str:
    """Return ``name`` when an unpacker can be trusted with it.

    :param where: the archive, for the message.
    :raises BundleUnsafeError: it is absolute, leads out of the folder, or is not written plainly.
    """
    parts = name.split("/")
    if name.startswith("/") or ".." in parts:
        raise _unsafe(where, name, "a path that leaves the folder")
    if not _PLAIN.fullmatch(name) or "" in parts or "." in parts or any(part.startswith(("-", " ")) for part in parts):
        raise _unsafe(where, name, "a name that is not plain")
    return name


def check_member(where: str, member: tarfile.TarInfo) -> None:
    """Accept a regular file with a safe name and no hole in it, and nothing else.

    :raises BundleUnsafeError: anything else.
    """
    check_name(where, member.name)
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        kinds = {tarfile.SYMTYPE: "a symbolic link", tarfile.LNKTYPE: "a hard link", tarfile.DIRTYPE: "a folder"}
        raise _unsafe(where, member.name, kinds.get(member.type, "no regular file"))


def check_wheel(path: Path) -> int:
    """Accept a wheel whose members stay in their folder, and return what it unpacks to, in bytes.

    :raises BundleUnsafeError: a member leads out, is a link, or comes twice.
    :raises BundleDamagedError: it is no archive.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except DAMAGE as error:
        raise BundleDamagedError(f"{path.name} is not a usable wheel: {error}") from None
    for problem in entry_problems(infos):
        raise BundleUnsafeError(f"{path.name}: {problem}", hint="do not use this file")
    return sum(info.file_size for info in infos)


def _unsafe(where: str, name: str, problem: str) -> BundleUnsafeError:
    return BundleUnsafeError(f"{where}: {name!r}: {problem}", hint="do not use this file")
