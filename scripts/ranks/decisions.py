"""What the ranks of one server decided, round by round, and whether they decided the same.

A rank's file has a line for each decode launch (``launch,batch,steps``) and for each finished round
(``round,batch,steps,crc32 of the accepted drafts``), in the order in which that rank met them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path

from record.servers import Record

Lines = list[str]


@dataclass
class Log:
    """The files of a server's ranks, read from where the last reading ended.

    :ivar seen: bytes of each file that were read.
    """

    folder: Path
    seen: dict[str, int]

    @classmethod
    def of(cls, folder: Path) -> Log:
        """Make the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, {})

    def new(self) -> dict[str, Lines]:
        """Return each rank's new lines; a half line waits for the next reading."""
        found = {}
        for path in sorted(self.folder.glob("rank*")):
            start = self.seen.get(path.name, 0)
            with path.open("rb") as file:
                file.seek(start)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self.seen[path.name] = start + len(whole)
            found[path.name] = whole.decode().splitlines()
        return found


def compare(ranks: dict[str, Lines], world: int) -> Record:
    """Return how far the ranks agree, and where they first do not.

    :param ranks: lines of each rank.
    :param world: how many ranks there must be.
    """
    first, *others = list(ranks.values()) or [[]]
    found: Record = {
        "ranks": len(ranks),
        "launches": sum(line.startswith("launch") for line in first),
        "rounds": sum(line.startswith("round") for line in first),
        "steps": dict(Counter(line.split(",")[2] for line in first if line.startswith("launch"))),
        "switches": _switches(first),
        "first_difference": None,
    }
    for other in others:
        for number, (one, two) in enumerate(zip_longest(first, other)):
            if one != two:
                found["first_difference"] = {"line": number, "lines": [one, two]}
                break
    found["same"] = len(ranks) == world and found["launches"] > 0 and found["first_difference"] is None
    return found


def _switches(lines: Lines) -> int:
    """Count changes of the steps between launches of the same batch."""
    launches = [line.split(",")[1:3] for line in lines if line.startswith("launch")]
    return sum(one[0] == two[0] and one[1] != two[1] for one, two in pairwise(launches))
