"""Engine flags: read a command line, let one set of flags win over another, write it back.

Nothing here knows what a flag means, except that some have several names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Every flag of SGLang 0.5.23 with more than one name, first the name that recipes use. The short forms `--tp`,
# `--dp` and `--pp` are argparse abbreviations that everybody types. tests/engine compares this with the parser.
_NAMES: tuple[tuple[str, ...], ...] = (
    ("model-path", "model"),
    ("speculative-draft-model-path", "speculative-draft-model"),
    ("tp-size", "tensor-parallel-size", "tp"),
    ("pp-size", "pipeline-parallel-size", "pp"),
    ("dp-size", "data-parallel-size", "dp"),
    ("ep-size", "expert-parallel-size", "ep"),
    ("dcp-size", "decode-context-parallel-size"),
    ("attn-dp-size", "attention-data-parallel-size"),
    ("attn-cp-size", "attention-context-parallel-size"),
    ("moe-dp-size", "moe-data-parallel-size"),
    ("dist-init-addr", "nccl-init-addr"),
    ("enable-hierarchical-cache", "enable-hicache"),
    ("hisparse-config", "hierarchical-sparse-attention-extra-config"),
    ("cuda-graph-prefill-max-context", "context-bucket"),
    ("smg-http-sidecar-port", "grpc-http-sidecar-port"),
)
ALIASES: dict[str, str] = {alias: names[0] for names in _NAMES for alias in names[1:]}

_NUMBER = re.compile(r"-\d+(\.\d*)?([eE][-+]?\d+)?|-\.\d+")


@dataclass(frozen=True)
class Flag:
    """One flag and its values.

    :ivar name: as written, without the leading dashes: ``tp-size``.
    :ivar values: empty for a switch; more than one for a flag that takes a list.
    :ivar dashes: ``--``, or ``-`` for a short flag.
    """

    name: str
    values: tuple[str, ...] = ()
    dashes: str = "--"

    @property
    def key(self) -> str:
        """The name under which this flag is one with its aliases and its ``no-`` form."""
        name = ALIASES.get(self.name, self.name)
        return name.removeprefix("no-") if not self.values else name

    def tokens(self) -> list[str]:
        """Return the flag as command-line tokens."""
        written = self.dashes + self.name
        if len(self.values) == 1 and self.values[0].startswith("-") and not _NUMBER.fullmatch(self.values[0]):
            return [f"{written}={self.values[0]}"]
        return [written, *self.values]


Flags = tuple[Flag, ...]


class NotAFlagError(ValueError):
    """A token stands where a flag is expected."""

    def __init__(self, token: str) -> None:
        super().__init__(token)
        self.token = token


def parse(tokens: Iterable[str]) -> Flags:
    """Read ``--flag value``, ``--flag=value``, ``--flag a b`` and ``--switch``.

    A negative number is a value, every other token with a leading dash is a flag.

    :raises NotAFlagError: the first token is a value.
    """
    flags: list[Flag] = []
    for token in tokens:
        if token.startswith("-") and token != "-" and not _NUMBER.fullmatch(token):
            name, equals, value = token.partition("=")
            dashes = "--" if name.startswith("--") else "-"
            flags.append(Flag(name.removeprefix(dashes), (value,) if equals else (), dashes))
        elif not flags:
            raise NotAFlagError(token)
        else:
            last = flags[-1]
            flags[-1] = Flag(last.name, (*last.values, token), last.dashes)
    return tuple(flags)


def from_mapping(args: Mapping[str, object]) -> Flags:
    """Turn a recipe's ``args`` into flags.

    ``true`` makes a switch, ``false`` and ``null`` leave the flag out, a list makes several values.
    """
    flags = []
    for name, value in args.items():
        if value is None or value is False:
            continue
        if value is True:
            flags.append(Flag(name))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            flags.append(Flag(name, tuple(map(str, value))))
        else:
            flags.append(Flag(name, (str(value),)))
    return tuple(flags)


def merge(base: Flags, winning: Flags) -> Flags:
    """Return ``base`` without what ``winning`` sets, then ``winning`` as it stands."""
    keys = {flag.key for flag in winning}
    return (*(flag for flag in base if flag.key not in keys), *winning)


def value(flags: Flags, name: str, default: str | None = None) -> str | None:
    """Return the value that the engine would take for ``name``: the last one; an alias counts."""
    found = default
    for flag in flags:
        if flag.key == name and flag.values:
            found = flag.values[-1]
    return found


def has(flags: Flags, name: str) -> bool:
    """Tell whether ``name`` or an alias of it is set."""
    return any(flag.key == name and not flag.name.startswith("no-") for flag in flags)


def tokens(flags: Flags) -> list[str]:
    """Return the command line."""
    return [token for flag in flags for token in flag.tokens()]
