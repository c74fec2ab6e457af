"""A Python environment as the installer and ``verify`` need to know it, asked from its own interpreter.

Nothing is imported from the environment: a few lines of standard library run in its interpreter and print JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from sglang_bw.errors import RefusedError

# Runs on any Python from 3.4 on, so that a wrong one can be named instead of failing.
_PROBE = """
import json, platform, sys, sysconfig
print("")
print(json.dumps({
    "executable": sys.executable, "implementation": sys.implementation.name,
    "version": list(sys.version_info[:3]), "system": sys.platform, "machine": platform.machine(),
    "libc": list(platform.libc_ver()), "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    "prefix": sys.prefix, "base_prefix": getattr(sys, "base_prefix", sys.prefix),
    "purelib": sysconfig.get_path("purelib"), "stdlib": sysconfig.get_path("stdlib"), "sys_path": sys.path,
}))
"""

# Settings that belong to the caller's interpreter, not to the environment asked about.
_FOREIGN_SETTINGS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "PYTHONSTARTUP", "__PYVENV_LAUNCHER__")


def clean_environ() -> dict[str, str]:
    """Return the process environment without what would put other packages in front of an environment's own."""
    return {key: value for key, value in os.environ.items() if key not in _FOREIGN_SETTINGS}


@dataclass(frozen=True)
class Environment:
    """One interpreter and the place where its packages live.

    ``sys_path`` is the import path without ``PYTHONPATH`` and without the working directory; ``machine`` is as
    wheel tags name it; ``libc`` is name and version (``("glibc", "2.36")``).
    """

    executable: Path
    implementation: str
    version: tuple[int, int, int]
    system: str
    machine: str
    libc: tuple[str, str]
    free_threaded: bool
    prefix: Path
    base_prefix: Path
    purelib: Path
    stdlib: Path
    sys_path: tuple[str, ...]

    @classmethod
    def probe(cls, python: Path | None = None) -> Environment:
        """Ask an interpreter, this one by default.

        :param python: an interpreter, or the folder of a virtual environment.
        :raises RefusedError: no such interpreter, or it cannot run.
        """
        if python and python.is_dir():
            python = python / "bin" / "python"
        # Made absolute, links kept: a virtual environment's interpreter is a link, and resolving it leaves it.
        command = str(python.absolute() if python else sys.executable)
        hint = "name a Python interpreter with --python PATH, for example .venv/bin/python"
        try:
            done = subprocess.run(
                [command, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=False, env=clean_environ()
            )
            return cls._from_facts(json.loads(done.stdout.strip().splitlines()[-1]))
        except OSError as error:
            raise RefusedError(f"cannot run {command}: {error.strerror}", hint=hint) from None
        except subprocess.TimeoutExpired:
            raise RefusedError(f"{command} did not answer within 60 s", hint=hint) from None
        except (IndexError, KeyError, ValueError, TypeError):
            said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
            raise RefusedError(f"{command} is no usable Python: it said {said[0][:120]!r}", hint=hint) from None

    @classmethod
    def _from_facts(cls, fields: dict[str, Any]) -> Environment:
        return cls(
            executable=Path(fields["executable"]),
            implementation=fields["implementation"],
            version=(fields["version"][0], fields["version"][1], fields["version"][2]),
            system=fields["system"],
            machine={"amd64": "x86_64", "arm64": "aarch64"}.get(fields["machine"].lower(), fields["machine"]),
            libc=(fields["libc"][0], fields["libc"][1]),
            free_threaded=fields["free_threaded"],
            prefix=Path(fields["prefix"]),
            base_prefix=Path(fields["base_prefix"]),
            purelib=Path(fields["purelib"]),
            stdlib=Path(fields["stdlib"]),
            sys_path=tuple(entry for entry in fields["sys_path"] if entry),
        )

    @property
    def python(self) -> str:
        """Major and minor version, for example ``3.12``."""
        return f"{self.version[0]}.{self.version[1]}"

    @property
    def is_virtual(self) -> bool:
        """Whether this is a virtual environment (venv, virtualenv, uv)."""
        return self.prefix != self.base_prefix

    @property
    def externally_managed(self) -> bool:
        """Whether PEP 668 forbids installers to touch it."""
        return not self.is_virtual and (self.stdlib / "EXTERNALLY-MANAGED").is_file()

    @cached_property
    def installed(self) -> dict[str, str]:
        """Canonical name to version of every whole distribution on the path; the first on the path counts.

        A ``.dist-info`` without RECORD is what a killed install leaves: it counts as not there.
        """
        found: dict[str, str] = {}
        for info in dist_infos(self.sys_path):
            if (info / "RECORD").is_file():
                found.setdefault(*name_and_version(info))
        return found

    def broken(self) -> list[Path]:
        """Return the ``.dist-info`` folders that a killed install left without RECORD."""
        return [info for info in dist_infos((str(self.purelib),)) if not (info / "RECORD").is_file()]


def dist_infos(path: tuple[str, ...]) -> Iterator[Path]:
    """Yield every ``.dist-info`` folder on ``path``, in path order; pip's ``~name`` leftovers do not count."""
    for entry in dict.fromkeys(path):
        folder = Path(entry)
        if folder.is_dir():
            yield from (info for info in sorted(folder.glob("*.dist-info")) if not info.name.startswith("~"))


def name_and_version(info: Path) -> tuple[str, str]:
    """Return canonical name and version of a ``.dist-info`` folder, by its own name."""
    name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
    return canonicalize_name(name), version


def owners(package: str, path: tuple[str, ...]) -> dict[str, Path]:
    """Return which distributions hold files below the import package ``package``: canonical name to its RECORD."""
    found: dict[str, Path] = {}
    row = re.compile(rf'^"?{re.escape(package)}/', re.MULTILINE)
    for info in dist_infos(path):
        record = info / "RECORD"
        if record.is_file() and row.search(record.read_text(encoding="utf-8", errors="replace")):
            found.setdefault(name_and_version(info)[0], record)
    return found
