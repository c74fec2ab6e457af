"""What a bundle will hold, found out and checked before anything large is fetched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sglang_bw.bundle import payload, toolwheel
from sglang_bw.errors import BundleError
from sglang_bw.fork import locks, upstream
from sglang_bw.fork.locks import Lock, Locked
from sglang_bw.fork.series import Series, newest_base
from sglang_bw.fork.wheelhouse import PatchedWheel, find_wheel_for

TOOL_LOCK = Path(__file__).with_name("tool.txt")

# What installing takes: the installer itself, the tool, the engine.
_NEEDED = frozenset({"pip", toolwheel.DISTRIBUTION, "sglang"})


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    :param device: ``cpu`` or ``cuda``.
    :param python: major.minor of the target, this one by default.
    :param machine: ``x86_64`` or ``aarch64`` of the target, this one by default.
    :param base: upstream version; by default the wheel's, else the newest with a series.
    :param wheel: the built wheel; by default from ``dist``, else it is built there.
    :param recipes: ids or files.
    :param models: model folders to take along.
    :param without: names of packages to leave out, shell patterns too (``nvidia-*``).
    """

    device: str
    python: str | None = None
    machine: str | None = None
    base: str | None = None
    wheel: Path | None = None
    dist: Path = Path("dist")
    recipes: tuple[str, ...] = ()
    models: tuple[Path, ...] = ()
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The content of a bundle.

    ``packages``: what to fetch; ``of_engine``, ``of_tool``: canonical names that each of them needs; ``left_out``:
    locked packages that stay behind; ``wheel``: the patched engine, ``None`` when it has to be built first.
    """

    root: Path
    series: Series
    device: str
    python: str
    machine: str
    packages: tuple[Locked, ...]
    of_engine: frozenset[str]
    of_tool: frozenset[str]
    left_out: tuple[Locked, ...]
    wheel: PatchedWheel | None
    dist: Path
    extras: payload.Extras

    @property
    def version(self) -> str:
        """The engine's full version."""
        return self.wheel.version if self.wheel else self.series.pins.full_version

    @property
    def name(self) -> str:
        """Name of the bundle's folder."""
        return f"sglang-bw-{self.version}-{self.device}-cp{self.python.replace('.', '')}-{self.machine}"

    @property
    def notes(self) -> list[str]:
        """What the user should know about this bundle."""
        notes = list(self.extras.notes)
        if self.left_out:
            names = ", ".join(f"{package.name}=={package.version}" for package in self.left_out)
            notes.append(f"left out: {names}")
        return notes


def plan_bundle(root: Path, request: Request) -> Plan:
    """Find out what belongs into the bundle, and refuse what cannot work.

    :param root: the directory with one folder per base.
    :raises BundleError: a name to leave out that is not there or is needed, or a model that cannot travel.
    :raises BwError: the wheel, the base, a recipe is not usable, or there is no lock.
    """
    wheel = PatchedWheel.open(request.wheel) if request.wheel else None
    if wheel and request.base not in (None, wheel.base):
        raise BundleError(
            f"{wheel.path.name} is of SGLang {wheel.base}, --base says {request.base}", hint="leave --base out"
        )
    series = Series.load(root, request.base or (wheel.base if wheel else newest_base(root)))
    python, machine = request.python or upstream.this_python(), request.machine or upstream.this_machine()
    lock = Lock.load(root, series.base, request.device, python, machine)
    tool = tool_packages(lock)
    left_out = frozenset(_left_out(request.without, (*lock.packages, *tool), request.device))
    locked = {package.name: package for package in (*tool, *lock.packages)}
    if wheel is None:
        wheel = find_wheel_for(request.dist, python, machine, series.base, version=series.pins.full_version)
    elif not wheel.is_for(python, machine):
        raise BundleError(f"{wheel.path.name} is not for Python {python} on {machine}")
    return Plan(
        root=root,
        series=series,
        device=request.device,
        python=python,
        machine=machine,
        packages=tuple(package for name, package in sorted(locked.items()) if name not in left_out),
        of_engine=frozenset(package.name for package in lock.packages),
        of_tool=frozenset(package.name for package in locks.parse(TOOL_LOCK)),
        left_out=tuple(locked[name] for name in sorted(left_out)),
        wheel=wheel,
        dist=request.dist,
        extras=payload.gather(request.recipes, request.models),
    )


def tool_packages(lock: Lock) -> tuple[Locked, ...]:
    """Return what the tool needs beside the engine's packages; where both need one, the engine's version counts.

    :raises BundleError: an engine's version is too old or too new for the tool.
    """
    engine = {package.name: package.version for package in lock.packages}
    for text in toolwheel.requirements():
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate():
            continue
        version = engine.get(canonicalize_name(requirement.name))
        if version and not requirement.specifier.contains(version, prereleases=True):
            raise BundleError(f"the tool needs {requirement}, {lock.path.name} has {version}")
    return tuple(package for package in locks.parse(TOOL_LOCK) if package.name not in engine)


def _left_out(patterns: tuple[str, ...], packages: tuple[Locked, ...], device: str) -> Iterator[str]:
    names = {package.name for package in packages}
    needed = {package.name for package in locks.parse(TOOL_LOCK)} | _NEEDED
    for pattern in patterns:
        found = {name for name in names if fnmatchcase(name, canonicalize_name(pattern))}
        if not found:
            raise BundleError(
                f"--without {pattern}: no locked package of that name",
                hint=f"`sglang-bw bundle --device {device} --dry-run --json` lists what would be in the bundle",
            )
        if kept := sorted(found & needed):
            raise BundleError(f"--without {pattern}: the tool itself needs {', '.join(kept)}")
        yield from found
