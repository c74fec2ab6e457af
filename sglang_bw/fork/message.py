"""The message of a patch that is being written: what the format asks for, with a mark where its author has to write."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from sglang_bw.fork.gitrepo import COMMITTER, COMMITTER_EMAIL, GitRepo, git_program
from sglang_bw.fork.lint import TODO


@dataclass(frozen=True)
class Draft:
    """A new patch of ``topic`` on ``base``; a ``local`` one needs less."""

    base: str
    topic: str
    local: bool

    def trailers(self) -> dict[str, str]:
        """Return the trailers, marked where something is to be written."""
        why = {"Why": f"{TODO} one sentence that a user understands"}
        if self.local:
            return why
        test = f"tests/patches/{self.base}/test_{self.topic.replace('-', '_')}.py"
        return {
            "Upstream-Status": "Pending",
            "Bug": f"{TODO} https reference, or none (symptom)",
            **why,
            "Removal": f"{TODO} a condition that can be tested; when it holds, the patch goes",
            "Applies-To": f">={self.base}",
            "Test": f"{TODO} {test}",
            "Verified-On": f"{TODO} what was really run: cpu, smNN, resolver:smNN",
        }

    def template(self) -> str:
        """Return a whole message."""
        lines = [f"{TODO} subject, as upstream writes them", "", f"{TODO} what hurts, and why this is the cure", ""]
        return "\n".join([*lines, *(f"{key}: {value}" for key, value in self.trailers().items()), ""])

    def completed(self, repo: GitRepo, text: bytes) -> bytes:
        """Return a commit message with the trailers that it lacks."""
        add = [part for key, value in self.trailers().items() for part in ("--trailer", f"{key}: {value}")]
        return repo.run("interpret-trailers", "--if-exists", "doNothing", *add, stdin=text.rstrip() + b"\n").stdout

    def commit_command(self) -> list[str]:
        """Return the git arguments that commit the index with a message from standard input, as the user, now."""
        who = identity()
        author = f"{who['author.name']} <{who['author.email']}>"
        return ["commit", "--quiet", "--no-verify", "--author", author, "--date", "now", "--file", "-"]


def identity() -> dict[str, str]:
    """Return git's settings for the author of new patches: whom the user's own git names, else this tool."""
    found = {key: _ask(f"user.{key}") for key in ("name", "email")}
    if not all(found.values()):
        found = {"name": COMMITTER, "email": COMMITTER_EMAIL}
    return {f"author.{key}": value for key, value in found.items()}


def _ask(key: str) -> str:
    done = subprocess.run([git_program(), "config", key], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
