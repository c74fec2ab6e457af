"""Choosing the wheel of every locked package for another machine, and fetching it, both with the user's own pip."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name, parse_wheel_filename

from sglang_bw.errors import BundleError, DownloadError, HashMismatchError
from sglang_bw.fork.installers import Installer, Report, written
from sglang_bw.fork.locks import Locked, render

# The locks are made for it, see `scripts/lock`.
NEWEST_GLIBC = 34
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
# Of packages in one question to pip, and of such questions at the same time.
_ASKED = 24
_AT_ONCE = 6
_PORTION = 48
_FETCH_BYTES = 300_000_000
_HEAD_SECONDS = 10.0


@dataclass(frozen=True)
class Chosen:
    """The one file of a locked package that goes into a bundle; ``size`` in bytes, 0 when the index did not tell."""

    name: str
    version: str
    url: str
    sha256: str
    size: int = 0

    @property
    def file(self) -> str:
        """Its file name."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])


@dataclass(frozen=True)
class Pip:
    """The user's pip, answering for another Python (``3.12``) and machine (``x86_64``).

    ``lock`` is a descriptor that its processes hold on to; ``scratch`` takes its temporary files.
    """

    python: str
    machine: str
    report: Report
    lock: int
    scratch: Path

    def inside(self, name: str) -> Pip:
        """Return the same pip with a scratch folder of its own below this one's."""
        folder = self.scratch / name
        folder.mkdir(exist_ok=True)
        return replace(self, scratch=folder)

    def run(self, verb: str, requirements: str, *options: str) -> None:
        """Run ``pip VERB`` over requirements with hashes, without dependencies, wheels only.

        :raises BwError: by what pip said.
        """
        path = written(self.scratch / "requirements.txt", requirements)
        # -P: a folder named pip in the working directory is not the pip that is meant.
        command = [sys.executable, "-P", "-m", "pip", verb, "--no-input", "--disable-pip-version-check"]
        command += ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--progress-bar", "raw"]
        command += ["--python-version", self.python, "--implementation", "cp"]
        command += [part for tag in platforms(self.machine) for part in ("--platform", tag)]
        command += [*options, "--requirement", str(path)]
        Installer("pip", Path(sys.executable)).run(command, self.report, lock=self.lock, scratch=self.scratch)


def platforms(machine: str) -> Iterator[str]:
    """Yield the platform tags of a Linux machine with the glibc of the locks, the newest first."""
    for minor in range(NEWEST_GLIBC, 4, -1):
        yield f"manylinux_2_{minor}_{machine}"
        if minor in _OLD_NAMES:
            yield f"{_OLD_NAMES[minor]}_{machine}"
    yield f"linux_{machine}"


def oldest_glibc(files: Iterable[str]) -> int:
    """Return the minor version of glibc 2 that wheels of these names need."""
    return max((min(map(_glibc, parse_wheel_filename(file)[3])) for file in files), default=0)


def _glibc(tag: object) -> int:
    platform = str(tag).rpartition("-")[2]
    if found := re.match(r"manylinux_2_(\d+)_", platform):
        return int(found[1])
    return next((minor for minor, name in _OLD_NAMES.items() if platform.startswith(name + "_")), 0)


def choose(packages: tuple[Locked, ...], pip: Pip) -> tuple[Chosen, ...]:
    """Ask the index which file of each package the machine takes; nothing large is fetched.

    :raises BundleError: packages without a wheel for it; the message names all of them.
    :raises BwError: the index cannot be asked.
    """
    batches = [packages[start : start + _ASKED] for start in range(0, len(packages), _ASKED)]
    pip.report.step(f"choosing the wheels of {len(packages)} packages")
    answers: list[tuple[list[Chosen], list[str]]] = []
    # An index answers one question a package, and pip asks one after the other.
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for answer in pool.map(lambda pair: _ask(pair[1], pip.inside(str(pair[0]))), enumerate(batches)):
            answers.append(answer)
            pip.report.step(f"chose {sum(len(chosen) for chosen, _ in answers)} of {len(packages)}")
    if without := [name for _, names in answers for name in names]:
        raise BundleError(
            f"no wheel for Python {pip.python} on {pip.machine}: {', '.join(without)}",
            hint="these are sdists or for other machines; leave them out with --without NAME if nothing needs them",
        )
    return tuple(wheel for chosen, _ in answers for wheel in chosen)


