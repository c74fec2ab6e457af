"""From a Vega-Lite specification to an SVG that lives inside of a page.

Drawn when the page is made, by Vega itself: the page needs no script, so none can be smuggled into it, it prints as it
looks, and every mark says its values to a screen reader. Colours are the page's own variables, so that one drawing
serves dark and light.
"""

from __future__ import annotations

import itertools
import re
from typing import Any
from xml.etree import ElementTree as ET

from markupsafe import Markup

_SVG = "http://www.w3.org/2000/svg"
ARM_COLOURS = {"A": "var(--a)", "B": "var(--b)"}
WIDTH = 420  # with the labels it fits a telephone without scrolling
_numbers = itertools.count(1)

_CONFIG: dict[str, Any] = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--ink)", "titleColor": "var(--ink)", "domainColor": "var(--line)",
        "tickColor": "var(--line)", "gridColor": "var(--grid)", "labelFontSize": 14, "titleFontSize": 14,
        "titleFontWeight": "normal", "labelLimit": 240, "titlePadding": 8,
    },
    "axisX": {"tickCount": 6, "labelFlush": False, "labelOverlap": "parity"},
    "legend": {
        "labelColor": "var(--ink)", "titleColor": "var(--ink)", "labelFontSize": 14, "titleFontSize": 14,
        "symbolOpacity": 1, "orient": "top", "labelLimit": 480, "title": None, "direction": "vertical",
    },
    "line": {"strokeWidth": 2}, "point": {"size": 60, "filled": True, "opacity": 1}, "rule": {"color": "var(--line)"},
}  # fmt: skip


def draw(spec: dict[str, Any]) -> Markup:
    """Return a drawing as SVG.

    :param spec: Vega-Lite 5; width and look are set here unless it sets them.
    """
    import vl_convert  # 80 MB of Vega and its engine: loaded by those who draw

    whole = {"$schema": "https://vega.github.io/schema/vega-lite/v5.json", "width": WIDTH, "config": _CONFIG, **spec}
    # Text widths are measured with the fonts of this machine; no network, no other files.
    text = vl_convert.vegalite_to_svg(whole, allowed_base_urls=[])
    return Markup(_for_page(text))


def _for_page(text: str) -> str:
    """Make ids unique in the page, let the drawing shrink, give each mark its values as a tooltip."""
    ET.register_namespace("", _SVG)
    prefix = f"d{next(_numbers)}-"
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", text)
    root = ET.fromstring(text)
    root.set("width", "100%")
    root.set("style", f"max-width: {root.get('viewBox', f'0 0 {WIDTH} 0').split()[2]}px; height: auto")
    root.attrib.pop("height", None)
    for mark in root.iter():
        label = mark.get("aria-label")
        if label and mark.get("role") == "graphics-symbol" and mark.get("aria-roledescription") != "axis":
            title = ET.Element(f"{{{_SVG}}}title")
            title.text = label
            mark.insert(0, title)
    return ET.tostring(root, encoding="unicode")
