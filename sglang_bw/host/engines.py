"""Findings about the engine: patched, stock, shadowed, installed from sources; and its Python."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_bw.errors import BwError
from sglang_bw.fork.environment import Environment, dist_infos, name_and_version
from sglang_bw.fork.series import Series, bases, newest_base, patches_root
from sglang_bw.fork.sources import Sources, sources_of
from sglang_bw.fork.verify import PACKAGE, Installation, State
from sglang_bw.host.finding import Finding, Group

_GROUP = Group("Engine")
_OLDEST, _NEWEST = (3, 11), (3, 13)


def findings(environment: Environment, installed: Installation) -> Iterator[Finding]:
    """Yield what there is to say about the engine of an environment."""
    yield _python(environment)
    sources = installed_from(environment)
    error = installed.error()
    if sources and installed.state in (State.STOCK, State.ABSENT):
        how = "editable" if sources.editable else "built from sources"
        yield _GROUP.fail(
            "engine",
            f"{PACKAGE} {installed.version}, {how}: {sources.folder} (as in the official SGLang images)",
            costs="without the series; `sglang-bw serve` refuses it",
            fix=patched_in(environment, installed.version),
        )
    elif error is None:
        yield _GROUP.ok(
            "engine",
            f"{PACKAGE} {installed.version}: patched, intact, {len(installed.patches)} patches in {installed.location}",
        )
    else:
        costs = {State.ABSENT: "nothing can be served", State.STOCK: "without the series; `sglang-bw serve` refuses it"}
        yield _GROUP.fail(
            "engine",
            error.message,
            costs=costs.get(installed.state, "what runs is not what was built and tested"),
            fix=error.hint,
        )
    if installed.shadowed_by and installed.state in (State.STOCK, State.EDITED, State.MISSING):
        yield _GROUP.fail(
            "shadow",
            f"Python imports {installed.shadowed_by} in place of the installed {PACKAGE}",
            costs="another engine runs than the one that is installed",
            fix="move that folder away, start from another directory, or clear PYTHONPATH",
        )


def _python(environment: Environment) -> Finding:
    version = ".".join(map(str, environment.version))
    says = f"{environment.implementation} {version} at {environment.executable}"
    if not _OLDEST <= environment.version[:2] <= _NEWEST or environment.implementation != "cpython":
        return _GROUP.fail(
            "python",
            says,
            costs="no wheel of the engine fits it",
            fix="CPython 3.11, 3.12 or 3.13, named with --python",
        )
    if environment.free_threaded:
        return _GROUP.fail("python", f"{says}, free-threaded", costs="no wheel fits it", fix="an ordinary CPython")
    return _GROUP.ok("python", says)


def installed_from(environment: Environment) -> Sources | None:
    """Return the sources that an engine was installed from (PEP 610), ``None`` for one that came as a wheel."""
    for info in dist_infos(environment.sys_path):
        if name_and_version(info)[0] == PACKAGE:
            return sources_of(info)
    return None


def patched_in(environment: Environment, version: str) -> str:
    """Return the line that puts the patched wheel in place of sources; dependencies stay where the release is the same.

    The full version is asked for: pip takes an editable install of the same release for good enough otherwise.
    """
    try:
        root = patches_root()
        release = version.partition("+")[0]
        base = release if release in bases(root) else newest_base(root)
        wanted = Series.load(root, base).pins.full_version
    except BwError:
        return f"`sglang-bw install --python {environment.executable}`"
    options = " --break-system-packages" if environment.externally_managed else ""
    options += " --no-deps" if base == release else ""
    return (
        f"`sglang-bw build --base {base} && {environment.executable} -m pip install{options} --find-links dist"
        f' "{PACKAGE}=={wanted}"`'
    )
