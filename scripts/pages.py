"""Write into the README what is taken from the newest series: the full version and the table of the patches."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_bw.fork.mail import markdown_table, read_patch
from sglang_bw.fork.series import Series, newest_base, patches_root

README = Path(__file__).resolve().parent.parent / "README.md"
_VERSION = re.compile(r'(?<="sglang==)[0-9a-z.+]+(?=")')
_TABLE = re.compile(r"(<!-- sglang-bw patches list --markdown -->\n).*?(<!-- end -->)", re.DOTALL)


def written(text: str) -> str:
    """Return README text with version and table brought up to date."""
    root = patches_root()
    series = Series.load(root, newest_base(root))
    table = markdown_table([read_patch(path) for path in series.files])
    text = _VERSION.sub(series.pins.full_version, text)
    return _TABLE.sub(lambda match: f"{match[1]}{table}\n{match[2]}", text)


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
