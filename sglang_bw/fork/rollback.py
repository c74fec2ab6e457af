"""Putting stock back: upstream's own wheel, by its pinned hash, without touching any other package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_bw.errors import InstallError
from sglang_bw.fork import checks
from sglang_bw.fork.environment import Environment
from sglang_bw.fork.install_plan import Request, unfit
from sglang_bw.fork.installers import Installer, Report, install_engine, session
from sglang_bw.fork.series import Series, newest_base
from sglang_bw.fork.upstream import fetch, pick_wheel
from sglang_bw.fork.verify import PACKAGE, Installation, State, inspect_environment


@dataclass(frozen=True)
class RollbackPlan:
    """What a rollback will do. ``nothing_to_do``: stock of that release is there, untouched."""

    environment: Environment
    found: Installation
    series: Series
    installer: Installer

    @property
    def version(self) -> str:
        """The stock version."""
        return self.series.pins.version

    @property
    def nothing_to_do(self) -> bool:
        """Whether stock is there already."""
        stock = self.found.state is State.STOCK and not self.found.problems
        return stock and self.found.version == self.version

    @property
    def steps(self) -> list[str]:
        """What will be done, one line a step."""
        now = f"{self.found.version} ({self.found.state})" if self.found.version else "nothing"
        return [f"install {PACKAGE}==={self.version} without dependencies, in place of {now}", "verify"]


def plan_rollback(root: Path, request: Request) -> RollbackPlan:
    """Find out what a return to stock takes: of the base asked for, else of the installed one, else the newest.

    :raises RefusedError: with every reason that was found.
    """
    environment = Environment.probe(request.python)
    found = inspect_environment(environment)
    installed_base = found.base if (root / found.base).is_dir() else ""
    series = Series.load(root, request.base or installed_base or newest_base(root))
    checks.refuse(unfit(environment, root, series, None))
    installer = Installer.named(request.installer, environment.executable)
    plan = RollbackPlan(environment, found, series, installer)
    if not plan.nothing_to_do:
        checks.refuse(checks.disk(environment, (), "cpu", cpu_torch=False))
    return plan


def roll_back(plan: RollbackPlan, report: Report) -> Installation:
    """Put upstream's wheel back, dependencies untouched, and return what ``verify`` then finds.

    :raises BwError: by its class what went wrong; the same call goes on from there.
    """
    if plan.nothing_to_do:
        return plan.found
    pins = plan.series.pins
    name = pick_wheel(pins, plan.environment.python, plan.environment.machine)
    report.step(f"fetching {name}")
    stock = fetch(pins, name)
    with session(plan.environment, set(), report) as (lock, scratch):
        report.step(f"installing {PACKAGE}==={pins.version}")
        requirement = f"{PACKAGE}==={pins.version} --hash=sha256:{pins.wheels[name]}"
        install_engine(plan.installer, stock, requirement, scratch, report, lock)
    report.step("verifying")
    found = inspect_environment(Environment.probe(plan.environment.executable))
    if found.state is not State.STOCK or found.problems or found.version != pins.version:
        raise InstallError(
            f"the installer was content, but {PACKAGE} {found.version or 'nowhere'} is {found.state}, not stock",
            hint="`sglang-bw verify` says what differs",
        )
    return found
