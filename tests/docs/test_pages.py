"""What the pages say of the project is what the project is: commands, numbers, rules, messages and their sources."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts import command_pages
from sglang_bw.cli import cli
from sglang_bw.host import boards
from sglang_bw.host.arch import ARCHS
from sglang_bw.ledger import reference
from sglang_bw.plan.rules.check import rules
from sglang_bw.recipes.lookup import catalogue
from tests.conftest import CHECKOUT, engine_trees_of

DOCS = CHECKOUT / "docs"
GUIDES = [DOCS / "faq.md", DOCS / "hardware.md"]
NEWEST = "0.5.23"  # the release whose messages the page quotes


def test_command_pages_are_the_command_line() -> None:
    wanted = command_pages.pages()
    assert set(command_pages.FOLDER.glob("*.md")) == set(wanted), "run `python -m scripts.pages`"
    assert [path.name for path, text in wanted.items() if path.read_text(encoding="utf-8") != text] == [], (
        "run `python -m scripts.pages`"
    )
    assert {path.stem for path in wanted} - {"index"} == set(cli.list_commands(None))  # type: ignore[arg-type]


def test_a_command_page_has_every_option_and_subcommand() -> None:
    text = command_pages.pages()[command_pages.FOLDER / "doctor.md"]
    assert "## `sglang-bw doctor kernels`" in text
    assert "| `--arch CHOICE` | One of `sm90`, `sm100`, `sm120`, `sm121`. Default: `sm120`. |" in text


# -- error messages


@dataclass(frozen=True)
class Message:
    """One entry of the page."""

    text: str
    body: str

    def __str__(self) -> str:
        return self.text[:40]

    @property
    def parts(self) -> list[str]:
        """What is the same on every host."""
        return [part.strip(" :") for part in self.text.split("...") if part.strip(" :")]

    @property
    def source(self) -> str:
        found = re.findall(r"Source: `([^`]+)`", self.body)
        assert len(found) == 1, f"{self.text}: one source"
        return str(found[0])


def messages() -> list[Message]:
    text = (DOCS / "faq.md").read_text(encoding="utf-8")
    sections = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    return [
        Message(re.match(r"`([^`]*)`", part)[1], re.sub(r"^## .*", "", part, flags=re.MULTILINE)) for part in sections
    ]  # type: ignore[index]


MESSAGES = messages()
OF_ENGINE = [message for message in MESSAGES if message.source.startswith("srt/")]


def test_there_are_messages_of_every_kind() -> None:
    kinds = [message.source.partition("/")[0].partition("-")[0] for message in MESSAGES]
    assert len(MESSAGES) >= 40
    assert {kind: kinds.count(kind) >= 8 for kind in ("srt", "sglang_bw", "reported")} == dict.fromkeys(
        ("srt", "sglang_bw", "reported"), True
    )
    assert len({message.text for message in MESSAGES}) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES, ids=str)
def test_a_message_has_cause_cure_and_the_command_that_tells_it_before(message: Message) -> None:
    assert "**Do:**" in message.body
    assert re.search(r"\*\*Told before:\*\*[^§]*`sglang-bw ", message.body), message.text


@pytest.mark.parametrize("message", [m for m in MESSAGES if m not in OF_ENGINE], ids=str)
def test_a_message_is_quoted_as_its_source_has_it(message: Message) -> None:
    if message.source.startswith("reported-"):
        (entry,) = [entry for entry in reference.entries() if entry.id == message.source]
        strings = list(entry.evidence)
    else:
        path = CHECKOUT / message.source
        strings = strings_of(path) if path.suffix == ".py" else [path.read_text(encoding="utf-8")]
    assert [part for part in message.parts if not any(part in text for text in strings)] == []


@pytest.mark.engine
def test_messages_of_the_engine_are_quoted_as_it_has_them() -> None:
    """The patched engine's: a message that the series takes away needs no page."""
    tree = engine_trees_of(NEWEST).patched / "sglang"
    missing = {}
    for message in OF_ENGINE:
        strings = strings_of(tree / message.source)
        if lost := [part for part in message.parts if not any(part in text for text in strings)]:
            missing[message.text] = lost
    assert missing == {}


