"""What engine is installed, and whether its bytes are the recorded ones; without importing it.

Two records are compared with the disk: ``sglang/_bw.json`` (every file the series touched) and the
distribution's own RECORD (every file). Both are read, nothing of the engine runs.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import InvalidVersion, Version
from pydantic import ValidationError

from sglang_bw.errors import BwError, EditedEngineError, NotInstalledError, StockEngineError
from sglang_bw.fork.cure import install_command, repair
from sglang_bw.fork.environment import Environment, dist_infos, name_and_version, owners
from sglang_bw.fork.record import RECORD_PATH, BwRecord, LocalRecord, PatchRecord, content_digest
from sglang_bw.fork.sources import Sources, sources_of

PACKAGE = "sglang"


class State(StrEnum):
    """What the installed engine is."""

    INTACT = "intact"  # every file is the recorded one
    EDITED = "edited"  # files differ from the record
    MISSING = "missing"  # files of the record are gone, none differs
    STOCK = "stock"  # upstream's, without a record
    ABSENT = "absent"  # no distribution of that name


class Problem(NamedTuple):
    """One deviation from the record.

    ``kind``: ``edited``, ``missing``, ``undeleted`` (a file the series deletes is there), ``record`` (a record
    cannot be read), ``duplicate`` (a second distribution of the name). ``path``: below the location.
    """

    kind: str
    path: str


@dataclass(frozen=True)
class Installation:
    """The engine of one environment.

    ``patches`` are those of the series, ``local`` the user's own on top of it;
    ``location`` is the folder that holds ``sglang/``, or the tree that was asked about and holds none;
    ``shadowed_by`` is another ``sglang`` that Python would import instead; ``added`` are files
    below ``sglang/`` that no record knows (allowed: tuned kernel configurations go there); ``owners`` are other
    distributions that hold files below ``sglang/``; ``digest`` is the content digest of the RECORD, which says what
    was installed, not what the disk holds now; ``sources``: it came from sources, not as a wheel.
    """

    state: State
    python: str = ""
    version: str = ""
    base: str = ""
    series: str = ""
    tree: str = ""
    location: Path | None = None
    patches: tuple[PatchRecord, ...] = ()
    local: LocalRecord | None = None
    problems: tuple[Problem, ...] = ()
    shadowed_by: Path | None = None
    added: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    digest: str = ""
    sources: Sources | None = None

    @property
    def intact(self) -> bool:
        """Whether Python imports the patched engine, byte for byte."""
        return self.state is State.INTACT and self.shadowed_by is None

    def error(self) -> BwError | None:
        """Return what keeps this from being the intact patched engine, with the line that cures it."""
        cure = self.cure
        if self.state is State.ABSENT and self.location:
            return NotInstalledError(
                f"{self.location} holds no unpacked engine ({PACKAGE}/ with its .dist-info)",
                hint=f"check the path; `python -m zipfile -e WHEEL {self.location}` unpacks a built wheel there",
            )
        if self.state is State.ABSENT and self.shadowed_by is None:
            return NotInstalledError(f"no {PACKAGE} is installed for {self.python}", hint=f"`{cure}` installs it")
        if self.state is State.ABSENT:
            return NotInstalledError(
                f"no {PACKAGE} is installed for {self.python}; Python would import {self.shadowed_by}, which is no"
                " installed distribution",
                hint=f"`{cure}` installs the engine; move that folder away or clear PYTHONPATH",
            )
        if self.state is State.STOCK:
            return StockEngineError(
                f"the installed {PACKAGE} {self.version} is upstream's, without the series",
                hint=f"`{cure}` replaces it with the patched one",
            )
        if self.state in (State.EDITED, State.MISSING):
            return EditedEngineError(self._damage(), hint=repair(self.python, self.version, self.base))
        if self.shadowed_by is not None:
            return EditedEngineError(
                f"{PACKAGE} {self.version} is intact, but Python imports {self.shadowed_by} instead",
                hint="move that folder away, start from another directory, or clear PYTHONPATH",
            )
        return None

    @property
    def cure(self) -> str:
        """The one command that puts the newest patched engine there."""
        return install_command(self.python)

    def _damage(self) -> str:
        shown = ", ".join(f"{path} ({kind})" for kind, path in self.problems[:3])
        more = f" and {len(self.problems) - 3} more" if len(self.problems) > 3 else ""
        also = f"; {', '.join(self.owners)} holds files of {PACKAGE}/ too" if self.owners else ""
        return f"the installed {PACKAGE} {self.version} is not what was built: {shown}{more}{also}"

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "state": self.state.value,
            "intact": self.intact,
            "python": self.python,
            "version": self.version,
            "base": self.base,
            "series": self.series,
            "tree": self.tree,
            "location": str(self.location) if self.location else None,
            "patches": [patch.model_dump() for patch in self.patches],
            "local_patches": [patch.model_dump() for patch in self.local.patches] if self.local else [],
            "problems": [problem._asdict() for problem in self.problems],
            "shadowed_by": str(self.shadowed_by) if self.shadowed_by else None,
            "added": list(self.added),
            "owners": list(self.owners),
            "content_digest": self.digest,
            "sources": str(self.sources) if self.sources else None,
        }


def inspect(python: Path | None = None, *, tree: Path | None = None, safe_path: bool = False) -> Installation:
    """Compare the engine of an environment with its records.

    :param python: the environment's interpreter, this one by default.
    :param tree: look at this unpacked wheel instead: a folder with ``sglang/`` and its ``.dist-info``.
    :param safe_path: the engine is run with ``python -P``: the working directory does not count.
    :raises RefusedError: there is no such interpreter.
    """
    if tree is not None:
        tree = tree.resolve()
        if not os.path.isdir(tree):  # noqa: PTH112  (an over-long name is no directory, and no error)
            return Installation(State.ABSENT, python=str(python or ""), location=tree)
        return replace(_inspect_path((str(tree),), ()), python=str(python or ""), location=tree)
    environment = Environment.probe(python)
    return inspect_environment(environment, safe_path=safe_path)


def inspect_environment(environment: Environment, *, safe_path: bool = False) -> Installation:
    """Compare the engine of a probed environment with its records; see :func:`inspect`."""
    found = _inspect_path(environment.sys_path, _in_front(safe_path=safe_path))
    return replace(found, python=str(environment.executable))


def _in_front(*, safe_path: bool) -> tuple[str, ...]:
    """Return what Python searches before an environment's own path: the working directory, then PYTHONPATH.

    The working directory counts because ``python -m`` puts it first; the safe-path setting turns that off.
    """
    entries = [] if safe_path or os.environ.get("PYTHONSAFEPATH") else [str(Path.cwd())]
    entries += [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return tuple(entries)


def _inspect_path(path: tuple[str, ...], in_front: tuple[str, ...]) -> Installation:
    infos = [info for info in dist_infos(path) if name_and_version(info)[0] == PACKAGE]
    if not infos:
        return Installation(State.ABSENT, shadowed_by=_imported(in_front + path))
    info = infos[0]
    found = _examine(info)
    same_place = [other.name for other in infos[1:] if other.parent == info.parent]
    if same_place:
        duplicates = tuple(Problem("duplicate", name) for name in same_place)
        state = found.state if found.state is State.STOCK else State.EDITED
        found = replace(found, state=state, problems=found.problems + duplicates)
    before = path[: path.index(str(info.parent))]
    shadow = _imported(tuple(e for e in in_front + before if Path(e).resolve() != info.parent.resolve()))
    if found.problems:
        others = sorted(set(owners(PACKAGE, path)) - {PACKAGE})
        found = replace(found, owners=tuple(others))
    return replace(found, shadowed_by=shadow)


def _imported(path: tuple[str, ...]) -> Path | None:
    """Return the first ``sglang`` that would be imported from ``path``.

    A folder without ``__init__.py`` does not count: a regular package further down the path wins over it.
    """
    for entry in path:
        for candidate in (Path(entry, PACKAGE, "__init__.py"), Path(entry, f"{PACKAGE}.py")):
            if candidate.is_file():
                return candidate.parent if candidate.name == "__init__.py" else candidate
    return None


def _examine(info: Path) -> Installation:
    """Compare one distribution with its records."""
    location = info.parent
    version = name_and_version(info)[1]
    try:
        rows = (info / "RECORD").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        rows = []
    expected = dict(_recorded(rows))
    problems = [] if rows else [Problem("missing", f"{info.name}/RECORD")]
    record: BwRecord | None = None
    patched = RECORD_PATH in expected or _is_patched_version(version)
    if patched:
        try:
            record = BwRecord.model_validate_json((location / RECORD_PATH).read_bytes())
            expected.update({path: f"sha256:{digest}" for path, digest in record.files.items()})
        except FileNotFoundError:
            expected.setdefault(RECORD_PATH, "sha256:")
        except (OSError, ValidationError):
            problems.append(Problem("record", RECORD_PATH))
    problems += _differences(location, expected)
    if record:
        problems += [Problem("undeleted", path) for path in record.removed if (location / path).exists()]
    return Installation(
        state=_state(patched, problems),
        version=version,
        base=record.base if record else _public(version),
        series=record.series if record else "",
        tree=record.tree if record else "",
        location=location,
        patches=record.patches if record else (),
        local=record.local if record else None,
        problems=tuple(sorted(set(problems))),
        added=tuple(_added(location, expected)),
        digest=content_digest(rows) if rows else "",
        sources=sources_of(info),
    )


def _state(patched: bool, problems: list[Problem]) -> State:
    if not patched:
        return State.STOCK
    if not problems:
        return State.INTACT
    return State.MISSING if all(problem.kind == "missing" for problem in problems) else State.EDITED


def _public(version: str) -> str:
    return version.partition("+")[0]


def _is_patched_version(version: str) -> bool:
    try:
        return (Version(version).local or "").startswith("bw.")
    except InvalidVersion:
        return False


def _recorded(rows: list[str]) -> Iterator[tuple[str, str]]:
    """Yield path and ``sha256:<hex>`` of every row that has a digest; installers give bytecode none."""
    for row in csv.reader(rows):
        if len(row) == 3 and row[1].startswith("sha256="):
            encoded = row[1].removeprefix("sha256=")
            try:
                yield row[0], "sha256:" + base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
            except ValueError:
                yield row[0], "sha256:unreadable"


def _differences(location: Path, expected: dict[str, str]) -> Iterator[Problem]:
    for path, digest in expected.items():
        try:
            with (location / path).open("rb") as file:
                found = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            yield Problem("missing", path)
        except OSError:
            yield Problem("edited", path)
        else:
            if found != digest:
                yield Problem("edited", path)


def _added(location: Path, expected: dict[str, str]) -> Iterator[str]:
    for folder, folders, files in os.walk(location / PACKAGE):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            path = Path(folder, name).relative_to(location).as_posix()
            if path not in expected and not path.endswith(".pyc"):
                yield path
