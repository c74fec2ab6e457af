"""When an adaptive policy changed its draft steps, from what it said while blocks ran."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_bw.ledger.record import PolicyLook, RunRecord


@dataclass(frozen=True)
class Switch:
    """A change between two looks.

    :ivar at_s: of the later look, seconds since the first block began.
    :ivar count: switches between the two looks; more than one were too quick to be seen one by one.
    :ivar reason: of the last of them, in the policy's words.
    """

    arm: str
    at_s: float
    before: int
    after: int
    count: int
    reason: str


def switches(run: RunRecord) -> list[Switch]:
    """Return the switches of both arms, the earliest first."""
    found: list[Switch] = []
    last: dict[str, PolicyLook] = {}
    began = min((block.began for block in run.blocks), default=run.began)
    for block in sorted(run.blocks, key=lambda one: one.began):
        offset = (block.began - began).total_seconds()
        for look in block.policy:
            before = last.get(block.arm)
            last[block.arm] = look
            # A counter that went back is a server that was started again.
            if before and look.switches > before.switches:
                found.append(
                    Switch(
                        block.arm, offset + look.at_s, before.steps, look.steps,
                        look.switches - before.switches, look.reason,
                    )
                )  # fmt: skip
    return sorted(found, key=lambda one: one.at_s)