def strings_of(path: Path) -> list[str]:
    """Return the strings of a Python file, adjacent ones joined."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


# -- rules, reports and checks that are named


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_rules_and_reports_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {
        rule
        for found in re.findall(r"rules? ((?:`[a-z0-9-]+`(?:, )?)+)", text)
        for rule in re.findall(r"`([^`]+)`", found)
    }
    assert len(named) >= 10
    assert named - {rule.id for rule in rules()} == set()
    assert set(re.findall(r"reported-[a-z]+-\w+", text)) - {entry.id for entry in reference.entries()} == set()


def test_checks_of_the_doctor_that_are_named_exist() -> None:
    groups = {
        str(ast.literal_eval(node.args[0]))
        for path in (CHECKOUT / "sglang_bw" / "host").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Group" and node.args
    }
    named = set(re.findall(r"doctor \[([^\]]+)\]", (DOCS / "hardware.md").read_text(encoding="utf-8")))
    assert len(named) >= 9
    assert named - groups == set()


def test_boards_of_the_hardware_guide_are_those_that_plan_knows() -> None:
    rows = re.findall(
        r"^\| (RTX PRO 6000|RTX 5090|DGX Spark|B200)[^|]*\| SM(\d+) \| ([\d,]+) MiB[^|]*\| ([\d,]+) bytes \|$",
        (DOCS / "hardware.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) == 4
    for name, arch, memory, shared in rows:
        board = boards.find(name)
        assert (f"sm{arch}", int(memory.replace(",", ""))) == (board.arch, board.memory_mib), name
        assert int(shared.replace(",", "")) == ARCHS[board.arch].shared_memory, name


def test_every_bundled_recipe_has_its_row() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (DOCS / "recipes.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(catalogue())


def test_exit_codes_that_are_named_are_documented() -> None:
    codes = re.findall(r"^\| (\d+) \|", (DOCS / "exit-codes.md").read_text(encoding="utf-8"), re.MULTILINE)
    for page in DOCS.glob("*.md"):
        named = set(re.findall(r"exit codes? (\d+)", page.read_text(encoding="utf-8"), re.IGNORECASE))
        assert named - set(codes) == set(), page.name


# -- numbers


def test_numbers_of_the_first_page_are_those_of_verified() -> None:
    """Each row links to a section of verified.md and has no number that is not there."""
    sections = sections_of((DOCS / "verified.md").read_text(encoding="utf-8"))
    rows = re.findall(
        r"^\|.*\]\(verified\.md#([\w-]+)\).*$", (DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    lines = [line for line in (DOCS / "index.md").read_text(encoding="utf-8").splitlines() if "(verified.md#" in line]
    assert len(rows) == len(lines) >= 4
    for anchor, line in zip(rows, lines, strict=True):
        numbers = re.findall(r"(?<![\w.-])\d+(?:\.\d+)?", re.sub(r"\]\([^)]*\)", "]", line))
        known = re.findall(r"\d+(?:\.\d+)?", sections[anchor])
        bare = [number for number in numbers if float(number) not in {float(one) for one in known}]
        assert bare == [], f"{line}: not in verified.md#{anchor}"


def sections_of(text: str) -> dict[str, str]:
    """Return the text below each heading, deeper headings included, by its anchor."""
    found: dict[str, str] = {}
    open_: list[tuple[int, str]] = []
    for line in text.splitlines():
        if heading := re.match(r"(#+) (.*)", line):
            depth = len(heading[1])
            anchor = re.sub(r"[^\w\s-]", "", heading[2].lower()).strip()
            open_ = [(level, name) for level, name in open_ if level < depth]
            open_.append((depth, re.sub(r"[\s-]+", "-", anchor)))
            found[open_[-1][1]] = ""
        for _, name in open_:
            found[name] += line + "\n"
    return found
