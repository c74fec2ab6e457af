"""Making a bundle: fetch, check, write down, pack. A killed run loses no finished download."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import sglang_bw
from sglang_bw.bundle import archive, sbom, toolwheel, wheels
from sglang_bw.bundle.archive import Member
from sglang_bw.bundle.manifest import (
    HEAD,
    MANIFEST,
    PARTS,
    REQUIREMENTS,
    SBOM,
    SCRIPT,
    SUMS,
    TARGET,
    WHEELS,
    BundledWheel,
    LeftOut,
    Manifest,
    Part,
    User,
    digest_of,
    parts_text,
    sums_text,
)
from sglang_bw.bundle.members import check_wheel
from sglang_bw.bundle.plan import Plan
from sglang_bw.bundle.wheels import Chosen, Pip
from sglang_bw.errors import OutputError
from sglang_bw.fork.installers import Report, locked
from sglang_bw.fork.wheelhouse import PatchedWheel

# Fetched wheels wait here, beside the result, until it is whole; the next run finds them.
STAGE = ".bundle-wheels"
_SCRATCH = "scratch"
_OF_THE_DISK = {getattr(errno, n) for n in ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "ENOTDIR", "EEXIST")}
_SPARE_BYTES = 1 << 30


@dataclass(frozen=True)
class Bundle:
    """A finished bundle; ``digest`` is what ``install.sh --expect`` takes."""

    folder: Path
    manifest: Manifest
    digest: str
    parts: tuple[Part, ...]


def choose(plan: Plan, report: Report) -> tuple[Chosen, ...]:
    """Find the file of every package, with its size where the index tells it; nothing large is fetched.

    :raises BundleError: packages without a wheel for the target.
    """
    with tempfile.TemporaryDirectory(prefix="sglang-bw-bundle-") as scratch, locked(Path(scratch), report) as lock:
        pip = Pip(plan.python, plan.machine, report, lock, Path(scratch))
        chosen = wheels.choose(plan.packages, pip)
    report.step("asking for sizes")
    return wheels.with_sizes(chosen)


def make(plan: Plan, chosen: tuple[Chosen, ...], out: Path, split: int | None, report: Report) -> Bundle:
    """Fetch, build and pack into ``out/NAME/``.

    :param split: bytes of a part; ``None``: one archive.
    :raises BwError: by its class what went wrong; the same call goes on from there.
    """
    with _place(out) as stage, locked(stage, report) as lock:
        _check_space(out, chosen, stage)
        _emptied(stage / _SCRATCH)
        wheels.fetch(chosen, stage, Pip(plan.python, plan.machine, report, lock, stage / _SCRATCH))
        engine = _engine(plan, report)
        tool = _small(toolwheel.tool_wheel(stage), toolwheel.DISTRIBUTION, sglang_bw.__version__)
        files = {wheel.file: stage / wheel.file for wheel in (*chosen, tool)} | {engine.path.name: engine.path}
        report.step(f"checking {len(files)} wheels")
        manifest = _manifest(plan, engine, (*chosen, tool, _small(engine.path, "sglang", engine.version)), files)
        members = _members(plan, manifest, files)
        bundle = _pack(manifest, members, out, split, report)
    shutil.rmtree(stage)
    return bundle


@contextmanager
def _place(out: Path) -> Iterator[Path]:
    try:
        (out / STAGE).mkdir(parents=True, exist_ok=True)
        yield out / STAGE
    except OSError as error:
        if error.errno not in _OF_THE_DISK:
            raise
        raise OutputError(
            f"cannot write to {out}: {error.strerror}",
            hint="free some disk, or choose another place with --output DIR; what is fetched stays in it",
        ) from None


def _check_space(out: Path, chosen: tuple[Chosen, ...], stage: Path) -> None:
    """Refuse when the disk has no room for the wheels that are missing and for the archive of all of them."""
    total = sum(wheel.size for wheel in chosen)
    missing = sum(wheel.size for wheel in chosen if not (stage / wheel.file).is_file())
    free = shutil.disk_usage(out).free
    if (needed := total + missing + _SPARE_BYTES) > free:
        raise OutputError(
            f"a bundle of {total / 1e9:.1f} GB takes {needed / 1e9:.1f} GB while it is made, {out} has"
            f" {free / 1e9:.1f} GB",
            hint="free some disk, choose another with --output DIR, or leave packages out with --without NAME",
        )


def _engine(plan: Plan, report: Report) -> PatchedWheel:
    if plan.wheel:
        plan.wheel.validate()
        return plan.wheel
    # The builder pulls in git and the SBOM library: only for those who build.
    from sglang_bw.fork.build import build

    report.step(f"building sglang {plan.version}")
    built = build(
        plan.root, plan.series.base, python=plan.python, machine=plan.machine, out=plan.dist, progress=report.detail
    )
    return PatchedWheel.open(built.path)


def _small(path: Path, name: str, version: str) -> Chosen:
    return Chosen(name, version, path.absolute().as_uri(), Member(path.name, path).sha256(), path.stat().st_size)


def _manifest(plan: Plan, engine: PatchedWheel, chosen: Iterable[Chosen], files: dict[str, Path]) -> Manifest:
    bundled = tuple(
        BundledWheel(
            name=wheel.name,
            version=wheel.version,
            file=wheel.file,
            size=files[wheel.file].stat().st_size,
            sha256=wheel.sha256,
            used_by=_users(plan, wheel.name),
        )
        for wheel in sorted(chosen, key=lambda wheel: wheel.name)
    )
    return Manifest(
        name=plan.name,
        tool=sglang_bw.__version__,
        engine=engine.version,
        base=engine.base,
        tree=engine.tree,
        device=plan.device,
        python=plan.python,
        machine=plan.machine,
        glibc=f"2.{wheels.oldest_glibc(files)}",
        installed_bytes=sum(check_wheel(path) for path in files.values()),
        wheels=bundled,
        left_out=tuple(LeftOut(name=package.name, version=package.version) for package in plan.left_out),
        recipes=plan.extras.recipes,
        models=plan.extras.models,
    )


def _users(plan: Plan, name: str) -> tuple[User, ...]:
    users: dict[User, bool] = {
        "engine": name in plan.of_engine or name == "sglang",
        "tool": name in plan.of_tool or name == toolwheel.DISTRIBUTION,
    }
    return tuple(user for user, uses in users.items() if uses)


def _members(plan: Plan, manifest: Manifest, files: dict[str, Path]) -> list[Member]:
    """Return every file of the bundle in the order of its archive: what is looked at first comes first."""
    script = resources.files("sglang_bw.bundle").joinpath(SCRIPT).read_bytes()
    about = [
        Member(SCRIPT, script),
        Member(TARGET, manifest.target().encode()),
        Member(REQUIREMENTS, manifest.requirements().encode()),
        Member(MANIFEST, manifest.text().encode()),
        Member(SBOM, sbom.render(manifest).encode()),
    ]
    packages = [Member(f"{WHEELS}/{name}", path) for name, path in sorted(files.items())]
    members = [*about, *plan.extras.members, *packages]
    known = {f"{WHEELS}/{wheel.file}": wheel.sha256 for wheel in manifest.wheels}
    sums = sums_text({member.name: known.get(member.name) or member.sha256() for member in members})
    return [members[0], Member(SUMS, sums.encode()), *members[1:]]


def _pack(manifest: Manifest, members: list[Member], out: Path, split: int | None, report: Report) -> Bundle:
    size = sum(member.size for member in members)
    report.step(f"packing {len(members)} files, {size / 1e6:.0f} MB")
    folder = _emptied(out / f".{manifest.name}.new")
    parts = archive.write(folder, manifest.name, members, split, report.detail)
    head = {member.name: member for member in members if member.name in HEAD}
    for name, member in head.items():
        with member.open() as file:
            (folder / name).write_bytes(file.read())
    (folder / SCRIPT).chmod(0o755)
    (folder / PARTS).write_text(parts_text(parts), encoding="utf-8")
    done = out / manifest.name
    if done.exists():
        shutil.rmtree(done)
    os.replace(folder, done)  # noqa: PTH105
    with head[SUMS].open() as file:
        return Bundle(done, manifest, digest_of(file.read()), parts)


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
