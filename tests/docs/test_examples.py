"""What the pages tell a reader to type does what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest

from sglang_bw.cli import cli
from sglang_bw.errors import BwError
from tests.conftest import CHECKOUT
from tests.docs.examples import PAGES, Block, Shell, blocks, calls, is_as_expected

BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN = [block for block in BLOCKS if block.what == "run"]


PLAIN = [block for block in RUN if not (block.needs("engine") or block.needs("slow"))]
ENGINE = [block for block in RUN if block.needs("engine") and not block.needs("slow")]
SLOW = [block for block in RUN if block.needs("slow")]


def by_page(chosen: list[Block]) -> list[Any]:
    pages = sorted({block.page for block in chosen})
    return [pytest.param([block for block in chosen if block.page == page], id=page.stem) for page in pages]


def test_every_block_says_whether_it_is_run() -> None:
    assert [str(block) for block in BLOCKS if block.what is None] == []
    assert [str(block) for block in BLOCKS if block.what == "not run" and len(block.how) < 10] == [], "say why not"
    assert len(RUN) >= 10


@pytest.mark.parametrize("chosen", by_page(PLAIN))
def test_blocks_do_what_the_page_says(chosen: list[Block], tmp_path: Path) -> None:
    check(chosen, tmp_path)


@pytest.mark.engine
@pytest.mark.parametrize("chosen", by_page(ENGINE))
def test_blocks_with_the_engine_do_what_the_page_says(chosen: list[Block], tmp_path: Path) -> None:
    check(chosen, tmp_path)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("chosen", by_page(SLOW))
def test_slow_blocks_do_what_the_page_says(chosen: list[Block], tmp_path: Path) -> None:
    check(chosen, tmp_path)


def check(chosen: list[Block], folder: Path) -> None:
    shell = Shell(folder / "home")
    for block in chosen:
        for step in block.steps:
            code, printed = shell.run(step.command)
            assert code in block.codes, f"{block}: `{step.command}` ended with {code}:\n{printed}"
            wanted = "\n".join(step.expected)
            assert is_as_expected(step.expected, printed), f"{block}: expected\n{wanted}\nprinted\n{printed}"


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_commands_of_a_block_are_understood(block: Block) -> None:
    """Also those that are not run: commands, options, choices and arguments are what the command line takes."""
    for step in block.steps:
        for arguments in calls(step.command):
            understand(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_within_sentences_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for call in re.findall(r"`(sglang-bw [a-z-][^`]*)`", text):
        for arguments in calls(call):
            understand(arguments, whole=False)


def understand(arguments: list[str], *, whole: bool = True) -> None:
    """Parse a call as the tool would.

    :param whole: arguments must be complete and options have values; else commands and options must exist.
    """
    context = click.Context(cli, info_name="sglang-bw")
    rest = cli.make_parser(context).parse_args(list(arguments))[1]
    while rest and isinstance(context.command, click.Group):
        command = context.command.get_command(context, rest[0])
        assert command is not None, f"there is no command {' '.join(arguments)!r}"
        inner = click.Context(command, info_name=rest[0], parent=context)
        if isinstance(command, click.Group):
            rest = command.make_parser(inner).parse_args(rest[1:])[1]
        elif whole:
            try:
                command.make_context(rest[0], rest[1:], parent=context)
            except click.BadParameter as error:  # files of the reader's are not here
                if not (error.param and isinstance(error.param.type, click.Path)):
                    raise
            except BwError:  # nor is what a value names
                pass
            rest = []
        else:
            for word in (word.partition("=")[0] for word in rest[1:] if word.startswith("-") and word != "--"):
                known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
                assert word in known | {"--help"}, f"{' '.join(arguments)!r}: no option {word}"
            rest = []
        context = inner


@pytest.mark.parametrize(
    ("expected", "printed", "right"),
    [
        pytest.param((), "anything", True, id="nothing-expected"),
        pytest.param(("a", "b"), "a\nb\n", True, id="equal"),
        pytest.param(("a", "b"), "a\nc\n", False, id="another-line"),
        pytest.param(("a",), "a\nb\n", False, id="more-lines"),
        pytest.param(("a", "..."), "a\nb\nc\n", True, id="any-lines"),
        pytest.param(("a", "..."), "a\n", True, id="no-line"),
        pytest.param(("...", "z"), "a\nb\nz\n", True, id="any-lines-before"),
        pytest.param(("...", "z"), "z", True, id="no-line-before"),
        pytest.param(("...", "z", "..."), "a\ny\nb", False, id="missing-in-between"),
        pytest.param(("a 1...", "b"), "a 12.5\nb", True, id="within-a-line"),
        pytest.param(("a 1...",), "a 12\nb", False, id="within-a-line-only"),
        pytest.param(("a.b",), "axb", False, id="a-dot-is-a-dot"),
    ],
)
def test_comparison_of_output(expected: tuple[str, ...], printed: str, right: bool) -> None:
    assert is_as_expected(expected, printed) is right


def test_blocks_are_read_with_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# P\n\n<!-- run: engine, exit 50 or 51 -->\n```console\n$ a \\\n  b\nout\n$ c\n```\n\n```bash\n$ d\n```\n",
        encoding="utf-8",
    )
    first, second = blocks(page)
    assert (first.what, first.needs("engine"), first.needs("slow"), first.codes) == ("run", True, False, {50, 51})
    assert [(step.command, step.expected) for step in first.steps] == [("a \\\n  b", ("out",)), ("c", ())]
    assert second.what is None
    assert str(second) == "page.md:11"


@pytest.mark.parametrize(
    "command",
    [
        "sglang-bw sevre tiny",
        "sglang-bw serve",
        "sglang-bw plan x --fabric token-ring",
        "cd $(sglang-bw patches nwe a)",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    (arguments,) = calls(command)
    with pytest.raises((AssertionError, click.UsageError)):
        understand(arguments)


def test_readme_asks_for_the_full_version_as_the_pages_do() -> None:
    """`==0.5.23` is satisfied by an installed stock: pip and uv would do nothing."""
    lines = [
        line
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.search(r"^\$ (?:uv )?pip install .*sglang==", line)
    ]
    assert len(lines) == 4
    assert [line for line in lines if "+bw." not in line] == []
    assert (CHECKOUT / "docs" / "install.md").is_file()
