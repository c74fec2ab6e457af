"""What an install will do: found out and checked before anything is downloaded or changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from sglang_bw.errors import UnknownBaseError
from sglang_bw.fork import checks, lint
from sglang_bw.fork.driver import driver_version
from sglang_bw.fork.environment import Environment
from sglang_bw.fork.installers import Installer
from sglang_bw.fork.local import LocalSeries, load_for, planned_version
from sglang_bw.fork.locks import LEFT_OUT, Lock, Locked
from sglang_bw.fork.series import Series, local_option, newest_base
from sglang_bw.fork.sources import Sources
from sglang_bw.fork.upstream import pick_wheel
from sglang_bw.fork.verify import PACKAGE, Installation, State, inspect_environment
from sglang_bw.fork.wheelhouse import PatchedWheel, find_local_wheel, find_wheel


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    :param python: interpreter of the target environment, this one by default.
    :param device: ``auto``, ``cpu`` or ``cuda``.
    :param base: upstream version; by default the wheel's, else the newest with a series.
    :param wheel: install this built wheel.
    :param find_links: look for the built wheel here, instead of in ``dist/``, and never build.
    :param torch_index: index of a CPU-only torch.
    :param check_driver: refuse ``cuda`` without a fitting driver.
    :param local: folder of a local series that the engine is to have on top.
    """

    python: Path | None = None
    device: str = "auto"
    base: str | None = None
    wheel: Path | None = None
    find_links: Path | None = None
    torch_index: str | None = None
    installer: str = "pip"
    check_driver: bool = True
    local: Path | None = None


@dataclass(frozen=True)
class Plan:
    """What an install will do, found out without changing or downloading anything.

    ``missing``: packages of the lock to install; ``torch``: those to take from ``torch_index``, unhashed; ``wheel``:
    the built wheel, ``None`` when it has to be built first into ``out``; ``replace_engine``: the engine's bytes
    differ from the wheel's, or it is not intact.
    """

    environment: Environment
    found: Installation
    root: Path
    series: Series
    device: str
    lock: Lock
    missing: tuple[Locked, ...]
    torch: tuple[Locked, ...]
    torch_index: str | None
    wheel: PatchedWheel | None
    out: Path
    replace_engine: bool
    installer: Installer
    local: LocalSeries | None = None

    @property
    def nothing_to_do(self) -> bool:
        """Whether the environment is right already."""
        return not (self.missing or self.torch or self.replace_engine)

    @property
    def version(self) -> str:
        """The full version that will be there; with ``<tree>`` in it when only the build tells it."""
        if self.wheel:
            return self.wheel.version
        if self.local is None:
            return self.series.pins.full_version
        if not self.replace_engine:
            return self.found.version
        return planned_version(self.series.pins)

    @property
    def replaced(self) -> dict[str, tuple[str, str]]:
        """Packages of the environment that change their version: name to old and new."""
        installed = self.environment.installed
        return {p.name: (installed[p.name], p.version) for p in (*self.torch, *self.missing) if p.name in installed}

    @property
    def steps(self) -> list[str]:
        """What will be done, one line a step."""
        steps = []
        if self.replace_engine and self.wheel is None:
            steps.append(f"build {PACKAGE} {self.version} into {self.out}")
        if self.torch:
            names = ", ".join(f"{p.name}=={p.version}" for p in self.torch)
            steps.append(f"install {names} from {self.torch_index} (no hashes are pinned for that index)")
        if self.missing:
            steps.append(f"install {len(self.missing)} of {len(self.lock.packages)} packages of {self.lock.path.name}")
        if self.replace_engine:
            now = f"{self.found.version} ({self.found.state})" if self.found.version else "nothing"
            steps.append(f"install {PACKAGE}=={self.version} without dependencies, in place of {now}")
        return [*steps, "verify"]

    @property
    def notes(self) -> list[str]:
        """What the user should know about this environment."""
        notes = []
        python = self.environment.python
        if names := ", ".join(LEFT_OUT.get(python, ())):
            notes.append(
                f"{names} is left out on Python {python}: its core has no wheel there (xgrammar serves structured"
                " output)"
            )
        if self.replace_engine and self.found.sources:
            notes.append(source_note(self.found.sources, self.environment))
        if self.replace_engine and self.found.local and not (self.local or (self.wheel and self.wheel.local)):
            own = ", ".join(patch.file for patch in self.found.local.patches)
            notes.append(f"the engine there has local patches, which go ({own}): `--local DIR` keeps them")
        return notes


def source_note(sources: Sources, environment: Environment) -> str:
    """Say that an engine from sources gives way, and how it comes back."""
    return (
        f"the engine there was installed from sources, {sources}: `{sources.back(environment.executable)}` brings it"
        " back"
    )


