"""Upstream's releases, as the user's own package index lists them: versions, wheels, hashes, what was yanked.

The index, its mirrors, certificates and local folders are pip's settings; the pages are the simple repository API
(PEP 503 as HTML, PEP 691 as JSON).
"""

from __future__ import annotations

import ast
import hashlib
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import url2pathname

import httpx
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from sglang_bw.errors import DownloadError, ReleaseError
from sglang_bw.fork.environment import clean_environ

_DEFAULT_INDEX = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_TIMEOUT = 60.0


@dataclass(frozen=True)
class Listed:
    """One wheel as an index lists it. ``yanked`` is upstream's reason, or what stands for one; empty when it is not."""

    name: str
    sha256: str
    yanked: str = ""


@dataclass(frozen=True)
class Release:
    """One release and all of its wheels."""

    version: Version
    wheels: tuple[Listed, ...]

    @property
    def yanked(self) -> str:
        """Upstream's reason when all of it was yanked, else an empty string."""
        return self.wheels[0].yanked if all(wheel.yanked for wheel in self.wheels) else ""

    @property
    def pins(self) -> dict[str, str]:
        """Wheel file name -> sha256."""
        return {wheel.name: wheel.sha256 for wheel in self.wheels if not wheel.yanked or self.yanked}


def listed() -> list[Release]:
    """Return every release of SGLang that has wheels, oldest first.

    :raises DownloadError: no index answers; the cause is in the message.
    """
    settings = _pip_settings()
    found: dict[str, Listed] = {}
    for folder in settings.get("find-links", []):
        for wheel in _in_folder(folder):
            found.setdefault(wheel.name, wheel)
    if not _is_set(settings.get("no-index", [])):
        problems = []
        indexes = [*settings.get("index-url", [_DEFAULT_INDEX])[-1:], *settings.get("extra-index-url", [])]
        for index in indexes:
            try:
                page = _page(index, settings)
            except (httpx.HTTPError, OSError, ValueError) as error:
                problems.append(f"{_without_secret(index)}: {error}")
                continue
            for wheel in page:
                found.setdefault(wheel.name, wheel)
        if len(problems) == len(indexes):
            raise DownloadError(
                f"no index lists the releases of SGLang: {problems[0]}",
                hint="check the network and your pip index; offline, name the release's wheel with --wheel FILE",
            )
    return _by_version(found.values())


def find(version: str, releases: Iterable[Release]) -> Release:
    """Return one release.

    :raises ReleaseError: there is none of that version, or upstream has yanked it.
    """
    wanted, known = parse_version(version), list(releases)
    for release in known:
        if release.version == wanted and str(release.version) == version:
            if release.yanked:
                raise ReleaseError(
                    f"SGLang {version} was yanked by upstream: {release.yanked}",
                    hint="take another release, or name its wheel with --wheel FILE if you must have this one",
                )
            return release
    newest = ", ".join(str(release.version) for release in known[-5:]) or "none at all"
    raise ReleaseError(f"there is no release {version} of SGLang", hint=f"the newest that your index lists: {newest}")


def newer(than: str, releases: Iterable[Release]) -> list[Release]:
    """Return final and post releases newer than a version that were not yanked, oldest first."""
    return [
        release for release in releases
        if release.version > Version(than) and not release.version.is_prerelease and not release.yanked
    ]  # fmt: skip


def parse_version(text: str) -> Version:
    """Return a public version.

    :raises ReleaseError: it is none.
    """
    try:
        version = Version(text)
    except InvalidVersion:
        raise ReleaseError(f"{text!r} is no version", hint="a release is named like 0.5.23") from None
    if version.local or str(version) != text:
        raise ReleaseError(f"{text!r} is not how upstream writes a version", hint=f"did you mean {version.public}?")
    return version


def _by_version(wheels: Iterable[Listed]) -> list[Release]:
    grouped: dict[Version, list[Listed]] = {}
    for wheel in wheels:
        try:
            name, version, _, _ = parse_wheel_filename(wheel.name)
        except InvalidWheelFilename:
            continue
        if name == "sglang" and not version.local and wheel.sha256:
            grouped.setdefault(version, []).append(wheel)
    return [
        Release(version, tuple(sorted(found, key=lambda wheel: wheel.name)))
        for version, found in sorted(grouped.items())
    ]


def _pip_settings() -> dict[str, list[str]]:
    """Return pip's settings by option; the later of two files wins, the environment over both."""
    command = [sys.executable, "-P", "-m", "pip", "config", "list"]
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, check=False)
    settings: dict[str, list[str]] = {}
    for line in sorted(done.stdout.splitlines(), key=lambda text: text.startswith(":env:")):
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in ("global", "download", "install", ":env:"):
            settings[option] = str(ast.literal_eval(value)).split()
    return settings


def _is_set(values: list[str]) -> bool:
    return bool(values) and values[-1].lower() in ("1", "true", "yes", "on")


def _page(index: str, settings: dict[str, list[str]]) -> list[Listed]:
    url = index.rstrip("/") + "/sglang/"
    if urlsplit(url).scheme == "file":
        page = Path(url2pathname(urlsplit(url).path)) / "index.html"
        return _from_html(page.read_text(encoding="utf-8")) if page.is_file() else []
    verify: Any = settings["cert"][-1] if settings.get("cert") else True
    if urlsplit(url).hostname in settings.get("trusted-host", []):
        verify = False
    proxy = settings["proxy"][-1] if settings.get("proxy") else None
    with httpx.Client(verify=verify, proxy=proxy, follow_redirects=True, timeout=_TIMEOUT) as client:
        answer = client.get(url, headers={"Accept": _ACCEPT})
    if answer.status_code == 404:
        return []
    answer.raise_for_status()
    if "json" in answer.headers.get("content-type", ""):
        return [_from_json(file) for file in answer.json()["files"] if file["filename"].endswith(".whl")]
    return _from_html(answer.text)


def _from_json(file: dict[str, Any]) -> Listed:
    yanked = file.get("yanked") or ""
    return Listed(
        file["filename"], file["hashes"].get("sha256", ""), yanked if isinstance(yanked, str) else "no reason"
    )


class _Links(HTMLParser):
    """Reads the anchors of a simple index page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Listed] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag != "a" or not values.get("href"):
            return
        parts = urlsplit(urljoin("https://index.invalid/", values["href"] or ""))
        name = unquote(parts.path.rpartition("/")[2])
        digest = parts.fragment.removeprefix("sha256=") if parts.fragment.startswith("sha256=") else ""
        yanked = (values["data-yanked"] or "no reason") if "data-yanked" in values else ""
        if name.endswith(".whl"):
            self.found.append(Listed(name, digest, yanked))


def _from_html(text: str) -> list[Listed]:
    links = _Links()
    links.feed(text)
    return links.found


def _in_folder(place: str) -> list[Listed]:
    """Return the wheels of a local find-links folder; pages elsewhere are left to pip."""
    parts = urlsplit(place)
    folder = Path(url2pathname(parts.path)) if parts.scheme == "file" else Path(place)
    if parts.scheme not in ("", "file") or not folder.is_dir():
        return []
    return [Listed(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in folder.glob("sglang-*.whl")]


def _without_secret(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
