"""Places that a person must look at: git's conflict markers, and the doubts of the second merger."""

from __future__ import annotations

from sglang_bw.fork.rebase.outcome import Conflict
from sglang_bw.fork.rebase.semantic import Doubt

_MARKS = (b"<<<<<<< ", b"||||||| ", b"=======", b">>>>>>> ")
_SHOWN = 40


def marked_places(path: str, data: bytes) -> list[Conflict]:
    """Return each place between conflict markers with the lines of both sides."""
    found: list[Conflict] = []
    side, begin, texts = -1, 0, [b"", b"", b"", b""]
    for number, line in enumerate(data.split(b"\n"), start=1):
        mark = next((at for at, text in enumerate(_MARKS) if line.rstrip(b"\r").startswith(text)), -1)
        if mark == 0:
            side, begin, texts = 0, number, [b"", b"", b"", b""]
        elif mark == 3 and side >= 0:
            why = "upstream and the patch change the same lines"
            found.append(Conflict(path=path, line=begin, why=why, theirs=_text(texts[0]), ours=_text(texts[2])))
            side = -1
        elif mark > 0 and side >= 0:
            side = mark
        elif side >= 0:
            texts[side] += line + b"\n"
    return found


def conflict_of(doubt: Doubt) -> Conflict:
    """Return a doubt as a place that a person must look at."""
    return Conflict(
        path=doubt.path,
        line=doubt.line,
        why=doubt.why,
        theirs=_text(b"".join(doubt.theirs)),
        ours=_text(b"".join(doubt.ours)),
    )


def _text(data: bytes) -> str:
    lines = data.decode("utf-8", "replace").splitlines()
    return "\n".join(lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"... {len(lines) - _SHOWN} more lines"])
