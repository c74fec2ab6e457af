"""Running pip or uv: the command lines, their progress, and what their failures mean."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sglang_bw.errors import BwError, DownloadError, HashMismatchError, InstallError, OutputError, RefusedError
from sglang_bw.fork.ending import ended_with_us
from sglang_bw.fork.environment import Environment, clean_environ
from sglang_bw.fork.leftovers import clear_half_distributions, clear_half_engine, set_aside
from sglang_bw.fork.locks import Locked, find_uv

PACKAGE = "sglang"
KEPT_LINES = 60

# Downloads are unpacked from here: on the disk that was checked for space (/tmp is often small), and under a name that
# the next run knows, which clears what a killed one left.
SCRATCH = ".sglang-bw-install"

# pip installs nothing before everything is downloaded, and not every index lets it cache: after a kill in the
# middle, only the current batch is fetched again.
_PIP_BATCH = 24


class Report(Protocol):
    """Where progress goes."""

    def step(self, text: str) -> None:
        """Say that the next step begins."""

    def detail(self, text: str) -> None:
        """Say what the current step is doing right now."""


@dataclass(frozen=True)
class Installer:
    """pip or uv, working on another interpreter's environment.

    pip is always the tool's own, since environments made by uv have none; uv copies files, since a hard-linked file
    that somebody edits is edited in uv's cache too and comes back with every reinstall.
    """

    name: str
    python: Path
    program: str = ""

    @classmethod
    def named(cls, name: str, python: Path) -> Installer:
        """Return the installer ``pip`` or ``uv``.

        :raises RefusedError: uv was asked for and is not here.
        """
        if name == "pip":
            return cls("pip", python)
        program = find_uv()
        if program is None:
            raise RefusedError("uv is not on PATH", hint="install uv, or leave out --installer: pip does the same")
        return cls("uv", python, program)

    def batches(self, packages: tuple[Locked, ...]) -> list[tuple[Locked, ...]]:
        """Return the packages in the portions that are installed at once: uv keeps its downloads, pip may not."""
        size = _PIP_BATCH if self.name == "pip" else max(1, len(packages))
        return [packages[start : start + size] for start in range(0, len(packages), size)]

    def command(self, requirements: Path, *, hashes: bool, last: bool = False, offline: Path | None = None,
                index: str | None = None) -> list[str]:  # fmt: skip
        """Return the command that installs a requirements file, without dependencies, over whatever is there.

        :param hashes: every requirement has hashes and they are checked.
        :param last: the engine itself is installed: past uv's cache, and with bytecode.
        :param offline: take everything from this folder.
        :param index: take everything from this index.
        """
        if self.name == "uv":
            command = [
                self.program,
                "pip",
                "install",
                "--python",
                str(self.python),
                "--link-mode",
                "copy",
                "--reinstall",
            ]
            command += ["--no-cache", "--compile-bytecode"] if last else []
            command += ["--default-index", index] if index else []
        else:
            # -P: a folder named pip in the working directory is not pip.
            command = [sys.executable, "-P", "-m", "pip", "--python", str(self.python), "install", "--force-reinstall"]
            command += ["--no-input", "--disable-pip-version-check", "--no-warn-script-location", "--no-user"]
            command += ["--root-user-action", "ignore", "--progress-bar", "raw"]
            command += ["--index-url", index] if index else []
        command += ["--no-deps", "--only-binary", ":all:"]
        command += ["--no-index", "--find-links", str(offline)] if offline else []
        command += ["--require-hashes"] if hashes else []
        return [*command, "--requirement", str(requirements)]

    def run(self, command: list[str], report: Report, *, lock: int, scratch: Path) -> None:
        """Run an install command and pass its progress on.

        :param scratch: where the installer may put temporary files.
        :param lock: descriptor of the environment's lock; the child inherits it, so that the environment stays
            locked while the child writes, even when this process is killed.
        :raises BwError: by what the installer said, see :func:`failure`.
        """
        said: deque[str] = deque(maxlen=KEPT_LINES)
        environ = clean_environ() | {"PYTHONUNBUFFERED": "1", "TMPDIR": str(scratch)}
        try:
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
                errors="replace", env=environ, pass_fds=(lock,),
            )  # fmt: skip
        except OSError as error:
            raise InstallError(f"cannot run {command[0]}: {error.strerror}") from None
        assert child.stdout is not None
        with ended_with_us(child):
            try:
                for line in child.stdout:
                    _pass_on(line.strip(), said, report)
            finally:
                # Ctrl-C reaches the child as well; it puts back what it was replacing, and that is waited for.
                code = child.wait()
                child.stdout.close()
        if code:
            raise failure(self.name, code, list(said))


def _pass_on(line: str, said: deque[str], report: Report) -> None:
    progress = re.fullmatch(r"Progress (\d+) of (\d+)", line)
    if progress:
        done, total = (int(text) / 1e6 for text in progress.groups())
        report.detail(f"{said[-1] if said else 'downloading'}: {done:.0f} of {total:.0f} MB")
    elif line:
        said.append(line)
        report.detail(line)


_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|Temporary failure in name resolution|Name or service not known|"
    r"Connection (refused|reset|timed out)|Network is unreachable|(Read|Connect)Timeout|ProxyError|SSLError|"
    r"Max retries exceeded|dns error|error sending request|Failed to fetch|tcp connect error",
    re.IGNORECASE,
)
_NOT_FOUND = re.compile(r"No matching distribution found|Could not find a version|No solution found|was not found in")
_HASH = re.compile(r"DO NOT MATCH THE HASHES|Hash mismatch", re.IGNORECASE)
_DISK = re.compile(r"No space left on device|Disk quota exceeded|os error 28")
_RIGHTS = re.compile(r"Permission denied|Read-only file system|os error (13|30)\b")


def failure(installer: str, code: int, said: list[str]) -> BwError:
    """Return the error that an installer's last lines mean."""
    text = "\n".join(said)
    errors = [line for line in said if re.match(r"ERROR|error", line)] or said
    last = errors[-1] if errors else f"{installer} gave no reason"
    again = "the same command goes on where this one stopped"
    if _HASH.search(text):
        culprit = next((line for line in said if re.match(r"\S+==\S+|.*Hash mismatch", line)), last)
        return HashMismatchError(
            f"a download is not the file that is pinned: {culprit}",
            hint="a mirror may be broken or tampered with: check the index in your settings",
        )
    if _DISK.search(text):
        return OutputError(f"the disk is full: {last}", hint=f"free some space; {again}")
    if _RIGHTS.search(text):
        return OutputError(
            f"the environment cannot be written to: {last}", hint="check who owns it, or use another one"
        )
    if _NETWORK.search(text):
        return DownloadError(
            f"a package cannot be fetched: {last}", hint=f"check the network, proxy and index of {installer}; {again}"
        )
    if _NOT_FOUND.search(text):
        return DownloadError(
            f"the index does not have a pinned package: {last}",
            hint=f"check the index in the settings of {installer}: a mirror may lack it; {again}",
        )
    tail = "\n".join(f"  {line}" for line in said[-8:])
    return InstallError(f"{installer} failed with exit code {code}:\n{tail}", hint=again)


