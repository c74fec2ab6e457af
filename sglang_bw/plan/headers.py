"""The header of a safetensors file: 8 bytes of length, then JSON. No tensor is read."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import NamedTuple

from sglang_bw.errors import CheckpointError

MOST_BYTES = 100_000_000  # the limit of the format
_LFS_POINTER = b"version https://git-lfs"
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
_FETCH_AGAIN = "An interrupted download is the usual cause: fetch the file again."


class Tensor(NamedTuple):
    """One tensor of a checkpoint.

    :ivar dtype: as the header spells it: ``BF16``.
    :ivar shape: elements of each axis.
    :ivar bytes: bytes that it takes in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def header_length(start: bytes, name: str) -> int:
    """Return the length of the JSON that follows the first 8 bytes of a file.

    :raises CheckpointError: they are no such length.
    """
    if start.startswith(_LFS_POINTER[:8]):
        raise CheckpointError(f"{name} is a Git LFS pointer, not the file", hint="Run `git lfs pull` there.")
    length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
    if not 2 <= length <= MOST_BYTES:
        raise CheckpointError(f"{name} is no safetensors file, or its header is cut off", hint=_FETCH_AGAIN)
    return int(length)


def parse_header(text: bytes, length: int, name: str) -> list[Tensor]:
    """Read a header's JSON.

    :param text: what is there of it.
    :param length: how long the file says that it is, in bytes.
    :raises CheckpointError: it is cut off, or not what the format says.
    """
    if len(text) < length:
        raise CheckpointError(f"the header of {name} is cut off: {len(text):,} of {length:,} bytes", hint=_FETCH_AGAIN)
    try:
        data = json.loads(text[:length])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header of {name} is not valid JSON: {error}", hint=_FETCH_AGAIN) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"the header of {name} lists no tensors", hint=_FETCH_AGAIN)
    return [_tensor(key, entry, name) for key, entry in data.items() if key != "__metadata__"]


def _tensor(key: str, entry: object, name: str) -> Tensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]  # type: ignore[index]
        whole = all(type(number) is int and number >= 0 for number in (start, end, *shape))
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{name}: the entry of {key} is damaged", hint=_FETCH_AGAIN) from error
    if not whole or end < start or not isinstance(dtype, str):
        raise CheckpointError(f"{name}: the entry of {key} is damaged", hint=_FETCH_AGAIN)
    wanted = (prod(shape) * _BITS[dtype] + 7) // 8 if dtype in _BITS else end - start
    if wanted != end - start:
        raise CheckpointError(
            f"{name}: {key} is {dtype} of shape {list(shape)}, which is not the {end - start:,} bytes of its entry",
            hint=_FETCH_AGAIN,
        )
    return Tensor(key, dtype, tuple(shape), end - start)


class Header(NamedTuple):
    """The header of a local file.

    :ivar size: bytes of the file.
    :ivar wanted: bytes that it has when the data behind the header is all there; a plan does not need that.
    """

    tensors: list[Tensor]
    size: int
    wanted: int


def read_file(path: Path) -> Header:
    """Read the header of a local file.

    :raises CheckpointError: the header cannot be read or is damaged.
    """
    try:
        with path.open("rb") as file:
            length = header_length(file.read(8), path.name)
            tensors = parse_header(file.read(length), length, path.name)
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}", hint="Check the path and its permissions."
        ) from error
    return Header(tensors, size, 8 + length + sum(tensor.bytes for tensor in tensors))
