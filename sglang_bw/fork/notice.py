"""The notices that Apache-2.0 section 4(b) asks for: every changed file says so, and NOTICE lists them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from sglang_bw.fork.record import BwRecord

TEXT = "Modified by the sglang-bw developers; the NOTICE in this distribution's metadata lists the changes."
LOCAL_TEXT = "Modified by the builder of this wheel; the NOTICE in this distribution's metadata lists the changes."

_HASH = frozenset({".py", ".pyi", ".sh", ".toml", ".yaml", ".yml", ".cfg"})
_SLASHES = frozenset({".cu", ".cuh", ".h", ".hpp", ".cpp", ".cc", ".c", ".rs", ".js", ".proto"})


def with_notice(path: str, data: bytes, text: str = TEXT) -> bytes:
    """Return a changed file with one comment line at its end, where no later hunk can conflict with it.

    A format without comments (JSON, Markdown) stays as it is; NOTICE names it. Line ends follow the file.
    """
    suffix = PurePosixPath(path).suffix
    mark = "#" if suffix in _HASH else "//" if suffix in _SLASHES else ""
    if not mark:
        return data
    end = b"\r\n" if b"\r\n" in data else b"\n"
    gap = b"" if not data or data.endswith(b"\n") else end
    return data + gap + f"{mark} {text}".encode() + end


def notice_file(record: BwRecord, modified: Iterable[str]) -> str:
    """Return the text of the wheel's NOTICE."""
    lines = [
        f"sglang {record.version}",
        "",
        f"This is SGLang {record.base} (https://github.com/sgl-project/sglang, Apache-2.0) with the patch series",
        f"{_series(record)} of sglang-bw (Apache-2.0). It is not made or endorsed by the SGLang team.",
        "",
        "Patches:",
        *(f"  {patch.file}: {patch.subject}" for patch in record.patches),
        "",
        *_local(record),
        "Files changed from upstream's:",
        *(f"  {path}" for path in sorted(modified)),
        "",
        "Files added:",
        *(f"  {path}" for path in sorted(set(record.files) - set(modified))),
        "",
        "Files removed:",
        *(f"  {path}" for path in record.removed),
        "",
    ]
    return "\n".join(lines)


def _series(record: BwRecord) -> str:
    """Return the id of the project's own series: local patches are no part of it."""
    return record.local.series if record.local else record.series


def _local(record: BwRecord) -> list[str]:
    if record.local is None:
        return []
    listed = [f"  {patch.file}: {patch.subject}" for patch in record.local.patches]
    return ["Local patches of the builder of this wheel, which are no part of sglang-bw:", *listed, ""]
