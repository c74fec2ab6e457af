"""The report in a real browser: nothing runs, nothing overflows, everything is readable, reachable and escaped."""

from __future__ import annotations

import base64
import gzip
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver import Keys
from selenium.webdriver.common.action_chains import ActionChains

from sglang_bw.ledger.record import PolicyLook
from sglang_bw.ledger.report.page import render
from sglang_bw.ledger.report.policy import switches
from sglang_bw.ledger.runfile import read
from tests.ledger.runs import HOSTILE, SCRIPT, run

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
DRIVER = shutil.which("chromedriver")
SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
HOW = "apt-get install chromium chromium-driver on Debian; elsewhere Chrome for Testing and its chromedriver, on PATH"
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason=f"needs chromium and chromedriver, which the Makefile does not install ({HOW})"
)
CONTRAST = """
const luminance = ([r, g, b]) => {
  const f = c => { c /= 255; return c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4; };
  return .2126 * f(r) + .7152 * f(g) + .0722 * f(b); };
const rgb = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
const paper = luminance(rgb(getComputedStyle(document.body).backgroundColor));
return [...document.querySelectorAll('h1, h2, p, td, th, dt, dd, summary, a:not(.skip), svg text')].map(e => {
  const style = getComputedStyle(e), ink = luminance(rgb(e instanceof SVGElement ? style.fill : style.color));
  return [(Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05), e.textContent.slice(0, 30)]; });
"""


class _Page(HTMLParser):
    """Collects elements, and attributes that would run something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.running: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.running += [name for name, _ in attrs if name.startswith("on")]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render([run(), run("20261130-000000-aaaaaa", outcome=None, hypothesis="")]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    downloads = tmp_path_factory.mktemp("downloads")
    for switch in (*SWITCHES, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(switch)
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield chrome
    chrome.quit()


def show(chrome: webdriver.Chrome, page: Path, width: int, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    chrome.get(page.as_uri())


def test_nothing_from_outside_becomes_markup(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = _Page(text)
    assert not found.tags & {"script", "img", "iframe", "object", "embed", "style>"}
    assert found.running == []
    assert all(address.startswith(("#", "data:")) for address in found.addresses)
    assert "{{" in text  # the braces of a hostile name are text, and no template
    assert SCRIPT not in text
    assert "&lt;script&gt;" in text


def test_raw_data_is_the_whole_run(page: Path, tmp_path: Path) -> None:
    data = re.search(r"data:application/gzip;base64,([^\"]+)", page.read_text(encoding="utf-8"))
    assert data
    file = tmp_path / "run.jsonl"
    file.write_bytes(gzip.decompress(base64.b64decode(data[1])))
    assert read(file) == run()


def test_sections_are_there_and_absent_ones_are_not() -> None:
    whole = render([run()])
    keys = (
        "ratio",
        "throughput",
        "accept",
        "cost",
        "latency-1",
        "numbers",
        "memory",
        "timeline",
        "outputs",
        "difference",
    )
    for key in (*keys, "versions", "raw"):
        assert f'id="{key}-1"' in whole
    bare = render([run(outcome=None, blocks=(), difference={})])
    assert "there is no verdict" in bare
    for key in ("ratio", "throughput", "accept", "cost", "latency-1", "numbers", "timeline", "outputs"):
        assert f'id="{key}-1"' not in bare


def test_a_policy_that_switched_is_drawn() -> None:
    """Three looks a block; the third block saw a switch, the fifth two in between, the last a server started anew."""
    assert "Dashed" not in render([run()])
    told = [(3, 0), (3, 0), (1, 1), (1, 1), (1, 3), (3, 0)]
    blocks = [
        block.model_copy(
            update={
                "policy": tuple(
                    PolicyLook(at_s=at, steps=steps, switches=count, reason=f"batch 1: {SCRIPT}") for at in (0.0, 1.0)
                )
            }
        )
        for block, (steps, count) in zip((b for b in run().blocks if b.arm == "B"), told, strict=False)
    ]
    switched = run(blocks=blocks)
    first = min(block.began for block in blocks)
    assert [(one.before, one.after, one.count) for one in switches(switched)] == [(3, 1, 1), (1, 1, 2)]
    assert [one.at_s for one in switches(switched)] == [
        (blocks[number].began - first).total_seconds() for number in (2, 4)
    ]
    text = render([switched])
    assert "changed its draft steps, 3 times" in text
    assert SCRIPT not in text


def test_simulated_and_invalid_runs_say_so_first() -> None:
    outcome = run().outcome
    assert outcome
    text = render([run(simulated=True, outcome=outcome.model_copy(update={"valid": False}))])
    assert text.index("no real speeds") < text.index("must not be used") < text.index("is faster than")


@needs_browser
@pytest.mark.parametrize("width", [360, 800, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_looks(browser: webdriver.Chrome, page: Path, width: int, scheme: str) -> None:
    show(browser, page, width, scheme)
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
    assert "owned" not in browser.title.replace(SCRIPT, "")
    assert browser.execute_script("return document.scripts.length + document.images.length") == 0
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    found: list[tuple[float, str]] = browser.execute_script(CONTRAST)
    assert len(found) > 200
    assert [(round(ratio, 2), text) for ratio, text in found if ratio < 4.5] == []
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


@needs_browser
def test_the_keyboard_reaches_everything(browser: webdriver.Chrome, page: Path) -> None:
    show(browser, page, 800, "light")
    reached: list[str] = []
    for _ in range(200):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        element: Any = browser.switch_to.active_element
        if element.tag_name == "body":
            break
        reached.append(element.get_attribute("href") or element.tag_name)
    assert reached[0].endswith("#main")
    wanted = browser.execute_script("return document.querySelectorAll('a, summary, figure').length")
    assert len([one for one in reached if one != "div"]) == wanted
    assert "div" in reached  # tables that scroll
    show(browser, page, 800, "light")
    summary = browser.find_element("css selector", "summary")
    summary.send_keys(Keys.ENTER)
    assert browser.execute_script("return document.querySelector('details').open")


@needs_browser
def test_marks_say_their_values(browser: webdriver.Chrome, page: Path) -> None:
    show(browser, page, 800, "light")
    names = browser.execute_script(
        "return [...document.querySelectorAll('#ratio-1 svg [aria-roledescription=point]')].map(e => e.ariaLabel)"
    )
    assert len(names) == 3
    assert all("ratio" in name or "speed of B" in name for name in names)


@needs_browser
def test_it_prints_with_the_tables_of_the_charts(browser: webdriver.Chrome, page: Path) -> None:
    show(browser, page, 800, "dark")
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})["data"])
    assert pdf.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 30
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    shown = browser.execute_script("return document.querySelector('details table').getBoundingClientRect().height")
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert shown > 0
    assert paper == "rgb(255, 255, 255)"


def test_hostile_names_are_shown_as_they_are(page: Path) -> None:
    class Text(HTMLParser):
        said = ""

        def handle_data(self, data: str) -> None:
            self.said += data

    reader = Text()
    reader.feed(page.read_text(encoding="utf-8"))
    assert HOSTILE in reader.said
