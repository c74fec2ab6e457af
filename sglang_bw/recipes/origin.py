"""What a measurement was taken on, and whether it holds for a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_bw.recipes import flags
from sglang_bw.recipes.flags import Flags

# Flags that change what a round takes, whatever its number of drafts is.
_FLAGS = (
    "model-path",
    "speculative-draft-model-path",
    "tp-size",
    "pp-size",
    "dp-size",
    "quantization",
    "speculative-draft-model-quantization",
    "kv-cache-dtype",
    "attention-backend",
    "moe-runner-backend",
)


def of_flags(line: Flags) -> dict[str, str]:
    """Return what of a command line a measurement depends on."""
    found = {name: flags.value(line, name) for name in _FLAGS}
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Origin:
    """Where a measurement comes from; what is empty is not known.

    :ivar host: key of the host's fingerprint.
    :ivar engine: version.
    :ivar launch: flags of :func:`of_flags`.
    """

    host: str = ""
    recipe: str = ""
    engine: str = ""
    device: str = ""
    launch: Mapping[str, str] = field(default_factory=dict)

    def differs(self, wanted: Origin) -> str:
        """Return what a launch has that this was not measured with, in words; empty where nothing is known to."""
        said = [
            f"{name} {mine}, not {theirs}"
            for name in ("recipe", "engine", "device")
            if (mine := getattr(self, name)) and (theirs := getattr(wanted, name)) and mine != theirs
        ]
        if self.host and wanted.host and self.host != wanted.host:
            said.insert(0, "another host")
        if self.launch and wanted.launch:
            for name in sorted({*self.launch, *wanted.launch}):
                mine, theirs = self.launch.get(name, "unset"), wanted.launch.get(name, "unset")
                if mine != theirs:
                    said.append(f"--{name} {mine}, not {theirs}")
        return "; ".join(said)
