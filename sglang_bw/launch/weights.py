"""A local model directory: whether everything is there that the engine will open, and whole.

Reads configuration, index and the headers of safetensors files; no tensor is read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_bw.errors import CheckpointError, ModelFilesError
from sglang_bw.launch.command import Command
from sglang_bw.plan import headers
from sglang_bw.recipes import flags
from sglang_bw.recipes.schema import expand

# Any one of a row is a tokenizer.
_TOKENIZERS: tuple[tuple[str, ...], ...] = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("tiktoken.model",),
    ("tekken.json",),
    ("vocab.json", "merges.txt"),
)
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")
_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?P<suffix>safetensors|bin)")
_LFS_POINTER = b"version https://git-lfs"
_MOST_SHOWN = 8


def check_command(command: Command) -> None:
    """Check the local models of a launch; what comes from the hub is left to the engine.

    :raises ModelFilesError: see :func:`check`.
    """
    target = local(command.target)
    made_up = flags.value(command.flags, "load-format") == "dummy"
    draft_format = flags.value(command.flags, "speculative-draft-load-format")
    if target:
        elsewhere = flags.value(command.flags, "tokenizer-path")
        tokenizer = None if flags.has(command.flags, "skip-tokenizer-init") else Path(elsewhere or target)
        check(target, "target", tokenizer=tokenizer, weights=not made_up)
    if command.draft and (draft := local(command.draft)):
        check(draft, "draft", tokenizer=None, weights=draft_format != "dummy" and (bool(draft_format) or not made_up))


def local(name: str) -> Path | None:
    """Return a path for what is one: it exists, or could not be a hub id.

    :raises ModelFilesError: it begins with the home directory of nobody.
    """
    try:
        path = expand(Path(name))
    except ValueError as error:
        raise ModelFilesError(str(error), hint=f"Check the user's name, or write ./{name}.") from error
    # Unlike Path.exists this is no error for a name that is too long, or in a directory closed to us.
    exists = os.path.exists(path)  # noqa: PTH110
    return path if exists or name.startswith(("/", ".", "~")) else None


def is_directory(path: Path | str) -> bool:
    """Tell whether a directory is there; false as well for a name too long, or in a directory closed to us."""
    return os.path.isdir(path)  # noqa: PTH112


def check(directory: Path, role: str, *, tokenizer: Path | None, weights: bool = True) -> None:
    """Check a model directory before the load.

    :param role: ``target`` or ``draft``, for the message.
    :param tokenizer: where its tokenizer lies, ``None`` when none is needed.
    :param weights: false when the engine makes them up (``--load-format dummy``).
    :raises ModelFilesError: something is missing, cut short or closed to us; names every finding.
    """
    try:
        _check(directory, role, tokenizer, weights=weights)
    except OSError as error:
        raise ModelFilesError(
            f"the {role} {directory} cannot be read: {error.strerror}",
            hint="Check the path and its permissions, or use a model id: owner/name.",
        ) from error


def _check(directory: Path, role: str, tokenizer: Path | None, *, weights: bool) -> None:
    if not directory.is_dir():
        what = "is a file, not a directory" if directory.exists() else "does not exist"
        raise ModelFilesError(f"the {role} {directory} {what}", hint="Check the path, or use a model id: owner/name.")
    findings = list(_config_findings(directory))
    if tokenizer is not None and tokenizer.is_dir():
        findings += _tokenizer_findings(tokenizer)
    if weights:
        findings += _weight_findings(directory)
    if findings:
        shown = findings[:_MOST_SHOWN]
        if len(findings) > len(shown):
            shown.append(f"and {len(findings) - len(shown)} more")
        raise ModelFilesError(
            "\n".join([f"the {role} in {directory} is not complete:", *(f"  {line}" for line in shown)]),
            hint="An interrupted download is the usual cause: fetch the files again.",
        )


def _config_findings(directory: Path) -> Iterator[str]:
    if (directory / "params.json").is_file() and not (directory / "config.json").exists():
        return  # Mistral's own format
    _, problem = _read_json(directory / "config.json")
    if problem:
        yield problem


def _tokenizer_findings(directory: Path) -> Iterator[str]:
    sets = [[directory / name for name in names] for names in _TOKENIZERS]
    sets += [[path] for path in directory.glob("*.tiktoken")]
    present = [files for files in sets if all(path.is_file() for path in files)]
    if not present:
        yield f"no tokenizer: none of {', '.join(' + '.join(names) for names in _TOKENIZERS)}"
    for path in (path for files in present for path in files):
        if problem := _read_json(path)[1] if path.suffix == ".json" else _pointer(path):
            yield problem


def _weight_findings(directory: Path) -> Iterator[str]:
    if index := next((directory / name for name in _INDEXES if (directory / name).exists()), None):
        yield from _index_findings(index)
        return
    tensors = sorted(directory.glob("*.safetensors"))
    others = [path for pattern in _OTHER_WEIGHTS for path in sorted(directory.glob(pattern))]
    if not tensors and not others:
        yield "no weights: neither *.safetensors nor an index of them"
    yield from _gaps([path.name for path in tensors or others])
    for path in tensors:
        if problem := _shard(path)[1]:
            yield problem
    for path in others if not tensors else ():
        if problem := _pointer(path):
            yield problem


def _index_findings(index: Path) -> Iterator[str]:
    data, problem = _read_json(index)
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if problem or not isinstance(weight_map, dict):
        yield problem or f"{index.name} has no weight_map"
        return
    shards: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        shards.setdefault(str(shard), []).append(tensor)
    for shard, names in sorted(shards.items()):
        path = index.parent / shard
        if not path.is_file():
            yield f"{shard} is missing ({len(names)} of {len(weight_map)} tensors)"
        elif path.suffix == ".safetensors":
            there, problem = _shard(path)
            absent = [name for name in names if name not in there]
            if problem:
                yield problem
            elif absent:
                yield f"{shard} lacks {len(absent)} tensors that {index.name} promises, such as {absent[0]}"
        elif problem := _pointer(path):
            yield problem


def _gaps(names: list[str]) -> Iterator[str]:
    """Yield the shards that a numbered series without an index lacks."""
    for stem, count, suffix in {m.group("stem", "count", "suffix") for m in map(_SHARD_NAME.fullmatch, names) if m}:
        expected = [f"{stem}-{number:05}-of-{count}.{suffix}" for number in range(1, int(count) + 1)]
        yield from (f"{name} is missing" for name in expected if name not in names)


def _shard(path: Path) -> tuple[set[str], str]:
    """Return the names of a safetensors file's tensors, and what is wrong with it or an empty string."""
    if problem := _pointer(path):
        return set(), problem
    try:
        header = headers.read_file(path)
    except CheckpointError as error:
        return set(), error.message
    names = {tensor.name for tensor in header.tensors}
    if header.size == header.wanted:
        return names, ""
    state = "is cut off" if header.size < header.wanted else "is too long"
    return names, f"{path.name} {state}: {header.size:,} bytes, its header says {header.wanted:,}"


def _read_json(path: Path) -> tuple[Any, str]:
    if not path.is_file():
        return None, f"{path.name} is missing"
    if problem := _pointer(path):
        return None, problem
    try:
        return json.loads(path.read_bytes()), ""
    except ValueError as error:
        return None, f"{path.name} is not valid JSON: {error}"


def _pointer(path: Path) -> str:
    """Say so when a file cannot be read, or is what Git LFS leaves in place of one that it has not fetched."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return f"{path.name} is a Git LFS pointer, not the file: run `git lfs pull` there" if is_pointer else ""