def plan_install(root: Path, request: Request) -> Plan:
    """Find out what has to be done, and refuse what must not be done.

    :param root: the directory with one folder per base.
    :raises RefusedError: with every reason that was found.
    :raises LintError: the engine has to be built, and the series is not clean.
    :raises BwError: the wheel, the base or the interpreter that was named is not usable.
    """
    wheel = PatchedWheel.open(request.wheel) if request.wheel else None
    series = Series.load(root, request.base or (wheel.base if wheel else newest_base(root)))
    local = load_for(request.local, series) if request.local else None
    environment = Environment.probe(request.python)
    checks.refuse((*unfit(environment, root, series, wheel), *_foreign(wheel, series, local)))
    driver = driver_version()
    device = request.device
    if device == "auto":
        device = "cuda" if driver and not request.torch_index else "cpu"
    lock = Lock.load(root, series.base, device, environment.python, environment.machine)
    missing, torch = missing_packages(environment, lock, request.torch_index)
    found = inspect_environment(environment)
    out = request.find_links or default_out()
    wheel = wheel or _built(request, series, local, environment, out)
    plan = Plan(
        environment=environment,
        found=found,
        root=root,
        series=series,
        device=device,
        lock=lock,
        missing=missing,
        torch=torch,
        torch_index=request.torch_index,
        wheel=wheel,
        out=out,
        replace_engine=not _is_there(found, wheel, series, local),
        installer=Installer.named(request.installer, environment.executable),
        local=local,
    )
    if plan.replace_engine and plan.wheel is None:
        lint.require_clean(series)  # the build does, too late for a dry run
    if not plan.nothing_to_do:
        checks.refuse(_refusals(plan, driver, check_driver=request.check_driver))
    return plan


def default_out() -> Path:
    """Return where built wheels are: ``dist/`` in a checkout, else the user's cache."""
    if Path("dist").is_dir() or Path("patches").is_dir():
        return Path("dist")
    return Path(platformdirs.user_cache_dir("sglang-bw")) / "dist"


def unfit(environment: Environment, root: Path, series: Series, wheel: PatchedWheel | None) -> Iterator[str]:
    """Yield why this interpreter or place is unfit, whatever the device is."""
    unfit = list(checks.interpreter(environment, root, series.base))
    yield from unfit
    if not unfit:
        name = wheel.path.name if wheel else pick_wheel(series.pins, environment.python, environment.machine)
        yield from checks.libc(environment, name)
        if wheel and not wheel.fits(environment):
            yield f"{name} is not for Python {environment.python} on {environment.machine}"
    if wheel and wheel.base != series.base:
        yield f"{wheel.path.name} is made from SGLang {wheel.base}, asked for is {series.base}"
    yield from checks.place(environment)


def _foreign(wheel: PatchedWheel | None, series: Series, local: LocalSeries | None) -> Iterator[str]:
    if wheel and local and not local.is_in(wheel.local, series):
        yield f"{wheel.path.name} does not hold the patches of {local.folder}: leave out --wheel, and it is built"


def _refusals(plan: Plan, driver: str | None, *, check_driver: bool) -> Iterator[str]:
    if plan.device == "cuda" and check_driver:
        yield from checks.driver(driver, plan.lock.packages)
    yield from checks.disk(plan.environment, (*plan.torch, *plan.missing), plan.device, cpu_torch=_cpu_torch(plan))


def _cpu_torch(plan: Plan) -> bool:
    return bool(plan.torch_index) or "+" in plan.environment.installed.get("torch", "")


def missing_packages(
    environment: Environment, lock: Lock, torch_index: str | None
) -> tuple[tuple[Locked, ...], tuple[Locked, ...]]:
    """Return which packages have to come from the lock, and which from the index of a CPU-only torch."""
    installed = environment.installed
    cpu_torch = lock.device == "cpu" and "+" in installed.get("torch", "")
    if not (torch_index or cpu_torch):
        return tuple(p for p in lock.packages if not p.is_met(installed.get(p.name))), ()
    missing = [p for p in lock.without_cuda() if not p.is_met(installed.get(p.name))]
    torch = [p for p in lock.torch() if not p.is_met_locally(installed.get(p.name))]
    if torch_index is None:
        return tuple(missing + torch), ()
    return tuple(missing), tuple(torch)


def _built(
    request: Request, series: Series, local: LocalSeries | None, environment: Environment, out: Path
) -> PatchedWheel | None:
    """Return the wheel that is built already: of exactly this series, else (``find_links``) the newest there is.

    :raises UnknownBaseError: none in the folder that the user named.
    """
    if local:
        wheel = find_local_wheel(out, environment, series, local)
        if wheel is None and request.find_links:
            raise UnknownBaseError(
                f"{out} has no wheel of SGLang {series.base} with the patches of {local.folder}",
                hint=f"`sglang-bw build --base {series.base}{local_option(local.folder)} --out DIR` makes one",
            )
        return wheel
    wheel = find_wheel(out, environment, series.base, version=series.pins.full_version)
    if wheel is None and request.find_links:
        wheel = find_wheel(out, environment, series.base, version=None)
        if wheel is None:
            raise UnknownBaseError(
                f"{out} has no patched wheel of SGLang {series.base} for Python {environment.python} on"
                f" {environment.machine}",
                hint="`sglang-bw build --out DIR` makes one; without --find-links, install builds it itself",
            )
    return wheel


def _is_there(found: Installation, wheel: PatchedWheel | None, series: Series, local: LocalSeries | None) -> bool:
    """Whether the engine that should be there is there: these bytes, or this tree when there is no wheel to compare."""
    if found.state is not State.INTACT:
        return False
    if wheel:
        return found.digest == wheel.digest and found.version == wheel.version
    if local:
        return local.is_in(found.local, series)
    return found.version == series.pins.full_version and found.tree == series.pins.tree
