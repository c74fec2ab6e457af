"""Patch files from commits: their names, what the format asks of them, and writing them."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sglang_bw.errors import LintError, LocalSeriesError, OutputError
from sglang_bw.fork import lint as series_lint
from sglang_bw.fork import local as local_lint
from sglang_bw.fork.patchtree.target import NUMBER, Export, Target, TreeState, digests, topic_of
from sglang_bw.fork.scratch import Exported, Scratch
from sglang_bw.fork.series import ORDER_FILE, Series


def named_files(exported: Sequence[Exported], topic: str) -> dict[str, bytes]:
    """Return file name -> bytes: a commit keeps its name, numbers grow, and a new one gets the topic or its subject."""
    named: dict[str, bytes] = {}
    last = 0
    topics: set[str] = set()
    for one in exported:
        match = NUMBER.fullmatch(one.name.partition("\n")[0])
        if match and match[2] not in topics:
            number, name = int(match[1]), match[2]
        else:
            number, name = 0, topic if topic and topic not in topics else _slug(one.subject)
            topic = "" if name == topic else topic
        last = number if number > last else last + 1
        topics.add(name)
        named[f"{last:04d}-{name}.patch"] = one.data
    return named


def check(target: Target, named: dict[str, bytes]) -> tuple[str, ...]:
    """Lint what is to be written, and return what is only not filled in yet.

    :raises LintError: everything else that is wrong.
    """
    with tempfile.TemporaryDirectory(prefix="sglang-bw-export-") as place:
        # Two levels deep, as in a checkout: lint looks for tests beside the folder's parent.
        folder = Path(place) / "patches" / target.series.base
        folder.mkdir(parents=True)
        for name, data in named.items():
            (folder / name).write_bytes(data)
        if target.local:
            findings = local_lint.lint(local_lint.LocalSeries(folder, tuple(named)), target.series.base)
        else:
            findings = series_lint.lint(Series(folder, target.series.pins, tuple(named)))
    unfilled = tuple(text for text in findings if text.endswith(series_lint.UNFILLED))
    wrong = [text for text in findings if text not in unfilled and not text.startswith("upstream.toml:")]
    if wrong:
        kind = LocalSeriesError if target.local else LintError
        raise kind(
            wrong,
            hint="nothing was written. Amend the commit in the scratch tree (`git commit --amend`, or `git rebase -i`"
            " for an older one), then export again",
        )
    return unfilled


def write(
    scratch: Scratch, state: TreeState, target: Target, named: dict[str, bytes], unfilled: tuple[str, ...]
) -> Export:
    """Bring the folder to ``named``: each file in one step, the order file last, and a kill in between is known."""
    folder = target.folder
    new = {name: hashlib.sha256(data).hexdigest() for name, data in named.items()}
    there = digests(sorted(folder.glob("*.patch")))
    written = tuple(name for name in new if there.get(name) != new[name])
    removed = tuple(name for name in there if name not in new)
    scratch.write_state(state.model_copy(update={"writing": new}))
    try:
        if written or removed or new:
            folder.mkdir(parents=True, exist_ok=True)
        for name in written:
            _replace(folder / name, named[name])
        if list(new) != [path.name for path in target.files()]:
            _replace(folder / ORDER_FILE, _order_text(folder / ORDER_FILE, new).encode())
        for name in removed:
            (folder / name).unlink()
    except OSError as error:
        raise OutputError(
            f"cannot write to {folder}: {error.strerror}",
            hint="the same command goes on where this one stopped",
        ) from None
    commits = scratch.repo.run("rev-list", "--reverse", "--topo-order", f"{state.start}..HEAD").text.split()
    scratch.set_names(dict(zip(commits, new, strict=True)))
    head = scratch.repo.run("rev-parse", "HEAD").text
    # A topic for which nothing was edited yet stays open.
    topic = "" if any(topic_of(name) == state.topic for name in new) else state.topic
    scratch.write_state(TreeState(start=state.start, head=head, below=state.below, files=new, topic=topic))
    return Export(scratch.tree, tuple(new), written, removed, unfilled)


def _order_text(path: Path, names: Iterable[str]) -> str:
    """Return the order file's text; the comment it begins with stays."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return "".join(f"{line}\n" for line in (*_leading_comment(lines), *names))


def _leading_comment(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("#"):
            return
        yield line


def _replace(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=".", delete=False) as file:
        file.write(data)
    Path(file.name).chmod(0o644)
    os.replace(file.name, path)  # noqa: PTH105


def _slug(subject: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"^\[[^]]*\]", "", subject).lower())[:52].strip("-") or "patch"
