"""Read a model's configuration and headers from the hub: ranges of files, a few MB for hundreds of GB of weights."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_bw.errors import CheckpointError
from sglang_bw.plan import checkpoint, headers
from sglang_bw.plan import kept as cache
from sglang_bw.plan.config import read_shape
from sglang_bw.plan.inventory import Inventory, take

if TYPE_CHECKING:
    import httpx

_FIRST_BYTES = 256 * 1024
_TIMEOUT_S = 20.0
_AT_ONCE = 8


@dataclass(frozen=True)
class Document:
    """What the hub said.

    :ivar inventory: ``None`` when the model has no safetensors files.
    :ivar date: of the fetch.
    """

    config: dict[str, Any]
    inventory: Inventory | None
    date: str
    notes: tuple[str, ...] = ()


def kept(name: str, revision: str | None) -> Document | None:
    """Return what an earlier fetch left in the cache."""
    found = cache.load(_key(name, revision))
    if found is None or not {"config", "date", "notes"} <= found[1].keys():
        return None
    inventory, more = found
    return Document(more["config"], inventory, more["date"], tuple(more["notes"]))


def fetch(name: str, revision: str | None, progress: checkpoint.Progress | None = None) -> Document:
    """Fetch configuration and headers, and keep them.

    :raises CheckpointError: the hub cannot be reached, has no such model, or keeps it to itself.
    """
    with _client(name, revision) as client:
        config = _json(client, "config.json", name)
        if "quantization_config" not in config and (beside := _optional(client, "hf_quant_config.json")):
            config["quantization_config"] = beside
        shape = read_shape(config, origin=f"config.json of {name}")
        files = _files(client)
        tensors = list(_tensors(client, files, name, progress))
    notes = () if tensors else ("the model has no safetensors files: weights are estimated from config.json",)
    inventory = take(tensors, shape.layers) if tensors else None
    document = Document(config, inventory, datetime.datetime.now(datetime.UTC).date().isoformat(), notes)
    more = {"config": config, "date": document.date, "notes": list(notes)}
    cache.save(_key(name, revision), inventory, more)
    return document


@contextmanager
def _client(name: str, revision: str | None) -> Iterator[httpx.Client]:
    import httpx

    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise CheckpointError(
            "HF_HUB_OFFLINE is set", hint="Unset it, or give a directory with the model's config.json."
        )
    base = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    token = os.environ.get("HF_TOKEN")
    auth = {"authorization": f"Bearer {token}"} if token else {}
    # A compressed answer would not be the bytes of the range.
    fixed = {"accept-encoding": "identity", "user-agent": "sglang-bw"}
    url = f"{base}/{name}/resolve/{revision or 'main'}/"
    try:
        with httpx.Client(base_url=url, headers={**fixed, **auth}, follow_redirects=True, timeout=_TIMEOUT_S) as client:
            yield client
    except httpx.HTTPStatusError as error:
        raise _refusal(error.response.status_code, name, revision) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CheckpointError(
            f"the hub at {base} cannot be reached: {error or type(error).__name__}",
            hint="Check the network or HF_ENDPOINT; or give a directory with the model's config.json.",
        ) from error


def _refusal(status: int, name: str, revision: str | None) -> CheckpointError:
    where = name + (f" at {revision}" if revision else "")
    if status in (401, 403):
        return CheckpointError(
            f"the hub does not show {where} to everybody", hint="Accept its terms, and set HF_TOKEN."
        )
    if status == 404:
        return CheckpointError(f"the hub has no {where}, or it has no config.json", hint="Check the name and revision.")
    return CheckpointError(f"the hub answers {status} for {where}", hint="Try again later.")


def _json(client: httpx.Client, path: str, name: str) -> dict[str, Any]:
    answer = client.get(path)
    answer.raise_for_status()
    try:
        data = answer.json()
    except ValueError as error:
        raise CheckpointError(f"{path} of {name} is not valid JSON", hint="Is HF_ENDPOINT a model hub?") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} of {name} is not a JSON object", hint="Is HF_ENDPOINT a model hub?")
    return data


def _optional(client: httpx.Client, path: str) -> dict[str, Any] | None:
    answer = client.get(path)
    if answer.status_code == 404:
        return None
    answer.raise_for_status()
    data = answer.json()
    return data if isinstance(data, dict) else None


def _files(client: httpx.Client) -> list[str]:
    if index := _optional(client, checkpoint.INDEX):
        return checkpoint.shard_names(index, checkpoint.INDEX)
    answer = client.head(checkpoint.SINGLE)
    return [checkpoint.SINGLE] if answer.status_code == 200 else []


def _tensors(
    client: httpx.Client, files: list[str], name: str, progress: checkpoint.Progress | None
) -> Iterator[headers.Tensor]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        waiting = [pool.submit(_header, client, path, name) for path in files]
        try:
            for done, future in enumerate(as_completed(waiting), 1):
                yield from future.result()
                if progress:
                    progress(done, len(files))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _header(client: httpx.Client, path: str, name: str) -> list[headers.Tensor]:
    start = _range(client, path, 0, _FIRST_BYTES)
    length = headers.header_length(start, f"{path} of {name}")
    text = start[8 : 8 + length]
    if len(text) < length:
        text += _range(client, path, len(start), 8 + length)
    return headers.parse_header(text, length, f"{path} of {name}")


def _range(client: httpx.Client, path: str, start: int, end: int) -> bytes:
    """Read bytes ``start:end``; no more than that even where the server sends the whole file."""
    with client.stream("GET", path, headers={"range": f"bytes={start}-{end - 1}"}) as answer:
        answer.raise_for_status()
        skip = 0 if answer.status_code == 206 else start
        wanted = skip + end - start
        data = bytearray()
        for chunk in answer.iter_bytes():
            data += chunk
            if len(data) >= wanted:
                break
    return bytes(data[skip:wanted])


def _key(name: str, revision: str | None) -> str:
    return f"{os.environ.get('HF_ENDPOINT', '')}\n{name}\n{revision or 'main'}"
