"""What MkDocs cannot do by itself: patterns in the navigation, and pages that live outside of docs/."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

CHECKOUT = Path(__file__).resolve().parent.parent
# Read where they are, shown as pages of the site.
OUTSIDE = {"CHANGELOG.md": "changelog.md", "sglang_bw/models/tiny_pair/README.md": "tiny-pair.md"}
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    pages = sorted(path.relative_to(config.docs_dir) for path in Path(config.docs_dir).rglob("*.md"))
    config.nav = expanded(config.nav or [], pages)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, name in OUTSIDE.items():
        text = (CHECKOUT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=relinked(text, source, name)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    uri = page.file.src_uri
    return markdown if uri in OUTSIDE.values() else relinked(markdown, f"docs/{uri}", uri)


def expanded(nav: list[Any], pages: list[Path]) -> list[Any]:
    """Return the navigation with each pattern replaced by the pages that it finds and nobody has named."""
    named = set(_named(nav))

    def expand(items: list[Any]) -> list[Any]:
        found: list[Any] = []
        for item in items:
            if isinstance(item, dict):
                found.append({title: expand(part) if isinstance(part, list) else part for title, part in item.items()})
            elif "*" in item:
                found += [page.as_posix() for page in pages if page.match(item) and page.as_posix() not in named]
            else:
                found.append(item)
        return found

    return expand(nav)


def _named(items: list[Any]) -> list[str]:
    parts = [part for item in items for part in (item.values() if isinstance(item, dict) else [item])]
    return [name for part in parts for name in (_named(part) if isinstance(part, list) else [part])]


def relinked(text: str, source: str, uri: str) -> str:
    """Return the text of a file of the repository with links that hold inside of the site.

    ``source`` is where it lies in the repository, ``uri`` its place in the site.
    """

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        inside = OUTSIDE.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if inside is None:
            return match[0]
        return posixpath.relpath(inside, posixpath.dirname(uri) or ".") + (match[2] or "")

    return _LINK.sub(link, text)
