"""What `probe round` measured on this host, as the start of the goodput policy's table of costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from sglang_bw.host import probes
from sglang_bw.launch.command import Command
from sglang_bw.recipes import chain, flags
from sglang_bw.recipes.flags import Flag

CONFIG_FLAG = "speculative-adaptive-config"


class _Line(BaseModel):
    straight: bool | None


class _Stored(BaseModel):
    complete: bool
    taken: str
    table: list[tuple[int, int, float]]
    rounds: list[_Line]

    @property
    def usable(self) -> bool:
        """Whether all was measured, and every line of it can be believed."""
        return self.complete and not any(line.straight is False for line in self.rounds)


@dataclass(frozen=True)
class Seed:
    """A stored result that a launch begins with.

    :ivar probe: the result's file.
    :ivar taken: when, as the file says it.
    :ivar config: the engine's --speculative-adaptive-config.
    """

    probe: Path
    taken: str
    config: Mapping[str, Any]

    def give(self, command: Command) -> Command:
        """Write the config beside the result and return the launch with it.

        :raises OutputError: it cannot be written.
        """
        place = self.probe.with_name(f"policy-{self.probe.name}")
        probes.write(place, dict(self.config))
        return replace(command, flags=(*command.flags, Flag(CONFIG_FLAG, (str(place),))))


def find(command: Command, host_key: str, recipe: str) -> Seed | None:
    """Return what a launch can begin with: the result of this host, this recipe and these steps.

    ``None`` for a launch without the goodput policy, or with a config of its own.

    :param host_key: of :class:`~sglang_bw.host.fingerprint.Fingerprint`.
    """
    steps = flags.value(command.flags, "speculative-num-steps")
    policy = flags.value(command.flags, "speculative-adaptive-policy")
    if policy != "goodput" or steps is None or flags.has(command.flags, CONFIG_FLAG):
        return None
    place = probes.place("round", host_key, recipe, command.device)
    try:
        stored = _Stored.model_validate_json(place.read_bytes())
    except (OSError, ValidationError):
        return None
    rows = [list(row) for row in stored.table if row[0] <= int(steps)]
    if not stored.usable or not any(row[0] for row in rows):
        return None
    candidate_steps = list(chain.candidates(int(steps)))
    return Seed(place, stored.taken, {"1": {"candidate_steps": candidate_steps}, "costs": rows})
