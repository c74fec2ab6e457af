"""The second merger: it joins a patch and a new release unit by unit, knows nothing of git, and guesses nothing.

Git joins by lines, so it can end "cleanly" with a hunk at the wrong one of two equal blocks, or with a function defined
twice. Here an edit must lie between lines that occur exactly once in its function, before and after; a function that
upstream did not touch must end as the patch leaves it; everything else must stay as upstream has it. A result of git's
counts only when this merger comes to the same.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from sglang_bw.fork.rebase.units import Lines, Unit, every_thing, is_divisible, units

# The borders of a unit, as lines that no file has.
_START, _END = b"<start>", b"<end>"
_CHANGED = "upstream changed the lines around an edit of the patch"


@dataclass(frozen=True)
class Doubt:
    """Why a result cannot be trusted, with the unit and its line in the new release."""

    path: str
    unit: str
    line: int
    why: str
    theirs: Lines = ()
    ours: Lines = ()
    gone: bool = False


@dataclass
class Joined:
    """What a merger makes of one file: unit -> text, and what it cannot decide."""

    texts: dict[str, Lines] = field(default_factory=dict)
    doubts: list[Doubt] = field(default_factory=list)


def examine(path: str, old: bytes, patched: bytes, new: bytes, result: bytes) -> list[Doubt]:
    """Return why ``result`` is not certainly what the patch means on the new file; nothing means it is.

    :param old: the file before the patch, on the old release.
    :param patched: the same after the patch.
    :param new: the file of the new release, with the patches before this one.
    :param result: what git made.
    """
    if new == old and result == patched:
        return []
    if not all(is_divisible(path, data) for data in (old, patched, new, result)):
        path = ""  # compared as one unit
    joined = join(path, old, patched, new)
    if joined.doubts:
        return joined.doubts
    found = units(path, result)
    texts = {unit.key: unit.text for unit in found}
    doubts = [
        Doubt(path, unit.key, unit.start + 1, f"git and the second merger disagree about {unit.key or 'the file'}",
              joined.texts.get(unit.key, ()), unit.text)
        for unit in found
        if joined.texts.get(unit.key, ()) != unit.text
    ]  # fmt: skip
    doubts += [
        Doubt(path, key, 0, f"{key} is lost in git's result", text) for key, text in joined.texts.items()
        if text and key not in texts
    ]  # fmt: skip
    return doubts or _order(path, patched, new, found) or twice(path, patched, new, result)


def _order(path: str, patched: bytes, new: bytes, found: Sequence[Unit]) -> list[Doubt]:
    """Doubt a result in which units come in another order than upstream's, or a new one has other neighbours."""
    at = {unit.key: number for number, unit in enumerate(found)}
    theirs = [unit.key for unit in units(path, new) if unit.key in at and unit.key != "<end>"]
    if theirs != sorted(theirs, key=at.__getitem__):
        return [Doubt(path, "", 0, "statements come in another order than upstream's")]
    known = set(theirs)
    mine = [unit.key for unit in units(path, patched) if unit.key in at and unit.key != "<end>"]
    for number, key in enumerate(mine):
        before = next((other for other in reversed(mine[:number]) if other in known), None)
        after = next((other for other in mine[number + 1 :] if other in known), None)
        wrong = (before is not None and at[before] > at[key]) or (after is not None and at[after] < at[key])
        if key not in known and wrong:
            return [Doubt(path, key, 0, f"{key} lies between other neighbours than in the patch")]
    return []


def twice(path: str, patched: bytes, new: bytes, result: bytes) -> list[Doubt]:
    """Doubt a result that defines something more often than both sides do."""
    counts, mine, theirs = (_definitions(path, data) for data in (result, patched, new))
    return [
        Doubt(path, name, 0, f"{name} is defined {count} times in the result")
        for name, count in counts.items()
        if count > max(mine.get(name, 1), theirs.get(name, 1))
    ]


def _definitions(path: str, data: bytes) -> dict[str, int]:
    """Return how often each name is defined in one and the same arm of a branch."""
    counts = Counter((thing.name, thing.branch) for thing in every_thing(path, data))
    most: dict[str, int] = {}
    for (name, _), count in counts.items():
        most[name] = max(most.get(name, 0), count)
    return most


def join(path: str, old: bytes, patched: bytes, new: bytes) -> Joined:
    """Join the three versions unit by unit; texts are without blank lines at their ends."""
    before, after, theirs = ({unit.key: unit for unit in units(path, data)} for data in (old, patched, new))
    joined = Joined()
    for key, unit in theirs.items():
        mine, origin = after.get(key), before.get(key)
        if origin is None and mine is None:
            joined.texts[key] = unit.text
        elif origin is None and mine is not None:
            _added_by_both(path, mine, unit, joined)
        elif mine is None and origin is not None:
            if unit.text != origin.text:
                why = f"the patch deletes {key}, and upstream changed it"
                joined.doubts.append(Doubt(path, key, unit.start + 1, why, unit.text))
        elif mine is not None and origin is not None:
            _changed(path, origin, mine, unit, joined)
    for key, unit in after.items():
        if key not in theirs and key not in before:
            joined.texts[key] = unit.text
        elif key not in theirs and before[key].text != unit.text:
            where = key or "the file"
            joined.doubts.append(Doubt(path, key, 0, f"{where} is not there any more", (), unit.text, gone=True))
    return joined


