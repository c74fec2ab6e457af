"""The wheels of the two releases that a rebase goes between: which ones, and how they are read."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_bw.errors import UnknownBaseError
from sglang_bw.fork import releases, upstream
from sglang_bw.fork.apply import Progress
from sglang_bw.fork.rebase.state import Request
from sglang_bw.fork.series import Pins, Series
from sglang_bw.fork.wheel import Wheel, read_wheel

Reader = Callable[[], Wheel]


@dataclass(frozen=True)
class Wheels:
    """The two releases: names and digests, and how to read the files when they are needed."""

    base: Pins
    new: Pins
    base_name: str
    new_name: str
    read_base: Reader
    read_new: Reader

    def fetch_new(self) -> Path:
        """Return the new release's wheel as a file."""
        return upstream.fetch(self.new, self.new_name)

    def reading(self, beside: Executor) -> Wheels:
        """Return the same with the new release being read already: git has work meanwhile, and it is needed twice."""
        return replace(self, read_new=beside.submit(self.read_new).result)


def find_wheels(series: Series, new: str, wheel: Path | None, progress: Progress) -> Wheels:
    """Find the new release with the user's index, or take the named file."""
    if wheel:
        name, digest = upstream.keep(wheel)
        # Read before it is pinned: what is no wheel of this release must not begin a rebase.
        read_wheel(upstream.cache_folder() / digest / name, sha256=digest, version=new)
        pins = Pins(version=new, wheels={name: digest})
    else:
        progress(f"asking the index for SGLang {new}")
        pins = Pins(version=new, wheels=releases.find(new, releases.listed()).pins)
        name = pick_any(pins)
        progress(f"fetching {name}")
        upstream.fetch(pins, name)
    return with_readers(series, pins, name)


def known_wheels(series: Series, request: Request, wheel: Path | None) -> Wheels:
    """Return the wheels of a rebase that was begun; the new one may be brought along as a file again."""
    if wheel:
        upstream.keep(wheel)
    pins = Pins(version=request.new, wheels=request.new_wheels)
    return with_readers(series, pins, request.new_wheel)


def with_readers(series: Series, pins: Pins, name: str) -> Wheels:
    """Return the two releases with a reader each; a wheel is fetched when it is first read."""
    base_name = pick_any(series.pins)

    def reader(of: Pins, file: str) -> Callable[[], Wheel]:
        return lambda: read_wheel(upstream.fetch(of, file), sha256=of.wheels[file], version=of.version)

    return Wheels(
        base=series.pins,
        new=pins,
        base_name=base_name,
        new_name=name,
        read_base=reader(series.pins, base_name),
        read_new=reader(pins, name),
    )


def pick_any(pins: Pins) -> str:
    """Return the wheel to work on: this Python's and machine's, else any, since all hold the same text."""
    try:
        return upstream.pick_wheel(pins, upstream.this_python(), upstream.this_machine())
    except UnknownBaseError:
        return min(pins.wheels)