@contextmanager
def locked(folder: Path, report: Report) -> Iterator[int]:
    """Hold the environment whose packages lie in ``folder``; wait while another install holds it.

    The folder itself carries the lock, so no file is left behind.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report.step(f"waiting for another install into {folder}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def session(
    environment: Environment, names: set[str], report: Report, ours: Collection[str] = ()
) -> Iterator[tuple[int, Path]]:
    """Hold the environment's lock, clear what a killed install left of it, and give a scratch folder.

    :param names: the packages whose half distributions may be removed, beside the engine's.
    :param ours: paths that patches change or add: where no whole engine is there, nobody else would remove them.
    """
    with locked(environment.purelib, report) as lock:
        scratch = environment.purelib / SCRATCH
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            clear_half_distributions(environment, {PACKAGE, *names})
            clear_half_engine(environment, ours)
            scratch.mkdir()
            yield lock, scratch
        except OSError as error:
            raise OutputError(
                f"cannot write to {error.filename or environment.purelib}: {error.strerror}",
                hint="check space and rights there; the same command goes on where this one stopped",
            ) from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def tidy(environment: Environment, report: Report) -> None:
    """Clear what a killed install left where the engine itself is right and nothing is to be installed."""
    scratch = environment.purelib / SCRATCH
    # Who may not write there did not leave it, and needs nothing of it.
    if (scratch.exists() or any(set_aside(environment))) and os.access(environment.purelib, os.W_OK):
        with session(environment, set(), report):
            report.step("clearing what a killed install left")


def install_engine(
    installer: Installer, wheel: Path, requirement: str, scratch: Path, report: Report, lock: int
) -> None:
    """Install one wheel file by full version and hash, so that no path of this machine stays in the metadata."""
    offline = scratch / "wheel"
    offline.mkdir()
    shutil.copyfile(wheel, offline / wheel.name)
    requirements = written(scratch / "engine.txt", requirement + "\n")
    installer.run(
        installer.command(requirements, hashes=True, last=True, offline=offline), report, lock=lock, scratch=scratch
    )


def written(path: Path, text: str) -> Path:
    """Write a file and return its path."""
    path.write_text(text, encoding="utf-8")
    return path