def _ask(packages: tuple[Locked, ...], pip: Pip) -> tuple[list[Chosen], list[str]]:
    """Return the files that pip chooses, and the packages that it finds none for."""
    batch, without = list(packages), list[str]()
    while batch:
        try:
            return _choices(batch, pip), without
        except DownloadError as error:
            # pip names one package at a time; all of them are worth knowing before anybody changes anything.
            missing = _named(error, batch)
            if missing is None:
                raise
            without.append(f"{missing.name}=={missing.version}")
            batch.remove(missing)
    return [], without


def _named(error: DownloadError, batch: list[Locked]) -> Locked | None:
    found = re.search(r"(?:No matching distribution found for|satisfies the requirement) (\S+?)==", error.message)
    return next((p for p in batch if found and p.name == canonicalize_name(found[1])), None)


def _choices(batch: list[Locked], pip: Pip) -> list[Chosen]:
    answer = pip.scratch / "report.json"
    nowhere = str(pip.scratch / "nowhere")
    pip.run("install", render(batch), "--dry-run", "--ignore-installed", "--target", nowhere, "--report", str(answer))
    found = []
    for item in json.loads(answer.read_text(encoding="utf-8"))["install"]:
        download, about = item["download_info"], item["metadata"]
        digest = download["archive_info"]["hashes"]["sha256"]
        found.append(Chosen(canonicalize_name(about["name"]), about["version"], download["url"], digest))
    return found


def with_sizes(chosen: tuple[Chosen, ...]) -> tuple[Chosen, ...]:
    """Return them with the sizes that their index tells for the asking; what it does not tell stays 0."""
    with ThreadPoolExecutor(8) as pool:
        sizes = pool.map(_size, (wheel.url for wheel in chosen))
        return tuple(replace(wheel, size=size) for wheel, size in zip(chosen, sizes, strict=True))


def _size(url: str) -> int:
    import httpx

    try:
        if url.startswith("file:"):
            return Path(unquote(urlsplit(url).path)).stat().st_size
        answer = httpx.head(url, timeout=_HEAD_SECONDS, follow_redirects=True)
        return int(answer.headers.get("content-length", 0)) if answer.is_success else 0
    except (OSError, ValueError, httpx.HTTPError):
        return 0


def fetch(chosen: tuple[Chosen, ...], folder: Path, pip: Pip) -> None:
    """Fetch what is not in ``folder`` yet, in portions, so that a kill loses one portion at most.

    :raises HashMismatchError: the index gave another file.
    :raises BwError: by what pip said.
    """
    missing = [wheel for wheel in chosen if not is_there(folder / wheel.file, wheel.sha256)]
    done, total = len(chosen) - len(missing), len(chosen)
    for batch in _portions(missing):
        size = sum(wheel.size for wheel in batch) / 1e6
        pip.report.step(
            f"fetching {batch[0].file if len(batch) == 1 else f'{len(batch)} wheels'}"
            f" ({size:.0f} MB; {done} of {total} are here)"
        )
        lines = "".join(f"{wheel.name} @ {wheel.url} --hash=sha256:{wheel.sha256}\n" for wheel in batch)
        pip.run("download", lines, "--dest", str(folder))
        for wheel in batch:
            if not is_there(folder / wheel.file, wheel.sha256):
                raise HashMismatchError(f"pip did not leave {wheel.file} as it is pinned in {folder}")
        done += len(batch)


def _portions(missing: list[Chosen]) -> Iterator[list[Chosen]]:
    portion: list[Chosen] = []
    for wheel in missing:
        if portion and (len(portion) == _PORTION or sum(w.size for w in portion) + wheel.size > _FETCH_BYTES):
            yield portion
            portion = []
        portion.append(wheel)
    if portion:
        yield portion


def is_there(path: Path, sha256: str) -> bool:
    """Tell whether a file is there, whole."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False
