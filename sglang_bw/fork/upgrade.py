"""From one engine to another in an environment: what changes, how to return, and then the install.

The install itself is :mod:`sglang_bw.fork.install`, with its checks, locks and order: dependencies first, the engine
last. Here is what must be known before it, and what to say when it fails.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from sglang_bw.errors import BwError, LocalPatchesLostError, NotInstalledError, UnknownBaseError
from sglang_bw.fork.changes import PatchChanges, compare
from sglang_bw.fork.environment import Environment
from sglang_bw.fork.install import install
from sglang_bw.fork.install_plan import Plan, Request, default_out, plan_install
from sglang_bw.fork.installers import Report
from sglang_bw.fork.keep import keep, kept_path
from sglang_bw.fork.locks import Lock
from sglang_bw.fork.mail import read_patch
from sglang_bw.fork.record import PatchRecord
from sglang_bw.fork.series import Series, bases, newest_base, root_option
from sglang_bw.fork.verify import PACKAGE, Installation, State, inspect_environment
from sglang_bw.fork.wheelhouse import find_wheel


@dataclass(frozen=True)
class Return:
    """How to get the engine back that is there now.

    ``commands`` in order; ``keep``: its wheel has to be kept first, since nothing here makes it again;
    ``note``: what the commands do not bring back.
    """

    commands: tuple[str, ...]
    keep: bool = False
    note: str = ""


@dataclass(frozen=True)
class UpgradePlan:
    """What an upgrade (or a downgrade) will do, found out without changing or downloading anything."""

    before: Installation
    install: Plan
    patches: PatchChanges
    local: PatchChanges
    back: Return

    @property
    def word(self) -> str:
        """``upgrade``, ``downgrade``, ``change`` between two of one base, or ``nothing to do``."""
        if self.install.nothing_to_do:
            return "nothing to do"
        old, new = Version(self.before.base), Version(self.install.series.base)
        return "change" if old == new else "upgrade" if old < new else "downgrade"


def plan_upgrade(root: Path, request: Request, to: str | None, *, drop_local: bool = False) -> UpgradePlan:
    """Find out what an upgrade takes and changes.

    :param root: the directory with one folder per base.
    :param to: a base (``0.5.23``) or a full version (``0.5.23+bw.1``); the newest base with a series by default.
    :param drop_local: the local patches of the installed engine may go.
    :raises NotInstalledError: there is no engine to start from.
    :raises UnknownBaseError: nothing here makes that version.
    :raises LocalPatchesLostError: local patches would go and nobody said so.
    :raises RefusedError: with every reason why the environment must not be changed.
    """
    environment = Environment.probe(request.python)
    before = inspect_environment(environment)
    if before.state is State.ABSENT:
        raise NotInstalledError(
            f"no {PACKAGE} is installed for {environment.executable}: there is nothing to upgrade",
            hint=f"`{before.cure}` installs the patched engine",
        )
    request = _aimed(root, request, to, environment)
    device = request.device if request.device != "auto" else _device(root, before, environment)
    plan = plan_install(root, replace(request, device=device))
    ours, own = _coming(plan)
    if before.local and not own and not drop_local and not plan.nothing_to_do:
        raise _would_lose(before, plan)
    return UpgradePlan(
        before=before,
        install=plan,
        patches=compare(before.patches, ours),
        local=compare(before.local.patches if before.local else (), own),
        back=_back(root, before, environment, plan),
    )


def upgrade(plan: UpgradePlan, report: Report) -> Installation:
    """Carry a plan out and return what ``verify`` then finds.

    :raises BwError: what went wrong, with the state that was left and the way back in its hint.
    """
    if plan.back.keep and not plan.install.nothing_to_do:
        report.step(f"keeping {PACKAGE} {plan.before.version} for the way back")
        keep(plan.before)
    try:
        found = install(plan.install, report)
        error = found.error()
    except BwError as failed:
        error = failed
    if error:
        error.hint = "\n".join(filter(None, [error.hint, _left(plan)]))
        raise error
    return found


def _aimed(root: Path, request: Request, to: str | None, environment: Environment) -> Request:
    """Return the request with base and, for a full version that the series does not make, the wheel that is it."""
    if to is None:
        return request if request.wheel else replace(request, base=newest_base(root))
    try:
        wanted = Version(to)
    except InvalidVersion:
        raise UnknownBaseError(
            f"{to!r} is not a version", hint=f"bases with a series: {', '.join(bases(root))}"
        ) from None
    base = Series.load(root, wanted.public).base
    request = replace(request, base=base)
    if wanted.local is None or request.wheel or request.local:
        return request
    made = Series.load(root, base).pins.full_version
    if wanted == Version(made):
        return request
    wheel = find_wheel(request.find_links or default_out(), environment, base, version=to)
    if wheel is None:
        raise UnknownBaseError(
            f"nothing here makes {PACKAGE} {to}: the series of {base} makes {made}",
            hint=f"`sglang-bw upgrade {base}` takes that one; a wheel of {to} is named with --wheel FILE",
        )
    return replace(request, wheel=wheel.path, find_links=None)


def _device(root: Path, before: Installation, environment: Environment) -> str:
    """Return the device whose lock the environment has now, so that an upgrade does not change it."""
    installed = environment.installed
    for device in ("cuda", "cpu"):
        try:
            lock = Lock.load(root, before.base, device, environment.python, environment.machine)
        except BwError:
            continue
        if all(package.name in installed for package in lock.without_cuda()):
            return device
    return "auto"


def _coming(plan: Plan) -> tuple[tuple[PatchRecord, ...], tuple[PatchRecord, ...]]:
    """Return the patches that the engine will have: those of the series, and local ones."""
    if plan.wheel:
        return plan.wheel.patches, plan.wheel.local.patches if plan.wheel.local else ()
    ours = tuple(PatchRecord.of(read_patch(path)) for path in plan.series.files)
    return ours, tuple(map(PatchRecord.of, plan.local.patches)) if plan.local else ()


def _would_lose(before: Installation, plan: Plan) -> LocalPatchesLostError:
    assert before.local is not None
    names = "".join(f"\n  {patch.file}: {patch.subject}" for patch in before.local.patches)
    base = plan.series.base
    moved = f"`sglang-bw rebase {base} --local DIR` moves them to {base}, then " if base != before.base else ""
    return LocalPatchesLostError(
        f"{PACKAGE} {before.version} has local patches, and {plan.version} has none:{names}",
        hint=f"{moved}name their folder with --local DIR; --drop-local lets them go",
    )


def _back(root: Path, before: Installation, environment: Environment, plan: Plan) -> Return:
    """Return the way back, exact where there is one."""
    options = _options(root, environment, plan)
    known = before.base in bases(root)
    pip = f"python -m pip --python {shlex.quote(str(environment.executable))} install"
    if before.sources and before.state is State.STOCK:
        return Return((before.sources.back(environment.executable),), note="with the dependencies that pip chooses")
    if before.state is State.STOCK:
        # Upstream's own wheel alone: `install --rollback` takes no index.
        alone = _options(root, environment, plan, torch=False)
        rollback = f"sglang-bw install --rollback --base {before.base}{alone}"
        if not known:
            return Return((f'{pip} "{PACKAGE}==={before.version}"',))
        first = () if before.base == plan.series.base else (f"sglang-bw upgrade {before.base}{options}",)
        return Return((*first, rollback), note="dependencies become those of the lock" if first else "")
    lost = "" if before.state is State.INTACT else "what was edited or is missing there does not come back"
    if known and (by := _made_here(root, before, environment, plan)):
        return Return((f"sglang-bw upgrade {by}{options}",), note=lost)
    if lost:
        return Return((), note=f"{before.version} is {before.state}, and nothing here makes it: it cannot come back")
    wheel = shlex.quote(str(kept_path(before)))
    if known:
        drop = " --drop-local" if plan.local else ""
        return Return((f"sglang-bw upgrade {before.base} --wheel {wheel}{drop}{options}",), keep=True)
    note = f"there is no lock of {before.base} here: the dependencies stay those of {plan.series.base}"
    return Return((f"{pip} --no-deps --force-reinstall {wheel}",), keep=True, note=note)


def _options(root: Path, environment: Environment, plan: Plan, *, torch: bool = True) -> str:
    """Return the options of this run that a command for the way back needs too."""
    options = [f"--device {plan.device}"]
    if str(environment.executable) != sys.executable:
        options.append(f"--python {shlex.quote(str(environment.executable))}")
    if plan.torch_index and torch:
        options.append(f"--torch-index {shlex.quote(plan.torch_index)}")
    if plan.installer.name != "pip":
        options.append(f"--installer {plan.installer.name}")
    return "".join(f" {option}" for option in options) + root_option(root)


def _made_here(root: Path, before: Installation, environment: Environment, plan: Plan) -> str:
    """Return what to ask ``upgrade`` for to get the same engine again, empty when nothing here makes it."""
    if before.local:
        return ""
    pins = Series.load(root, before.base).pins
    if (pins.full_version, pins.tree) == (before.version, before.tree):
        return before.version
    wheel = find_wheel(plan.out, environment, before.base, version=before.version)
    if wheel and wheel.digest == before.digest:
        return f"{before.base} --wheel {shlex.quote(str(wheel.path.resolve()))}"
    return ""


def _left(plan: UpgradePlan) -> str:
    """Say what a failed upgrade left, and how to go on or back."""
    environment = Environment.probe(plan.install.environment.executable)
    found = inspect_environment(environment)
    before = plan.install.environment.installed
    changed = [name for name, version in environment.installed.items() if before.get(name) != version]
    others = len([name for name in changed if name != PACKAGE])
    now = f"{PACKAGE} {found.version} ({found.state})" if found.version else f"no {PACKAGE}"
    lines = [f"there is now {now}, and {others} other packages are changed; the same command goes on where it stopped"]
    if plan.back.commands:
        lines += ["back again:", *(f"  {line}" for line in plan.back.commands)]
    return "\n".join(lines)
