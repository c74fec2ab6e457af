"""A static simple index (PEP 503) over the wheels in a directory, for pip's --extra-index-url and uv's --index."""

from __future__ import annotations

import hashlib
import html
import os
import tempfile
import zipfile
from email.parser import BytesHeaderParser
from pathlib import Path
from urllib.parse import quote

_PAGE = """<!DOCTYPE html>
<html>
<head>
<meta name="pypi:repository-version" content="1.0">
<title>{title}</title>
</head>
<body>
{body}
</body>
</html>
"""


def write(folder: Path) -> Path:
    """Write ``folder/simple`` from the sglang wheels in ``folder`` and return it; half-copied ones are left out.

    Each page is replaced in one step, so that two builds at once leave a whole one.
    """
    simple = folder / "simple"
    links = [_link(wheel) for wheel in sorted(folder.glob("sglang-*.whl")) if zipfile.is_zipfile(wheel)]
    _replace(simple / "sglang" / "index.html", _PAGE.format(title="Links for sglang", body="\n".join(links)))
    _replace(simple / "index.html", _PAGE.format(title="Simple index", body='<a href="sglang/">sglang</a>'))
    return simple


def _link(wheel: Path) -> str:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    requires = _requires_python(wheel)
    attribute = f' data-requires-python="{html.escape(requires)}"' if requires else ""
    # The plus sign of a local version must be %2B: some servers and clients read it as a blank.
    return f'<a href="../../{quote(wheel.name)}#sha256={digest}"{attribute}>{html.escape(wheel.name)}</a><br>'


def _requires_python(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return str(BytesHeaderParser().parsebytes(archive.read(metadata)).get("Requires-Python", ""))


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).chmod(0o644)
    os.replace(file.name, path)  # noqa: PTH105
