"""The site builds without a warning, its links lead somewhere, and it asks nobody for anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from selenium import webdriver

from scripts.site_hooks import expanded, relinked
from tests.conftest import CHECKOUT

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
SWITCHES = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
# What a browser fetches by itself when it shows a page; a link is fetched when a reader asks.
FETCHED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "object": "data",
    "embed": "src",
}
FETCHED_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "manifest", "modulepreload"}


class Page(HTMLParser):
    """What a page fetches, links to, and calls its places."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.places: list[str] = []
        self.headings = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag in FETCHED and FETCHED[tag] in found:
            self.fetched.append(found[FETCHED[tag]])
        if tag == "link" and FETCHED_LINKS & set(found.get("rel", "").split()):
            self.fetched.append(found.get("href", ""))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if "id" in found:
            self.places.append(found["id"])
        self.headings += tag == "h1"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=CHECKOUT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_page_of_the_folder_is_there(site: Path, pages: dict[Path, Page]) -> None:
    docs = CHECKOUT / "docs"
    wanted = {page.relative_to(docs).with_suffix(".html") for page in docs.rglob("*.md")}
    built = {page.relative_to(site) for page in pages}
    assert wanted | {Path("changelog.html"), Path("tiny-pair.html")} <= built
    assert [str(path.relative_to(site)) for path, page in pages.items() if page.headings != 1] == []


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    foreign = {what for page in pages.values() for what in page.fetched if re.match(r"(?:https?:)?//", what)}
    assert foreign == set()
    assert sum(len(page.fetched) for page in pages.values()) > len(pages)
    for sheet in site.rglob("*.css"):
        assert (
            re.findall(r"(?:url\(\s*['\"]?|@import\s+['\"])(?:https?:)?//[^)'\"]*", sheet.read_text(encoding="utf-8"))
            == []
        )


def test_links_and_what_a_page_fetches_are_there(site: Path, pages: dict[Path, Page]) -> None:
    dead = []
    for path, page in pages.items():
        for target in (*page.links, *page.fetched):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or path.name == "404.html":  # the latter has links for any depth
                continue
            other = path if not parts.path else Path(os.path.normpath(path.parent / unquote(parts.path)))
            other = other / "index.html" if other.is_dir() else other
            place = unquote(parts.fragment)
            if not other.is_file() or (place and not place.startswith("__") and place not in pages[other].places):
                dead.append(f"{path.relative_to(site)}: {target}")
    assert dead == []


def test_links_of_readme_and_changelog_are_there() -> None:
    for name in ("README.md", "CHANGELOG.md"):
        links = re.findall(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)", (CHECKOUT / name).read_text(encoding="utf-8"))
        assert [link for link in links if not (CHECKOUT / link).exists()] == [], name


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for switch in (*SWITCHES, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(switch)
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield chrome
    chrome.quit()


@pytest.mark.slow
@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed")
def test_a_telephone_shows_pages_without_scrolling_sideways(site: Path, browser: webdriver.Chrome) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for name in ("index", "quickstart", "faq", "hardware", "plan", "patches", "commands/serve"):
        browser.get((site / f"{name}.html").as_uri())
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390, name
        asked = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
        assert [url for url in asked if not url.startswith("file:")] == []


# -- what the navigation and the links are made by


def test_a_pattern_of_the_navigation_is_the_pages_that_nobody_named() -> None:
    found = [Path("a.md"), Path("deploy.md"), Path("commands/index.md"), Path("commands/x.md"), Path("commands/y.md")]
    nav = [{"One": ["a.md", "deploy*.md", "bundle*.md"]}, {"Two": ["commands/index.md", "commands/*.md"]}]
    assert expanded(nav, found) == [
        {"One": ["a.md", "deploy.md"]},
        {"Two": ["commands/index.md", "commands/x.md", "commands/y.md"]},
    ]


@pytest.mark.parametrize(
    ("text", "source", "uri", "expected"),
    [
        pytest.param("[a](docs/b.md#c)", "CHANGELOG.md", "changelog.md", "[a](b.md#c)", id="into-docs"),
        pytest.param("[a](../CHANGELOG.md)", "docs/b.md", "b.md", "[a](changelog.md)", id="out-of-docs"),
        pytest.param("[a](../b.md)", "docs/commands/c.md", "commands/c.md", "[a](../b.md)", id="within"),
        pytest.param("[a](https://x.org/b.md)", "docs/b.md", "b.md", "[a](https://x.org/b.md)", id="elsewhere"),
        pytest.param("[a](#b)", "docs/b.md", "b.md", "[a](#b)", id="same-page"),
    ],
)
def test_links_between_the_repository_and_the_site(text: str, source: str, uri: str, expected: str) -> None:
    assert relinked(text, source, uri) == expected
