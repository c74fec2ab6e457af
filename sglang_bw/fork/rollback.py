"""Putting stock back: upstream's own wheel, by its pinned hash, without touching any other package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_bw.errors import InstallError
from sglang_bw.fork import checks
from sglang_bw.fork.environment import Environment
from sglang_bw.fork.install_plan import Request, source_note, unfit
from sglang_bw.fork.installers import Installer, Report, install_engine, session, tidy
from sglang_bw.fork.series import Series, bases, newest_base, patched_paths
from sglang_bw.fork.upstream import fetch, pick_wheel
from sglang_bw.fork.verify import PACKAGE, Installation, State, inspect_environment


@dataclass(frozen=True)
class RollbackPlan:
    """What a rollback will do. ``asked``: the user named the release, so that another stock one gives way to it."""

    environment: Environment
    found: Installation
    series: Series
    installer: Installer
    asked: bool

    @property
    def version(self) -> str:
        """The stock version that will be there."""
        return self.found.version if self.nothing_to_do else self.series.pins.version

    @property
    def nothing_to_do(self) -> bool:
        """Whether stock is there already, untouched: of the release that was named, or of any when none was."""
        stock = self.found.state is State.STOCK and not self.found.problems
        return stock and (not self.asked or self.found.version == self.series.pins.version)

    @property
    def steps(self) -> list[str]:
        """What will be done, one line a step; none when stock is there."""
        if self.nothing_to_do:
            return []
        now = f"{self.found.version} ({self.found.state})" if self.found.version else "nothing"
        return [f"install {PACKAGE}==={self.version} without dependencies, in place of {now}", "verify"]

    @property
    def notes(self) -> list[str]:
        """What the user should know about this environment."""
        sources = None if self.nothing_to_do else self.found.sources
        return [source_note(sources, self.environment)] if sources else []


def plan_rollback(root: Path, request: Request) -> RollbackPlan:
    """Find out what a return to stock takes: of the base asked for, else of the installed one.

    :raises RefusedError: with every reason that was found.
    """
    environment = Environment.probe(request.python)
    found = inspect_environment(environment)
    known = found.base if found.base in bases(root) else ""
    # The newest stands in where the release is not known: nothing is done then, or it is refused.
    series = Series.load(root, request.base or known or newest_base(root))
    installer = Installer.named(request.installer, environment.executable)
    plan = RollbackPlan(environment, found, series, installer, asked=request.base is not None)
    if not plan.nothing_to_do:
        unknown = () if request.base or known else _unknown(found)
        checks.refuse((*unfit(environment, root, series, None), *unknown))
        checks.refuse(checks.disk(environment, (), "cpu", cpu_torch=False))
    return plan


def _unknown(found: Installation) -> Iterator[str]:
    """Yield why nothing says which release stock would be."""
    if found.state is State.ABSENT:
        yield f"no {PACKAGE} is installed to go back from: --base VERSION installs that stock release"
    else:
        yield f"no series here knows the stock release of {PACKAGE} {found.version}: --base VERSION names another one"


def roll_back(plan: RollbackPlan, report: Report) -> Installation:
    """Put upstream's wheel back, dependencies untouched, and return what ``verify`` then finds.

    :raises BwError: by its class what went wrong; the same call goes on from there.
    """
    if plan.nothing_to_do:
        tidy(plan.environment, report)
        return plan.found
    pins = plan.series.pins
    name = pick_wheel(pins, plan.environment.python, plan.environment.machine)
    report.step(f"fetching {name}")
    stock = fetch(pins, name)
    ours = patched_paths(plan.series.folder.parent)
    with session(plan.environment, set(), report, ours) as (lock, scratch):
        report.step(f"installing {PACKAGE}==={pins.version}")
        requirement = f"{PACKAGE}==={pins.version} --hash=sha256:{pins.wheels[name]}"
        install_engine(plan.installer, stock, requirement, scratch, report, lock)
    report.step("verifying")
    found = inspect_environment(Environment.probe(plan.environment.executable))
    if wrong := _wrong(found, pins.version):
        raise InstallError(f"the installer was content, but {wrong}", hint="`sglang-bw verify` says what differs")
    return found


def _wrong(found: Installation, version: str) -> str:
    """Say in what the environment differs from untouched stock, or nothing."""
    if found.state is State.ABSENT:
        return f"no {PACKAGE} is there"
    if found.state is not State.STOCK:
        return f"{PACKAGE} {found.version} is {found.state.value}, not stock"
    if found.version != version:
        return f"{PACKAGE} {found.version} is there, not {version}"
    return ", ".join(f"{path} is {kind}" for kind, path in found.problems[:3])
