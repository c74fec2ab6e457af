"""What is known of a model without loading it: its configuration and, where they can be read, its tensors' headers.

Three sources, the best first: a local directory or the hub's cache, the hub itself (only when allowed), and
``config.json`` alone, from which the tensors are estimated.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_bw.errors import CheckpointError
from sglang_bw.plan import headers, kept
from sglang_bw.plan.config import read_shape
from sglang_bw.plan.estimate import estimate
from sglang_bw.plan.inventory import Inventory, take
from sglang_bw.plan.shapes import ModelShape
from sglang_bw.recipes import configs

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
    if (source and path.exists()) or source.startswith(("/", ".", "~")):
        return read_directory(path)
    if not _is_hub_id(source):
        raise CheckpointError(f"{source!r} is neither a directory nor a hub id", hint="A hub id looks like owner/name.")
    if cached := configs.cached(source, revision):
        return read_directory(cached, name=source)
    from sglang_bw.plan import hub

    document = None if fetch else hub.kept(source, revision)
    if document is None and not fetch:
        raise CheckpointError(
            f"{source} is not in the hub's cache here",
            hint="--fetch-headers reads configuration and headers, a few MB; or give a directory with its config.json.",
        )
    document = document or hub.fetch(source, revision, progress)
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
    files, notes = ([], []) if path.is_file() else _shards(directory)
    if not files:
        return Checkpoint(name or str(path), config, shape, estimate(shape), "config.json", tuple(notes))
    inventory, cut_off = _inventory(files, shape.layers)
    return Checkpoint(name or str(path), config, shape, inventory, f"headers in {directory}", (*notes, *cut_off))


def read_config(path: Path) -> dict[str, Any]:
    """Read ``config.json``, and ModelOpt's ``hf_quant_config.json`` beside it.

    :raises CheckpointError: it is missing or no JSON object.
    """
    config = _read_json(path)
    beside = path.with_name("hf_quant_config.json")
    if "quantization_config" not in config and beside.is_file():
        config["quantization_config"] = _read_json(beside)
    return config


def _inventory(files: list[Path], layers: int) -> tuple[Inventory, list[str]]:
    """Return what the files hold, and a note when data is missing behind their headers."""
    key = _state(files, layers)
    if key and (found := kept.load(key)) and found[0]:
        return found[0], list(found[1].get("notes", []))
    tensors: list[headers.Tensor] = []
    notes = []
    # Hundreds of thousands of small objects without a cycle among them: the collector would walk them in vain.
    with _no_collector():
        for path in files:
            header = headers.read_file(path)
            tensors += header.tensors
            if header.size < header.wanted:
                notes.append(f"{path.name} has {header.size:,} of {header.wanted:,} bytes: planned from its header")
        inventory = take(tensors, layers)
    if len(notes) > 1:
        notes = [f"{notes[0]}, and {len(notes) - 1} more"]
    if key:
        kept.save(key, inventory, {"notes": notes})
    return inventory, notes


def _state(files: list[Path], layers: int) -> str:
    """Return what identifies the files as they are; empty when one cannot be read."""
    try:
        states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    except OSError:
        return ""
    return json.dumps([layers, states])


@contextmanager
def _no_collector() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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


def _is_hub_id(name: str) -> bool:
    owner, slash, model = name.partition("/")
    return bool(slash and owner and model) and "/" not in model and not name.startswith("-") and " " not in name
