"""The patch series of one upstream release, as it lies on disk.

``patches/<base>/`` holds ``series`` (one file name a line, in order), ``upstream.toml`` (the pins) and the patches,
each a ``git format-patch`` mail with trailers. Nothing here writes, and nothing needs more than the standard
library, so that ``sglang-bw --version`` stays quick.
"""

from __future__ import annotations

import shlex
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import parse_wheel_filename
from packaging.version import InvalidVersion, Version

from sglang_bw import __version__
from sglang_bw.errors import LintError, UnknownBaseError

PINS_FILE = "upstream.toml"
ORDER_FILE = "series"

_PACKAGE_DIR = Path(__file__).resolve().parent.parent


def patches_root(explicit: Path | None = None) -> Path:
    """Return the directory with one folder per base.

    The series travels: from ``explicit``, else from the checkout that this package lies in, else from the copy
    inside the installed tool (which nothing ever writes to).

    :raises UnknownBaseError: when there is no such directory.
    """
    candidates = [explicit] if explicit else [_PACKAGE_DIR.parent / "patches", _PACKAGE_DIR / "patches"]
    for candidate in candidates:
        # Beside an installed tool, a folder named "patches" may be anybody's.
        if (candidate == explicit and candidate.is_dir()) or bases(candidate):
            return candidate
    raise UnknownBaseError(
        f"no patch series at {candidates[0]}", hint="name the directory that holds patches/<base>/ with --patches DIR"
    )


def is_packaged(root: Path) -> bool:
    """Whether ``root`` is the copy inside the installed tool, which nothing may write to."""
    return root.resolve() == _PACKAGE_DIR / "patches"


def has_tests(root: Path) -> bool:
    """Whether the tests of the patches lie beside ``root``: the copy inside an installed tool travels without them."""
    return (root.parent / "tests" / "patches").is_dir()


def root_option(root: Path) -> str:
    """Return the ``--patches`` option that a command line needs for this root, with a blank before it, or nothing."""
    try:
        default = patches_root()
    except UnknownBaseError:
        default = None
    return "" if root == default else f" --patches {shlex.quote(str(root.resolve()))}"


def local_option(folder: Path | None) -> str:
    """Return the ``--local`` option that names this folder from any place, with a blank before it, or nothing."""
    return f" --local {shlex.quote(str(folder.resolve()))}" if folder else ""


def bases(root: Path) -> list[str]:
    """Return the upstream versions that have a series under ``root``, oldest first."""

    def key(name: str) -> Version:
        try:
            return Version(name)
        except InvalidVersion:
            return Version("0")

    # A folder with a dot is one that is being written.
    found = (path.parent.name for path in root.glob(f"*/{PINS_FILE}"))
    return sorted((name for name in found if not name.startswith(".")), key=key)


@dataclass(frozen=True)
class Release:
    """The last released state of a series: ``+bw.<number>`` is the tree ``tree`` and no other."""

    number: int = 0
    tree: str = ""


@dataclass(frozen=True)
class Pins:
    """What ``upstream.toml`` fixes.

    ``wheels`` maps wheel file names to sha256; ``tree`` is the git tree id of the patched package without its
    compiled files; ``patched`` maps each changed or added file (path in the wheel) to the sha256 after the series,
    before notices are added; ``removed`` lists files that the series deletes.
    """

    version: str
    wheels: dict[str, str]
    tree: str = ""
    patched: dict[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    release: Release = Release()

    @property
    def local(self) -> str:
        """The local version of the pinned tree: ``bw.N`` when released, else ``bw.N.d<tree8>``."""
        return local_version(self.release, self.tree)

    @property
    def full_version(self) -> str:
        """The version of the wheel that this series makes."""
        return f"{self.version}+{self.local}"


def local_version(release: Release, tree: str) -> str:
    """Return ``bw.N`` for the released tree and ``bw.N.d<first 8 of the tree id>`` for any other.

    pip and uv never replace an installed wheel of the same version, so different bytes must not share one.
    """
    number = f"bw.{release.number}"
    return number if tree and tree == release.tree else f"{number}.d{tree[:8]}"


@dataclass(frozen=True)
class Series:
    """One base's series: its folder, its pins and the patch files in order."""

    folder: Path
    pins: Pins
    order: tuple[str, ...]

    @property
    def base(self) -> str:
        """The upstream version."""
        return self.pins.version

    @property
    def files(self) -> tuple[Path, ...]:
        """The patch files, in the order they are applied."""
        return tuple(self.folder / name for name in self.order)

    @classmethod
    def load(cls, root: Path, base: str) -> Series:
        """Read ``root/base``.

        :raises UnknownBaseError: no such base.
        :raises LintError: pins or order file cannot be read.
        """
        folder = root / base
        if not (folder / PINS_FILE).is_file():
            known = ", ".join(bases(root)) or "none"
            raise UnknownBaseError(
                f"there is no patch series for SGLang {base}",
                hint=f"bases with a series: {known}. `sglang-bw patches list --base VERSION` shows one",
            )
        return cls(folder, read_pins(folder / PINS_FILE, base), tuple(read_order(folder / ORDER_FILE)))


def patched_paths(root: Path) -> frozenset[str]:
    """Return every path in a wheel that the series of any base changes or adds; a base that is damaged has none."""
    found: set[str] = set()
    for base in bases(root):
        with suppress(LintError):
            found.update(read_pins(root / base / PINS_FILE, base).patched)
    return frozenset(found)


def newest_base(root: Path) -> str:
    """Return the newest base under ``root``.

    :raises UnknownBaseError: when there is none.
    """
    known = bases(root)
    if not known:
        raise UnknownBaseError(f"no base under {root}", hint="a base is a folder with an upstream.toml in it")
    return known[-1]


def read_order(path: Path) -> list[str]:
    """Return the patch names of a ``series`` file; comments and blank lines are left out.

    :raises LintError: when it cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LintError([f"{path}: {error}"]) from None
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def read_pins(path: Path, base: str) -> Pins:
    """Parse ``upstream.toml``.

    :raises LintError: not TOML, a missing key, or pins of another version than the folder's name.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        release = data.get("release", {})
        for name in data["wheels"]:
            parse_wheel_filename(name)
        pins = Pins(
            version=data["version"],
            wheels=dict(data["wheels"]),
            tree=str(data.get("tree", "")),
            patched=dict(data.get("patched", {})),
            removed=tuple(data.get("removed", ())),
            release=Release(release.get("number", 0), release.get("tree", "")),
        )
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise LintError([f"{path}: {type(error).__name__}: {error}"]) from None
    if pins.version != base:
        raise LintError([f"{path}: pins SGLang {pins.version}, but the folder is {base}"])
    return pins


def version_line() -> str:
    """Return tool version, newest base and series id, as ``sglang-bw --version`` prints them."""
    try:
        root = patches_root()
        pins = read_pins(root / newest_base(root) / PINS_FILE, newest_base(root))
    except (UnknownBaseError, LintError) as error:
        return f"sglang-bw {__version__} (no series: {error.message.splitlines()[0]})"
    return f"sglang-bw {__version__} (base {pins.version}, series {pins.local}, tree {pins.tree[:12] or 'not pinned'})"
