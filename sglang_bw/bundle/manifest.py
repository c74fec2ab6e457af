"""What lies in a bundle beside the wheels: the manifest, the checksums, and what ``install.sh`` reads.

A bundle is a tar archive of one folder, whole or cut into parts. ``SHA256SUMS`` lists every other file of the folder;
its own sha256 is the bundle's digest, which is the same however the archive is cut.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from sglang_bw.bundle.members import check_name
from sglang_bw.errors import BundleDamagedError

SUMS = "SHA256SUMS"
PARTS = "PARTS"
MANIFEST = "bundle.json"
SBOM = "sbom.cdx.json"
TARGET = "TARGET"
REQUIREMENTS = "requirements.txt"
SCRIPT = "install.sh"
WHEELS = "wheels"

# What lies beside the archive as well, so that a host can be looked at before anything large is read.
HEAD = (SCRIPT, SUMS, TARGET, REQUIREMENTS, MANIFEST)

User = Literal["engine", "tool"]

_SUM_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_PART_LINE = re.compile(r"([0-9a-f]{64})  (\d+)  ([A-Za-z0-9._+-]+)")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BundledWheel(_Frozen):
    """One wheel of a bundle, byte for byte the locked one."""

    name: str = Field(description="Canonical name.")
    version: str
    file: str = Field(description="File name below wheels/.")
    size: int = Field(description="Bytes.")
    sha256: str
    used_by: tuple[User, ...]


class LeftOut(_Frozen):
    """A locked package that was left out of a bundle."""

    name: str
    version: str


class Manifest(_Frozen):
    """What ``bundle.json`` says."""

    schema_version: Literal[1] = 1
    name: str = Field(description="Name of the bundle's folder and archive.")
    tool: str = Field(description="Version of sglang-bw.")
    engine: str = Field(description="Full version of the patched engine.")
    base: str
    tree: str = Field(description="Git tree id of the patched python/ directory.")
    device: str
    python: str = Field(description="major.minor.")
    machine: str
    glibc: str = Field(description="The oldest glibc that every wheel runs on.")
    installed_bytes: int = Field(description="What the wheels unpack to.")
    wheels: tuple[BundledWheel, ...]
    left_out: tuple[LeftOut, ...] = ()
    recipes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the file's text."""
        return self.model_dump_json(indent=1) + "\n"

    def target(self) -> str:
        """Return the facts that ``install.sh`` compares with the host: a word and its value a line."""
        facts = {
            "name": self.name,
            "engine": self.engine,
            "device": self.device,
            "python": self.python,
            "machine": self.machine,
            "glibc": self.glibc,
            "installed_kib": str(-(-self.installed_bytes // 1024)),
            "left_out": " ".join(package.name for package in self.left_out) or "-",
        }
        return "".join(f"{key} {value}\n" for key, value in facts.items())

    def requirements(self) -> str:
        """Return the requirements with the hash of the very file that is in the bundle, in the order of installing.

        pip itself comes first, the tool and the engine last. The comment is the size in MB, for the progress.
        """
        last = {"sglang": 1, "sglang-bw": 2, "pip": -1}
        ordered = sorted(self.wheels, key=lambda wheel: (last.get(wheel.name, 0), wheel.name))
        return "".join(
            f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256} # {wheel.size // 10**6}\n" for wheel in ordered
        )


@dataclass(frozen=True)
class Part:
    """One piece of the archive: file name, bytes, sha256."""

    file: str
    size: int
    sha256: str


def digest_of(sums: bytes) -> str:
    """Return the digest of a bundle: the sha256 of its checksums."""
    return hashlib.sha256(sums).hexdigest()


def sums_text(hashes: Mapping[str, str]) -> str:
    """Return ``SHA256SUMS``, in the form of sha256sum, sorted."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(hashes.items()))


def read_sums(text: str) -> dict[str, str]:
    """Read ``SHA256SUMS``: path below the folder to sha256.

    :raises BundleDamagedError: a line is not in its form, or a path comes twice.
    :raises BundleUnsafeError: a path leads out of the folder.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        parsed = _SUM_LINE.fullmatch(line)
        if not parsed or parsed[2] in found:
            raise BundleDamagedError(f"{SUMS}: no line of checksums, or one that comes twice: {line[:100]!r}")
        found[check_name(SUMS, parsed[2])] = parsed[1]
    if not found:
        raise BundleDamagedError(f"{SUMS} is empty")
    return found


def parts_text(parts: Iterable[Part]) -> str:
    """Return ``PARTS``: sha256, bytes and file name of every part, in order."""
    return "".join(f"{part.sha256}  {part.size}  {part.file}\n" for part in parts)


def read_parts(text: str) -> tuple[Part, ...]:
    """Read ``PARTS``.

    :raises BundleDamagedError: a line is not in its form, or there is none.
    """
    parsed = [_PART_LINE.fullmatch(line) for line in text.splitlines()]
    found = tuple(Part(line[3], int(line[2]), line[1]) for line in parsed if line)
    if not found or len(found) != len(parsed) or len({part.file for part in found}) != len(found):
        raise BundleDamagedError(f"{PARTS} is not a list of parts", hint="copy it again")
    return found
