"""What `probe round` measured on this host, as the start of the goodput policy's table of costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from sglang_bw.errors import SpeculationInputError
from sglang_bw.host import probes
from sglang_bw.launch.command import Command
from sglang_bw.plan.speculation.probe import doubt
from sglang_bw.recipes import chain, flags
from sglang_bw.recipes.flags import Flag
from sglang_bw.recipes.origin import Origin, of_flags

CONFIG_FLAG = "speculative-adaptive-config"


class _Stored(BaseModel):
    taken: str
    table: list[tuple[int, int, float]]


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


def find(command: Command, wanted: Origin) -> tuple[Seed | None, str]:
    """Return what a launch can begin with: the result of this host, recipe, engine and launch, for its steps.

    Nothing for a launch without the goodput policy, or with a config of its own.

    :param wanted: what the launch is; its flags are taken from ``command``.
    :return: it, and why a result that is there is not used, in words.
    """
    steps = flags.value(command.flags, "speculative-num-steps")
    policy = flags.value(command.flags, "speculative-adaptive-policy")
    place = probes.place("round", wanted.host, wanted.recipe, command.device)
    if policy != "goodput" or steps is None or flags.has(command.flags, CONFIG_FLAG) or not place.is_file():
        return None, ""
    try:
        if why := doubt(place, replace(wanted, device=command.device, launch=of_flags(command.flags))):
            return None, f"{place} is not used: {why}"
        stored = _Stored.model_validate_json(place.read_bytes())
    except (SpeculationInputError, OSError, ValidationError):
        return None, f"{place} is not used: it is no result of `sglang-bw probe round`"
    rows = [list(row) for row in stored.table if row[0] <= int(steps)]
    if not any(row[0] for row in rows):
        return None, f"{place} is not used: it has no round of up to {steps} steps"
    candidate_steps = list(chain.candidates(int(steps)))
    return Seed(place, stored.taken, {"1": {"candidate_steps": candidate_steps}, "costs": rows}), ""
