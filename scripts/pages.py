"""Write what the pages take from the project: README's version and table, patches, variables of the doctor, commands.

`python -m scripts.pages` brings them up to date; a test keeps them so.
"""

from __future__ import annotations

import re
from pathlib import Path

from scripts import command_pages
from sglang_bw.fork import strict
from sglang_bw.fork.mail import Patch, description, markdown_table, read_patch
from sglang_bw.fork.series import Series, bases, newest_base, patches_root
from sglang_bw.host.nccl import VARIABLES

CHECKOUT = Path(__file__).resolve().parent.parent
README = CHECKOUT / "README.md"
PATCHES = CHECKOUT / "docs" / "patches.md"
DOCTOR = CHECKOUT / "docs" / "doctor.md"
INSTALL = CHECKOUT / "docs" / "install.md"
_VERSION = re.compile(r'(?<="sglang==)[0-9a-z.+]+(?=")')


def readme(text: str) -> str:
    """Return README text with version and table brought up to date."""
    series, patches = _load(newest_base(patches_root()))
    text = _VERSION.sub(series.pins.full_version, text)
    return between_marks(text, "sglang-bw patches list --markdown", markdown_table(patches))


def install_page(text: str) -> str:
    """Return docs/install.md with the full version in the lines for pip and uv."""
    return _VERSION.sub(_load(newest_base(patches_root()))[0].pins.full_version, text)


def patch_page(text: str) -> str:
    """Return docs/patches.md with one section a patch; what stands outside of a base's marks is written by hand."""
    root = patches_root()
    newest = {patch.subject: patch for patch in _load(newest_base(root))[1]}
    for base in bases(root):
        _, patches = _load(base)
        shared = [] if base == newest_base(root) else [patch for patch in patches if _is_described(patch, newest)]
        parts = [_section(patch) for patch in patches if patch not in shared]
        text = between_marks(text, patches_mark(base), "\n".join([*_as_on(newest, shared), *parts]))
    return text


def _is_described(patch: Patch, newest: dict[str, Patch]) -> bool:
    """Tell whether the newest base has this patch in the same words."""
    same = newest.get(patch.subject)
    return same is not None and description(same) == description(patch)


def _as_on(newest: dict[str, Patch], shared: list[Patch]) -> list[str]:
    """Return the list of patches that need no second description."""
    if not shared:
        return []
    rows = [f"| `{patch.name[:4]}` | `{newest[patch.subject].name[:4]}` | {patch.subject} |" for patch in shared]
    return ["Described above, with the newest base:", "", "| here | there | |", "|---|---|---|", *rows, ""]


def doctor_page(text: str) -> str:
    """Return docs/doctor.md with the table of environment variables."""
    rows = ["| variable | what it does |", "|---|---|"]
    rows += [f"| `{variable.name}` | {variable.does} |" for variable in VARIABLES]
    return between_marks(text, "python -m scripts.pages", "\n".join(rows))


def patches_mark(base: str) -> str:
    """Return what opens the generated part of a base in docs/patches.md."""
    return f"generated from the patch headers of {base} by scripts/pages.py"


def _load(base: str) -> tuple[Series, list[Patch]]:
    series = Series.load(patches_root(), base)
    return series, [read_patch(path) for path in series.files]


def _section(patch: Patch) -> str:
    bugs = "; ".join(f"<{bug}>" if bug.startswith("http") else bug for bug in patch.all("Bug"))
    files = ", ".join(f"`{path.removeprefix('python/sglang/')}`" for path in strict.touched(patch.name, patch.diff))
    rows = [
        f"### {patch.name[:4]} {patch.subject}",
        "",
        f"**{patch.trailer('Why')}**",
        "",
        description(patch),
        "",
        "| | |",
        "|---|---|",
        f"| reported | {bugs} |",
        f"| verified on | {patch.trailer('Verified-On')} |",
        f"| upstream | {patch.trailer('Upstream-Status')} |",
        f"| goes when | {patch.trailer('Removal')} |",
        f"| applies to | {patch.trailer('Applies-To')} |",
        f"| test | `{', '.join(patch.all('Test'))}` |",
        f"| changes | {files} |",
        "",
    ]
    return "\n".join(rows)


def between_marks(text: str, mark: str, content: str) -> str:
    pattern = re.compile(rf"(<!-- {re.escape(mark)} -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)


if __name__ == "__main__":
    README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8")
    DOCTOR.write_text(doctor_page(DOCTOR.read_text(encoding="utf-8")), encoding="utf-8")
    PATCHES.write_text(patch_page(PATCHES.read_text(encoding="utf-8")), encoding="utf-8")
    INSTALL.write_text(install_page(INSTALL.read_text(encoding="utf-8")), encoding="utf-8")
    command_pages.write()
