"""Models whose code a launch runs, and the revisions that it names for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_bw.launch import hub, secret, weights
from sglang_bw.launch.command import Command
from sglang_bw.models import BUNDLED
from sglang_bw.recipes import flags

FLAG = "trust-remote-code"


@dataclass(frozen=True)
class Source:
    """A model whose code a launch runs.

    :ivar role: ``target``, ``draft`` or ``tokenizer``.
    :ivar revision: as the command line has it.
    :ivar option: the flag that sets the revision; empty where the engine has none.
    :ivar folder: where it lies on this disk; ``None`` for one of the hub.
    """

    role: str
    name: str
    revision: str | None = None
    option: str = ""
    folder: Path | None = None

    @property
    def is_pinned(self) -> bool:
        """Whether the command line names a whole commit."""
        return bool(self.option and self.revision and hub.COMMIT.fullmatch(self.revision))

    @property
    def is_loose(self) -> bool:
        """Whether somebody else may change what runs."""
        return self.folder is None and not self.is_pinned

    @property
    def title(self) -> str:
        """Role and name, and the revision where it is no commit."""
        return f"the {self.role} {self.name}" + (f" at {self.revision!r}" if self.revision else "")


def sources(command: Command) -> list[Source]:
    """Return the models whose code a launch runs: none without ``--trust-remote-code``, none that the tool brings."""
    if not _is_asked(command):
        return []
    named = [("target", command.target, "revision")]
    if command.draft:
        named.append(("draft", command.draft, "speculative-draft-model-revision"))
    tokenizer = flags.value(command.flags, "tokenizer-path")
    if tokenizer and tokenizer != command.target:
        named.append(("tokenizer", tokenizer, ""))  # the engine takes it at the target's revision
    found = [
        Source(role, name, flags.value(command.flags, option) if option else None, option, weights.local(name))
        for role, name, option in named
    ]
    return [source for source in found if not (source.folder and source.folder.is_relative_to(BUNDLED))]


def _is_asked(command: Command) -> bool:
    """Tell whether the engine will run such code: the flag, an abbreviation that its parser takes, or its own file."""
    if any(flag.name.startswith("trust") and FLAG.startswith(flag.name) for flag in command.flags):
        return True
    path = flags.value(command.flags, "config")
    file = secret.read_config(Path(path)) if path else {}
    return any(str(key).replace("_", "-") == FLAG and value for key, value in file.items())
