"""Putting the built engine into an environment: a few installer calls, as the plan says.

First the dependency lock, then the wheel without dependencies, then ``verify``. Each step asks only for what is not
there yet, so that a killed run loses nothing.
"""

from __future__ import annotations

from sglang_bw.errors import InstallError
from sglang_bw.fork.environment import Environment
from sglang_bw.fork.install_plan import Plan, missing_packages
from sglang_bw.fork.installers import Report, install_engine, session, tidy, written
from sglang_bw.fork.locks import render
from sglang_bw.fork.series import patched_paths
from sglang_bw.fork.verify import PACKAGE, Installation, State, inspect_environment
from sglang_bw.fork.wheelhouse import PatchedWheel


def install(plan: Plan, report: Report) -> Installation:
    """Carry a plan out and return what ``verify`` then finds.

    :raises BwError: by its class what went wrong; the same call goes on from there.
    :raises InstallError: the installer was content, but the environment is not what was asked for.
    """
    if plan.nothing_to_do:
        tidy(plan.environment, report)
        return plan.found
    wheel = _wheel(plan, report) if plan.replace_engine else None
    names = {p.name for p in plan.lock.packages}
    with session(plan.environment, names, report, patched_paths(plan.root)) as (lock, scratch):
        if plan.torch:
            report.step(f"installing torch from {plan.torch_index}")
            text = "".join(f"{package.name}=={package.version}\n" for package in plan.torch)
            requirements = written(scratch / "torch.txt", text)
            command = plan.installer.command(requirements, hashes=False, index=plan.torch_index)
            plan.installer.run(command, report, lock=lock, scratch=scratch)
        done, total = 0, len(plan.missing)
        for batch in plan.installer.batches(plan.missing):
            report.step(f"installing packages {done + 1} to {done + len(batch)} of {total} ({plan.lock.path.name})")
            requirements = written(scratch / "lock.txt", render(batch))
            command = plan.installer.command(requirements, hashes=True)
            plan.installer.run(command, report, lock=lock, scratch=scratch)
            done += len(batch)
        if wheel:
            report.step(f"installing {PACKAGE}=={wheel.version}")
            requirement = f"{PACKAGE}=={wheel.version} --hash=sha256:{wheel.sha256}"
            install_engine(plan.installer, wheel.path, requirement, scratch, report, lock)
    report.step("verifying")
    return _checked(plan, wheel)


def _wheel(plan: Plan, report: Report) -> PatchedWheel:
    """Return the wheel of the plan, checked, built first when there is none."""
    wheel = plan.wheel
    if wheel is None:
        # The builder pulls in the SBOM library: only for those who build.
        from sglang_bw.fork.build import build

        report.step(f"building {PACKAGE} {plan.version}")
        environment = plan.environment
        built = build(
            plan.root,
            plan.series.base,
            python=environment.python,
            machine=environment.machine,
            wheel=None,
            local=plan.local.folder if plan.local else None,
            out=plan.out,
            progress=report.detail,
        )
        return PatchedWheel.open(built.path)
    wheel.validate()
    return wheel


def _checked(plan: Plan, wheel: PatchedWheel | None) -> Installation:
    environment = Environment.probe(plan.environment.executable)
    found = inspect_environment(environment)
    missing, torch = missing_packages(environment, plan.lock, plan.torch_index)
    if missing or torch:
        names = ", ".join(package.name for package in (*missing, *torch))
        raise InstallError(
            f"the installer was content, but these packages are not as locked: {names}",
            hint="a setting such as PIP_TARGET or a constraint may lead the installer elsewhere; see `pip config list`",
        )
    if wheel and found.state is State.INTACT and found.digest != wheel.digest:
        raise InstallError(f"another {PACKAGE} {found.version} than {wheel.path.name} was installed")
    return found
