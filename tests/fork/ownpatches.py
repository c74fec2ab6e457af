"""Local series for tests: patches that real git exports from commits on top of a fake upstream's series."""

from __future__ import annotations

from pathlib import Path

from tests.fakeupstream import FakeUpstream

WHY = "It is what we need here."


def own_patch(
    upstream: FakeUpstream, folder: Path, topic: str, edits: dict[str, bytes | None], message: str = f"Why: {WHY}"
) -> Path:
    """Commit ``edits`` and put the exported patch into the local series at ``folder``."""
    for path, data in edits.items():
        target = upstream.repo.path / path
        if data is None:
            target.unlink()
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    upstream.repo.commit_all(f"{topic.replace('-', ' ').capitalize()}\n\n{message}".strip())
    folder.mkdir(parents=True, exist_ok=True)
    order = folder / "series"
    names = order.read_text().split() if order.exists() else []
    path = folder / f"{len(names) + 1:04d}-{topic}.patch"
    exported = upstream.repo.export("HEAD~1", folder / "new")[0]
    exported.rename(path)
    (folder / "new").rmdir()
    order.write_text("".join(f"{name}\n" for name in (*names, path.name)))
    return path


def own_series(upstream: FakeUpstream, folder: Path) -> Path:
    """Give a local series that edits a file of ours, a file of upstream's, and adds one."""
    engine = upstream.file("python/sglang/engine.py")
    own_patch(upstream, folder, "faster", {"python/sglang/engine.py": engine.replace(b"line 21\n", b"line 21!\n")})
    table = {"python/sglang/repeated.py": upstream.file("python/sglang/repeated.py").replace(b"x = 1", b"x = 2", 1)}
    own_patch(upstream, folder, "table", {**table, "python/sglang/ours.py": b"ours = 1\n"})
    return folder