def _added_by_both(path: str, mine: Unit, theirs: Unit, joined: Joined) -> None:
    joined.texts[theirs.key] = theirs.text
    if mine.text != theirs.text:
        line = theirs.code + 1
        joined.doubts.append(
            Doubt(path, mine.key, line, f"upstream has a {mine.key} of its own", theirs.text, mine.text)
        )


def _changed(path: str, origin: Unit, mine: Unit, theirs: Unit, joined: Joined) -> None:
    if origin.text == mine.text:
        joined.texts[theirs.key] = theirs.text
    elif theirs.text in (origin.text, mine.text):
        joined.texts[theirs.key] = mine.text
    else:
        text, why = join_lines(origin.text, mine.text, theirs.text)
        joined.texts[theirs.key] = text
        if why:
            joined.doubts.append(Doubt(path, theirs.key, theirs.code + 1, why, theirs.text, mine.text))


def join_lines(old: Lines, patched: Lines, new: Lines) -> tuple[Lines, str]:
    """Carry the edits between ``old`` and ``patched`` over to ``new``.

    Each edit is found by the lines around it: the fewest that occur once in ``old`` must occur once in ``new``.
    Returns the joined lines, and the reason when an edit has no certain place.
    """
    edits = [code for code in SequenceMatcher(None, old, patched, autojunk=False).get_opcodes() if code[0] != "equal"]
    places: list[tuple[int, int, Lines]] = []
    for _, first, last, begin, end in edits:
        at, why, moved = _place_anywhere((_START, *old, _END), (_START, *new, _END), first + 1, last + 1,
                                         patched[begin:end])  # fmt: skip
        if at is None:
            if _has(patched, new, begin, end) and not _has(old, new, first, last):
                continue  # upstream made the same edit
            return new, why
        places.append((at - 1, at - 1 + last - first, moved))
    if any(earlier[1] > later[0] for earlier, later in itertools.pairwise(places)):
        return new, "edits change their order"
    lines = list(new)
    for start, stop, text in reversed(places):
        lines[start:stop] = text
    return tuple(lines), ""


def _place_anywhere(old: Lines, new: Lines, first: int, last: int, text: Lines) -> tuple[int | None, str, Lines]:
    """Return where an edit that puts ``text`` in place of ``old[first:last]`` lies in ``new``, and its text there.

    Lines that only go or only come can be told at several places: a block between two blank lines goes with the one
    before it or the one after it. Where upstream changed the lines around one of these, another may still be certain.
    """
    at, why = _place(old, new, first, last)
    if at is not None or why != _CHANGED:
        return at, why, text
    found: dict[int, tuple[int, Lines]] = {}
    for shift, moved in _slid(old, first, last, text):
        place, other = _place(old, new, first + shift, last + shift)
        if place is not None:
            found.setdefault(place - shift, (place, moved))
        elif other != _CHANGED:
            return None, other, text
    if len(found) != 1:
        return None, why, text
    [(place, moved)] = found.values()
    return place, "", moved


def _slid(old: Lines, first: int, last: int, text: Lines) -> Iterator[tuple[int, Lines]]:
    """Yield how far (negative: up) an edit can be told elsewhere with the same result, and its text there."""
    if last > first and text:
        return
    for step in (-1, 1):
        shift, moved = 0, text
        while True:
            # The line that the edit would jump over has to be the one that it takes in at its other end.
            over = first + shift - 1 if step < 0 else last + shift
            if not 0 < over < len(old) - 1:
                break
            within = moved or old[first + shift : last + shift]
            if old[over] != (within[-1] if step < 0 else within[0]):
                break
            shift += step
            if moved:
                moved = (moved[-1], *moved[:-1]) if step < 0 else (*moved[1:], moved[0])
            yield shift, moved


def _place(old: Lines, new: Lines, first: int, last: int) -> tuple[int | None, str]:
    """Return where ``old[first:last]`` lies in ``new``; both have their borders as lines.

    The lines before it and the lines after it, each as few as are needed, must not point at another place.
    """
    at, why = _by_window(old, new, first, last)
    if at is None:
        return None, why
    for margin in range(1, first + 1):
        window = old[first - margin : first]
        if len(_found(window, old)) == 1:
            there = [place + margin for place in _found(window, new)]
            if there and at not in there:
                return None, "the lines before an edit of the patch point at another place than the lines around it"
            break
    for margin in range(1, len(old) - last + 1):
        window = old[last : last + margin]
        if len(_found(window, old)) == 1:
            there = [place - (last - first) for place in _found(window, new)]
            if there and at not in there:
                return None, "the lines after an edit of the patch point at another place than the lines around it"
            break
    return at, ""


def _by_window(old: Lines, new: Lines, first: int, last: int) -> tuple[int | None, str]:
    for margin in range(1, max(first, len(old) - last) + 1):
        begin = max(first - margin, 0)
        window = old[begin : last + margin]
        if len(_found(window, old)) > 1:
            continue
        there = _found(window, new)
        if len(there) == 1:
            return there[0] + first - begin, ""
        if not there:
            return None, _CHANGED
    return None, "the lines around an edit of the patch occur more than once"


def _has(source: Lines, target: Lines, first: int, last: int) -> bool:
    """Whether lines of ``source`` with a neighbour on each side occur in ``target``."""
    return bool(_found(source[max(first - 1, 0) : last + 1], target))


def _found(window: Lines, lines: Lines) -> list[int]:
    if not window:
        return []
    size = len(window)
    return [at for at in range(len(lines) - size + 1) if lines[at] == window[0] and lines[at : at + size] == window]
