"""What is known of a model without loading it: its configuration and, where they can be read, its tensors' headers.

Three sources, the best first: a local directory or the hub's cache, the hub itself (only when allowed), and
``config.json`` alone, from which the tensors are estimated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_bw.errors import CheckpointError
from sglang_bw.plan import headers
from sglang_bw.plan.config import read_shape
from sglang_bw.plan.estimate import estimate
from sglang_bw.plan.inventory import Inventory, take
from sglang_bw.plan.shapes import ModelShape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Checkpoint:
    """A model.

    :ivar name: directory or hub id.
    :ivar origin: what was read: ``headers in DIR``, ``headers from the hub``, ``config.json``.
    :ivar notes: what a reader of the plan should know of the source.
    """

    name: str
    config: Mapping[str, Any]
    shape: ModelShape
    inventory: Inventory
    origin: str
    notes: tuple[str, ...] = ()


def read(
    source: str, *, revision: str | None = None, fetch: bool = False, progress: Progress | None = None
) -> Checkpoint:
    """Read a model.

    :param source: directory with ``config.json``, such a file, or a hub id ``owner/name``.
    :param revision: branch, tag or commit on the hub.
    :param fetch: whether headers may be fetched from the hub.
    :param progress: called with files done and files in all while they are fetched.
    :raises CheckpointError: nothing can be read, or what is there is damaged.
    """
    path = Path(source).expanduser() if source.startswith("~") else Path(source)
    if path.exists() or source.startswith(("/", ".", "~")):
        return read_directory(path)
    if not _is_hub_id(source):
        raise CheckpointError(f"{source!r} is neither a directory nor a hub id", hint="A hub id looks like owner/name.")
    if cached := cached_directory(source, revision):
        return read_directory(cached, name=source)
    from sglang_bw.plan import hub

    kept = None if fetch else hub.kept(source, revision)
    if kept is None and not fetch:
        raise CheckpointError(
            f"{source} is not in the hub's cache here",
            hint="--fetch-headers reads configuration and headers, a few MB; or give a directory with its config.json.",
        )
    document = kept or hub.fetch(source, revision, progress)
    shape = read_shape(document.config, origin=f"config.json of {source}")
    inventory = document.inventory or estimate(shape)
    origin = (
        f"headers from the hub, {document.date}" if document.inventory else f"config.json from the hub, {document.date}"
    )
    return Checkpoint(source, document.config, shape, inventory, origin, document.notes)


def read_directory(path: Path, *, name: str = "") -> Checkpoint:
    """Read a local directory, or a ``config.json``.

    Weights that are not all there are no error: the tensors are then estimated, and a note says so.

    :raises CheckpointError: there is no configuration, or a file is damaged.
    """
    directory = path.parent if path.is_file() else path
    config = read_config(path if path.is_file() else directory / "config.json")
    shape = read_shape(config, origin=str(path if path.is_file() else directory / "config.json"))
    tensors, notes = ([], []) if path.is_file() else _tensors(directory)
    if not tensors:
        return Checkpoint(name or str(path), config, shape, estimate(shape), "config.json", tuple(notes))
    inventory = take(tensors, shape.layers)
    return Checkpoint(name or str(path), config, shape, inventory, f"headers in {directory}", tuple(notes))


def read_config(path: Path) -> dict[str, Any]:
    """Read ``config.json``, and ModelOpt's ``hf_quant_config.json`` beside it.

    :raises CheckpointError: it is missing or no JSON object.
    """
    config = _read_json(path)
    beside = path.with_name("hf_quant_config.json")
    if "quantization_config" not in config and beside.is_file():
        config["quantization_config"] = _read_json(beside)
    return config


def _tensors(directory: Path) -> tuple[list[headers.Tensor], list[str]]:
    files, notes = _shards(directory)
    tensors: list[headers.Tensor] = []
    cut_off = []
    for path in files:
        found, note = headers.read_file(path)
        tensors += found
        cut_off += [note] if note else []
    if cut_off:
        more = f", and {len(cut_off) - 1} more" if len(cut_off) > 1 else ""
        notes.append(cut_off[0] + more)
    return tensors, notes


def _shards(directory: Path) -> tuple[list[Path], list[str]]:
    index = directory / INDEX
    if index.is_file():
        files = [directory / name for name in shard_names(_read_json(index), str(index))]
        there = [path for path in files if path.is_file()]
        if len(there) == len(files):
            return files, []
        return [], [f"{len(there)} of {len(files)} shards are here: weights are estimated from config.json"]
    files = sorted(directory.glob("model*.safetensors")) or sorted(directory.glob("*.safetensors"))
    if files:
        return files, []
    other = any(next(directory.glob(pattern), None) for pattern in ("*.bin", "*.pt", "*.gguf"))
    what = "the weights are not safetensors" if other else "no weights are here"
    return [], [f"{what}: they are estimated from config.json"]


def shard_names(index: Mapping[str, Any], origin: str) -> list[str]:
    """Return the files of an index.

    :raises CheckpointError: it names none, or names paths elsewhere.
    """
    weight_map = index.get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not names or not all(isinstance(name, str) and name and "/" not in name and "\\" not in name for name in names):
        raise CheckpointError(f"{origin} has no weight_map of file names", hint="Fetch the file again.")
    return sorted(names)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}", hint="A plan needs at least the model's config.json."
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", hint="Fetch the file again.") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not a JSON object", hint="Fetch the file again.")
    return data


def cached_directory(name: str, revision: str | None) -> Path | None:
    """Return the snapshot of a model in the hub's cache, when its configuration is there."""
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    root = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    wanted = revision or "main"
    reference = root / "refs" / wanted
    try:
        commit = reference.read_text().strip() if reference.is_file() else wanted
        snapshot = root / "snapshots" / commit
        return snapshot if (snapshot / "config.json").is_file() else None
    except OSError:
        return None


def _is_hub_id(name: str) -> bool:
    owner, slash, model = name.partition("/")
    return bool(slash and owner and model) and "/" not in model and not name.startswith("-") and " " not in name
