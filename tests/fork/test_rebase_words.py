"""Each word for the case it stands for, on small releases with real wheels."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sglang_bw.fork import upstream as cache
from sglang_bw.fork.rebase import job
from sglang_bw.fork.rebase.outcome import HunkWord, PatchOutcome, Word
from sglang_bw.fork.rebase.report import Report
from tests.fakeupstream import FakeUpstream, release

OLD, NEW = "2.0.0", "2.1.0"
TRAILERS = {"Applies-To": ">=2.0"}

RUNNER = b"""import os

LIMITS = {
    9: 1,
    10: 2,
    11: 3,
}


class Runner:
    size = 1

    def load(self):
        path = os.getcwd()
        self.loaded = path
        return path

    def run(self):
        self.load()
        return self.size

    def stop(self):
        self.loaded = None
        return None


def main():
    runner = Runner()
    runner.run()
    runner.stop()
    return runner
"""

BLOCK = b"    first()\n    second()\n    third()\n"


def edit(data: bytes, *changes: tuple[bytes, bytes]) -> bytes:
    for old, new in changes:
        assert data.count(old) == 1, old
        data = data.replace(old, new)
    return data


@dataclass(frozen=True)
class Case:
    word: Word
    patched: dict[str, bytes | None]
    new: dict[str, bytes]
    old: dict[str, bytes] = field(default_factory=lambda: {"sglang/runner.py": RUNNER})
    gone: tuple[str, ...] = ()
    says: str = ""
    hunks: tuple[HunkWord, ...] = ()
    applies: str = ">=2.0"
    status: str = "Pending"


HOOK = b"    @classmethod\n    def hook(cls, config):\n        return config.size\n\n    def stop(self)"
OWN_HOOK = b"    @classmethod\n    def hook(cls, config):\n        text = config.text\n        return text.size\n\n"
EQUAL = b"def f%d():\n    x = %d\n    return x\n\n"
OTHER_HOOK = b"    def hook(self):\n        pass\n\n"
LATE = b"\n\ndef late():\n    return 1\n"

PRIVATE = edit(RUNNER, (b"    def stop(self)", b"    def _stop(self)"))
BACKPORT = "Backport [https://example.org/1, in 2.1.0]"
GUARD = b"        self.load()\n        assert self.size\n        return self.size"
OWN_GUARD = b"""        self.ready = True
        self.load()
        # Upstream's own layout and words.
        assert (
            self.size
        ), "no size"
        return int(self.size)"""
GUARDED = (b"        self.load()\n        return self.size", GUARD)
OWN_GUARDED = (b"        self.load()\n        return self.size", OWN_GUARD)
DRAFT = (b"        path = os.getcwd()\n", b"        path = os.getcwd()\n        self.draft = True\n")
OWN_DRAFT = (b"        return path\n", b"        self.draft = self.size\n        return path\n")

CASES = {
    "nothing moved": Case(
        Word.CLEAN,
        {"sglang/runner.py": edit(RUNNER, (b"size = 1", b"size = 2"))},
        {"sglang/runner.py": RUNNER},
    ),
    "lines moved": Case(
        Word.OFFSET,
        {"sglang/runner.py": edit(RUNNER, (b"size = 1", b"size = 2"))},
        {"sglang/runner.py": b"import sys\n" + RUNNER},
    ),
    "renamed file": Case(
        Word.OFFSET,
        {"sglang/runner.py": edit(RUNNER, (b"size = 1", b"size = 2"))},
        {"sglang/core/motor.py": RUNNER + b"\n# moved\n"},
        gone=("sglang/runner.py",),
        says="python/sglang/runner.py is python/sglang/core/motor.py now",
    ),
    "upstream has the lines": Case(
        Word.MERGED,
        {"sglang/runner.py": edit(RUNNER, (b"size = 1", b"size = 2"))},
        {"sglang/runner.py": b"import sys\n" + edit(RUNNER, (b"size = 1", b"size = 2"))},
        says="the same lines: python/sglang/runner.py:12",
        hunks=(HunkWord.MERGED,),
    ),
    "upstream has the member, elsewhere in the class": Case(
        Word.MERGED,
        {"sglang/runner.py": edit(RUNNER, (b"    def stop(self)", HOOK))},
        {"sglang/runner.py": edit(RUNNER, (b"    def load(self)", HOOK.replace(b"stop", b"load")))},
        says="upstream has Runner.hook: python/sglang/runner.py:14",
        hunks=(HunkWord.MERGED,),
    ),
    "upstream has the member in words of its own": Case(
        Word.MERGED,
        {"sglang/runner.py": edit(RUNNER, (b"    def stop(self)", HOOK))},
        {"sglang/runner.py": edit(RUNNER, (b"    def load(self)", OWN_HOOK + b"    def load(self)"))},
        says="in words of its own",
        hunks=(HunkWord.OWN,),
    ),
    "upstream's member takes other parameters": Case(
        Word.CONFLICT,
        {"sglang/runner.py": edit(RUNNER, (b"    def stop(self)", HOOK))},
        {"sglang/runner.py": edit(RUNNER, (b"    def load(self)", OTHER_HOOK + b"    def load(self)"))},
        hunks=(HunkWord.CONFLICT,),
    ),
    "a function defined by both, far apart": Case(
        Word.CONFLICT,
        {"sglang/runner.py": RUNNER + LATE},
        {"sglang/runner.py": edit(RUNNER, (b"class Runner", b"def late(x):\n    return x\n\n\nclass Runner"))},
    ),
    "a table's key that upstream has with another value": Case(
        Word.CONFLICT,
        {"sglang/runner.py": edit(RUNNER, (b"    11: 3,\n", b"    11: 3,\n    12: 4,\n"))},
        {"sglang/runner.py": edit(RUNNER, (b"    9: 1,\n", b"    12: 5,\n    9: 1,\n"))},
    ),
    "a table's key that upstream has": Case(
        Word.MERGED,
        {"sglang/runner.py": edit(RUNNER, (b"    11: 3,\n", b"    11: 3,\n    12: 4,\n"))},
        {"sglang/runner.py": edit(RUNNER, (b"    9: 1,\n", b"    12: 4,\n    9: 1,\n"))},
        says="LIMITS[12]",
    ),
    "one hunk of two merged": Case(
        Word.PARTLY_MERGED,
        {"sglang/runner.py": edit(RUNNER, (b"    9: 1,", b"    9: 9,"), (b"runner.run()", b"runner.run(1)"))},
        {"sglang/runner.py": edit(RUNNER, (b"    9: 1,", b"    9: 9,"))},
        says="upstream has 1 of 2 hunks: 1 (python/sglang/runner.py:4)",
        hunks=(HunkWord.MERGED, HunkWord.APPLIED),
    ),
    "both change a line": Case(
        Word.CONFLICT,
        {"sglang/runner.py": edit(RUNNER, (b"size = 1", b"size = 2"))},
        {"sglang/runner.py": edit(RUNNER, (b"size = 1", b"size = 3"))},
        hunks=(HunkWord.CONFLICT,),
    ),
    "file deleted, function moved": Case(
        Word.GONE,
        {"sglang/runner.py": edit(RUNNER, (b"    return runner", b"    return None"))},
        {"sglang/home.py": b"X = 1\n\n\n" + RUNNER[RUNNER.index(b"def main") :]},
        gone=("sglang/runner.py",),
        says="see python/sglang/home.py:4",
        hunks=(HunkWord.GONE,),
    ),
    "function deleted, lives elsewhere": Case(
        Word.GONE,
        {"sglang/runner.py": edit(RUNNER, (b"    runner.stop()", b"    runner.stop(1)"))},
        {
            "sglang/runner.py": RUNNER[: RUNNER.index(b"def main")],
            "sglang/home.py": b"X = 1\n\n\n" + RUNNER[RUNNER.index(b"def main") :],
        },
        says="see python/sglang/home.py:4",
    ),
    "a member that the patch uses is not there any more": Case(
        Word.CONFLICT,
        {"sglang/other.py": b"def use(runner):\n    return runner.loaded\n"},
        {"sglang/runner.py": RUNNER.replace(b"loaded", b"filled")},
        hunks=(HunkWord.CONFLICT,),
    ),
    "a name that the patch uses is not there any more": Case(
        Word.CONFLICT,
        {"sglang/runner.py": edit(RUNNER, (b"size = 1", b"size = os.getpid()"))},
        {"sglang/runner.py": edit(RUNNER, (b"import os\n", b"from os import getcwd\n"), (b"os.getcwd", b"getcwd"))},
        hunks=(HunkWord.CONFLICT,),
    ),
    "a member that an earlier line of the same patch adds": Case(
        Word.CLEAN,
        {"sglang/other.py": b"class A:\n    def fresh(self):\n        return self.fresh\n"},
        {},
    ),
    "windows line ends": Case(
        Word.OFFSET,
        {"sglang/windows.py": b"first\r\n2nd\r\nthird\r\nfourth\r\n"},
        {"sglang/windows.py": b"zeroth\r\nfirst\r\nsecond\r\nthird\r\nfourth\r\n"},
        old={},
    ),
    "the nearest equal function is the wrong one": Case(
        Word.OFFSET,
        {"sglang/repeated.py": b"".join(EQUAL % (n, 1 + (n == 2)) for n in range(5))},
        {"sglang/repeated.py": b"".join(EQUAL % (n, 1) for n in (9, 0, 1, 2, 3, 4))},
        old={},
    ),
    "equal blocks in one function, one more upstream": Case(
        Word.CONFLICT,
        {"sglang/blocks.py": b"def f():\n" + BLOCK + BLOCK.replace(b"second()", b"second(1)") + BLOCK},
        {"sglang/blocks.py": b"def f():\n" + BLOCK * 4},
        old={"sglang/blocks.py": b"def f():\n" + BLOCK * 3},
    ),
    "a file that upstream adds too": Case(
        Word.CONFLICT,
        {"sglang/added.py": b"x = 1\ny = 2\n"},
        {"sglang/added.py": b"z = 1\n"},
        old={},
    ),
    "a file that upstream adds alike": Case(
        Word.MERGED,
        {"sglang/added.py": b"x = 1\ny = 2\n"},
        {"sglang/added.py": b"x = 1\ny = 2\n"},
        old={},
    ),
    "a rename loop": Case(
        Word.CONFLICT,
        {"sglang/runner.py": None, "sglang/motor.py": edit(RUNNER, (b"size = 1", b"size = 2"))},
        {"sglang/engine_of_old.py": RUNNER, "sglang/motor.py": b"def other():\n    return 1\n"},
        gone=("sglang/runner.py",),
    ),
    "outside of Applies-To": Case(
        Word.INAPPLICABLE,
        {"sglang/runner.py": edit(RUNNER, (b"size = 1", b"size = 2"))},
        {"sglang/runner.py": RUNNER},
        says="Applies-To >=2.0,<2.1 leaves out 2.1.0, otherwise clean: check that upstream does the same",
        applies=">=2.0,<2.1",
    ),
    "outside of Applies-To, and upstream has it": Case(
        Word.MERGED,
        {"sglang/runner.py": edit(RUNNER, (b"size = 1", b"size = 2"))},
        {"sglang/runner.py": b"import sys\n" + edit(RUNNER, (b"size = 1", b"size = 2"))},
        says="the same lines: python/sglang/runner.py:12",
        applies=">=2.0,<2.1",
    ),
    "upstream has the edit in its own layout": Case(
        Word.MERGED,
        {"sglang/runner.py": edit(RUNNER, GUARDED)},
        {"sglang/runner.py": edit(RUNNER, OWN_GUARDED)},
        says="the same code: python/sglang/runner.py:22",
        hunks=(HunkWord.MERGED,),
    ),
    "upstream has the lines, elsewhere in the function": Case(
        Word.CONFLICT,
        {"sglang/runner.py": edit(RUNNER, GUARDED)},
        {"sglang/runner.py": edit(RUNNER, (GUARDED[0], b"        assert self.size\n        load()\n        return 1"))},
    ),
    "upstream has one hunk in its own layout, the other is carried over": Case(
        Word.PARTLY_MERGED,
        {"sglang/runner.py": edit(RUNNER, GUARDED, (b"    11: 3,\n", b"    11: 3,\n    12: 4,\n"))},
        {"sglang/runner.py": edit(RUNNER, OWN_GUARDED)},
        says="upstream has 1 of 2 hunks: 2 (python/sglang/runner.py:22)",
        hunks=(HunkWord.APPLIED, HunkWord.MERGED),
    ),
    "upstream has one hunk, and the other has no certain place": Case(
        Word.CONFLICT,
        {"sglang/runner.py": edit(RUNNER, GUARDED, (b"    9: 1,", b"    9: 9,"))},
        {"sglang/runner.py": edit(RUNNER, OWN_GUARDED, (b"    9: 1,", b"    9: 8,"))},
        says="upstream has 1 of 2 hunks",
    ),
    "an attribute that both set": Case(
        Word.CONFLICT,
        {"sglang/runner.py": edit(RUNNER, DRAFT)},
        {"sglang/runner.py": edit(RUNNER, OWN_DRAFT)},
        hunks=(HunkWord.CONFLICT,),
    ),
    "known to be upstream, and its name is there": Case(
        Word.MERGED,
        {"sglang/runner.py": edit(RUNNER, DRAFT)},
        {"sglang/runner.py": edit(RUNNER, OWN_DRAFT)},
        says="Upstream-Status says so, and upstream has Runner.load.self.draft, but not the same",
        applies=">=2.0,<2.1",
        status=BACKPORT,
    ),
    "a function of the standard library that nothing else uses any more": Case(
        Word.OFFSET,
        {"sglang/runner.py": edit(RUNNER, (b"path = os.getcwd()", b"path = os.path.realpath(os.getcwd())"))},
        {"sglang/runner.py": b"import sys\n" + RUNNER},
        old={"sglang/runner.py": RUNNER, "sglang/other.py": b"import os\n\nREAL = os.path.realpath\n"},
        gone=("sglang/other.py",),
    ),
    "said to be upstream, and nothing of it is there": Case(
        Word.INAPPLICABLE,
        {"sglang/runner.py": edit(RUNNER, DRAFT)},
        {"sglang/runner.py": b"import sys\n" + RUNNER},
        says="otherwise offset: check that upstream does the same",
        applies=">=2.0,<2.1",
        status=BACKPORT,
    ),
    "a method became a function elsewhere, without its underscore": Case(
        Word.GONE,
        {"sglang/runner.py": edit(PRIVATE, (b"        self.loaded = None", b"        self.loaded = False"))},
        {
            "sglang/runner.py": PRIVATE[: PRIVATE.index(b"    def _stop")] + PRIVATE[PRIVATE.index(b"\ndef main") :],
            "sglang/home.py": b"X = 1\n\n\ndef stop(args):\n    args.loaded = None\n    return None\n",
        },
        old={"sglang/runner.py": PRIVATE},
        says="upstream has no Runner._stop any more; see python/sglang/home.py:4",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def moved(case: Case, folder: Path) -> tuple[FakeUpstream, Report]:
    """Move a series of one patch and return what came of it."""
    upstream = FakeUpstream(folder / "upstream", OLD, case.old)
    edits = {f"python/{path}": data for path, data in case.patched.items()}
    upstream.add_patch("case", edits, {"Applies-To": case.applies, "Upstream-Status": case.status})
    upstream.pin()
    cache.keep(upstream.wheel)
    old = {path: data for path, data in case.old.items() if path not in case.gone}
    wheel = release(folder, NEW, {**old, **case.new})
    return upstream, job.start(upstream.root, NEW, OLD, wheel, job.Options(), lambda step: None)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_word(case: Case, tmp_path: Path) -> None:
    upstream, report = moved(case, tmp_path)
    [outcome] = report.outcomes
    assert outcome.word is case.word, outcome
    assert case.says in outcome.says
    if case.hunks:
        assert tuple(hunk.word for hunk in outcome.hunks) == case.hunks, outcome
    assert (report.stopped is not None) == case.word.needs_a_person
    _require_consistent(outcome, report, upstream)


def _require_consistent(outcome: PatchOutcome, report: Report, upstream: FakeUpstream) -> None:
    written = upstream.root / NEW
    assert written.exists() == (not outcome.word.needs_a_person)
    if outcome.word.needs_a_person:
        assert outcome.conflicts or any(hunk.word is not HunkWord.APPLIED for hunk in outcome.hunks)
        assert report.needs_a_person
    else:
        kept = (written / "series").read_text().split()
        assert kept == ([] if outcome.word.is_dropped else ["0001-case.patch"])
