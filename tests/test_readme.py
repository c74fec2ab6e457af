"""What the pages say of the project is what the project is."""

from __future__ import annotations

import re

from scripts.pages import DOCTOR, INSTALL, PATCHES, doctor_page, install_page, patch_page, patches_mark, readme
from sglang_bw import errors
from sglang_bw.fork.series import bases
from tests.conftest import CHECKOUT
from tests.conftest import PATCHES as SERIES

README = (CHECKOUT / "README.md").read_text(encoding="utf-8")


def test_readme_has_the_version_and_the_patches_of_the_newest_series() -> None:
    assert readme(README) == README, "run `python -m scripts.pages`"


def test_install_page_has_the_version_of_the_newest_series() -> None:
    page = INSTALL.read_text(encoding="utf-8")
    assert install_page(page) == page, "run `python -m scripts.pages`"
    assert '"sglang==0.5.23+bw.' in page


def test_patch_page_is_generated_from_the_headers() -> None:
    page = PATCHES.read_text(encoding="utf-8")
    assert patch_page(page) == page, "run `python -m scripts.pages`"
    assert [base for base in bases(SERIES) if f"<!-- {patches_mark(base)} -->" not in page] == []


def test_doctor_page_lists_the_variables() -> None:
    page = DOCTOR.read_text(encoding="utf-8")
    assert doctor_page(page) == page, "run `python -m scripts.pages`"
    assert "| `NCCL_P2P_LEVEL` | " in page


def test_every_exit_code_is_documented() -> None:
    page = (CHECKOUT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    classes = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.BwError)
    ]
    assert {cls.exit_code for cls in classes} - documented == set()
