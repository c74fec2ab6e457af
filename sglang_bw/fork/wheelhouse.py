"""Finding the built wheel that fits an environment, and reading what is needed of it before it is installed."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version
from pydantic import ValidationError

from sglang_bw.errors import BadWheelError
from sglang_bw.fork.environment import Environment
from sglang_bw.fork.local import MARK, LocalSeries
from sglang_bw.fork.record import RECORD_PATH, BwRecord, LocalRecord, PatchRecord, content_digest
from sglang_bw.fork.series import Series
from sglang_bw.fork.wheel import parse_wheel


@dataclass(frozen=True)
class PatchedWheel:
    """A patched engine's wheel file.

    ``digest`` is its content digest, as in its own RECORD; ``tree`` the patched ``python/`` in git; ``patches`` are
    those of the series, ``local`` the builder's own, with the tree that they lie on.
    """

    path: Path
    version: str
    base: str
    digest: str
    tree: str
    patches: tuple[PatchRecord, ...] = ()
    local: LocalRecord | None = None

    @classmethod
    def open(cls, path: Path) -> PatchedWheel:
        """Read record and content digest; the files themselves are not read.

        :raises BadWheelError: no wheel, truncated, or upstream's without the series.
        """
        try:
            version = str(parse_wheel_filename(path.name)[1])
            with zipfile.ZipFile(path) as archive:
                record = BwRecord.model_validate_json(archive.read(RECORD_PATH))
                rows = archive.read(f"sglang-{version}.dist-info/RECORD").decode().splitlines()
        except OSError as error:
            raise BadWheelError(f"{path}: {error.strerror}", hint="name a wheel that `sglang-bw build` made") from None
        except (InvalidWheelFilename, zipfile.BadZipFile, UnicodeDecodeError) as error:
            raise BadWheelError(
                f"{path.name} is no usable wheel: {error}", hint="`sglang-bw build` makes one"
            ) from None
        except (KeyError, ValidationError):
            raise BadWheelError(
                f"{path.name} is not a patched engine: it has no {RECORD_PATH}",
                hint="`sglang-bw build --wheel FILE` patches upstream's wheel",
            ) from None
        return cls(path, version, record.base, content_digest(rows), record.tree, record.patches, record.local)

    def fits(self, environment: Environment) -> bool:
        """Whether the environment's Python and machine can load it."""
        return self.is_for(environment.python, environment.machine)

    def is_for(self, python: str, machine: str) -> bool:
        """Whether a Python (``3.12``) on a machine (``x86_64``) can load it."""
        return _fits(self.path.name, python, machine)

    @cached_property
    def sha256(self) -> str:
        """The sha256 of the file."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    def validate(self) -> None:
        """Check every file against the wheel's own RECORD: installers do not.

        :raises BadWheelError: damaged.
        """
        parse_wheel(self.path, self.path.read_bytes(), version=self.version)


def _fits(name: str, python: str, machine: str) -> bool:
    interpreter = "cp" + python.replace(".", "")
    for tag in parse_wheel_filename(name)[3]:
        python_fits = tag.interpreter in (interpreter, "py3")
        if python_fits and (tag.platform == "any" or tag.platform.endswith("_" + machine)):
            return True
    return False


def find_wheel(folder: Path, environment: Environment, base: str, *, version: str | None) -> PatchedWheel | None:
    """Return the patched wheel of ``base`` in ``folder`` that fits the environment, or ``None``.

    :param version: take exactly this version; without it, the newest without local patches.
    """
    return find_wheel_for(folder, environment.python, environment.machine, base, version=version)


def find_wheel_for(folder: Path, python: str, machine: str, base: str, *, version: str | None) -> PatchedWheel | None:
    """Return the patched wheel for a Python (``3.12``) on a machine (``x86_64``); see :func:`find_wheel`."""
    found = list(_built(folder, python, machine, base))
    exact = [entry for entry in found if version and entry[0] == Version(version)]
    chosen = exact if version else [entry for entry in found if MARK not in str(entry[0])]
    return PatchedWheel.open(max(chosen)[1]) if chosen else None


def find_local_wheel(folder: Path, environment: Environment, series: Series, local: LocalSeries) -> PatchedWheel | None:
    """Return the wheel in ``folder`` that holds exactly this series with these local patches, or ``None``."""
    for version, path in _built(folder, environment.python, environment.machine, series.base):
        if MARK in str(version):
            wheel = PatchedWheel.open(path)
            if local.is_in(wheel.local, series):
                return wheel
    return None


def _built(folder: Path, python: str, machine: str, base: str) -> Iterator[tuple[Version, Path]]:
    for path in sorted(folder.glob("sglang-*.whl")):
        try:
            built = parse_wheel_filename(path.name)[1]
        except InvalidWheelFilename:
            continue
        if built.public == base and (built.local or "").startswith("bw.") and _fits(path.name, python, machine):
            yield built, path
