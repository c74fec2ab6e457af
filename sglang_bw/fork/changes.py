"""What becomes of the patches from one engine to another: told by the bytes of their files, then by their topic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_bw.fork.record import PatchRecord


@dataclass(frozen=True)
class PatchChanges:
    """Patches of two engines side by side.

    ``kept``: the same bytes, whatever number they have; ``changed``: the same topic with other bytes, old and new;
    ``dropped`` and ``added``: the topic is in one of them only.
    """

    dropped: tuple[PatchRecord, ...] = ()
    changed: tuple[tuple[PatchRecord, PatchRecord], ...] = ()
    added: tuple[PatchRecord, ...] = ()
    kept: tuple[PatchRecord, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "dropped": [patch.model_dump() for patch in self.dropped],
            "changed": [{"old": old.model_dump(), "new": new.model_dump()} for old, new in self.changed],
            "added": [patch.model_dump() for patch in self.added],
            "kept": [patch.file for patch in self.kept],
        }


def compare(old: Sequence[PatchRecord], new: Sequence[PatchRecord]) -> PatchChanges:
    """Compare the patches of two engines; the order of the result is that of the series."""
    same = {patch.sha256 for patch in old} & {patch.sha256 for patch in new}
    gone = [patch for patch in old if patch.sha256 not in same]
    come = [patch for patch in new if patch.sha256 not in same]
    # The last of a topic wins; lint keeps topics apart by their numbers only.
    before = {patch.topic: patch for patch in gone}
    after = {patch.topic: patch for patch in come}
    both = before.keys() & after.keys()
    return PatchChanges(
        dropped=tuple(patch for patch in gone if patch.topic not in both or before[patch.topic] is not patch),
        changed=tuple((before[topic], patch) for topic, patch in after.items() if topic in both),
        added=tuple(patch for patch in come if patch.topic not in both or after[patch.topic] is not patch),
        kept=tuple(patch for patch in new if patch.sha256 in same),
    )
