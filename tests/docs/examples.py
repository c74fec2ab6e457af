"""Console blocks of the pages: which are run, what they must end with, and what they must print.

A comment stands above each block: `<!-- run -->`, `<!-- run: exit 50 -->`, `<!-- run: engine -->` (needs the engine's
dependencies), `<!-- run: engine, slow -->`, or `<!-- not run: why -->`. Lines behind a command are its output; `...` in
them stands for anything.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import CHECKOUT

PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"(?:^<!-- (?P<what>run|not run)(?:: (?P<how>[^\n]*?))? -->\n)?"
    r"^```(?P<kind>console|bash|shell|sh)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_COMMAND = re.compile(r"(?:^|[;&|]\s*|\$\(|\bsudo )(sglang-bw\b[^)|;&>]*)")
_TIMEOUT_S = 240


@dataclass(frozen=True)
class Step:
    """One command and the lines that it must print; none: whatever it likes."""

    command: str
    expected: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    page: Path
    line: int
    what: str | None
    how: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def needs(self, what: str) -> bool:
        return what in self.how.split(", ")

    @property
    def codes(self) -> set[int]:
        """The exit codes that are right."""
        found = re.search(r"exit ([\d ,or]+)", self.how)
        return {int(code) for code in re.findall(r"\d+", found[1])} if found else {0}

    @property
    def steps(self) -> list[Step]:
        """The commands with their output; a line that ends in a backslash goes on."""
        steps: list[Step] = []
        goes_on = False
        for line in self.text.splitlines():
            if goes_on:
                steps[-1] = Step(f"{steps[-1].command}\n{line}")
            elif line.startswith("$ "):
                steps.append(Step(line[2:]))
            elif steps:
                steps[-1] = Step(steps[-1].command, (*steps[-1].expected, line))
            goes_on = bool(steps) and not steps[-1].expected and line.endswith("\\")
        return steps


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start("kind")) + 1, found["what"], found["how"] or "", found["text"])
        for found in _BLOCK.finditer(text)
    ]


def calls(command: str) -> list[list[str]]:
    """Return the arguments of each call of the tool in a line of shell."""
    joined = command.replace("\\\n", " ")
    return [shlex.split(call, comments=True)[1:] for call in _COMMAND.findall(joined)]


def is_as_expected(expected: tuple[str, ...], printed: str) -> bool:
    if not expected:
        return True
    pattern = "\n".join(".*" if line == "..." else re.escape(line).replace(r"\.\.\.", "[^\n]*") for line in expected)
    # A line of dots may stand for no line at all.
    pattern = pattern.replace(".*\n", "(?:.*\n)?").removesuffix("\n.*") + ("(?:\n.*)?" if expected[-1] == "..." else "")
    return (
        re.fullmatch(pattern, "\n".join(line.rstrip() for line in printed.strip().splitlines()), re.DOTALL) is not None
    )


class Shell:
    """A home and a working directory of their own, and the tool of this checkout on PATH."""

    def __init__(self, home: Path) -> None:
        programs = home / "programs"
        programs.mkdir(parents=True)
        tool = programs / "sglang-bw"
        tool.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m sglang_bw "$@"\n', encoding="utf-8")
        tool.chmod(0o755)
        self.home = home
        self.environ = {
            "HOME": str(home),
            "PATH": os.pathsep.join([str(programs), *os.get_exec_path()]),
            "PYTHONPATH": str(CHECKOUT),
            "COLUMNS": "200",
            "LANG": "C.UTF-8",
        }

    def run(self, command: str) -> tuple[int, str]:
        """Return exit code and everything that was printed."""
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {command}"],
            cwd=self.home,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
        )
        return done.returncode, done.stdout
