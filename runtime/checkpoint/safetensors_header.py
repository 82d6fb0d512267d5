"""Reads the headers of safetensors files.

Read here instead of by the library, so that errors can name the tensor. Format: 8 bytes little-endian header length, a
JSON header (name -> dtype, shape, data_offsets), data.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from runahead.runtime.checkpoint.errors import CheckpointError
from runahead.runtime.checkpoint.refusals import AGAIN, UNQUANTIZED, refuse_lfs_pointer

_ITEM_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2}
_MAX_HEADER_BYTES: Final = 100_000_000  # the format's limit
# Errors of JSON with unexpected content.
_NOT_AS_EXPECTED: Final = (ValueError, RecursionError)


class _Entry(msgspec.Struct):
    """A tensor in a header. Parsing makes only these types."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """A `StoredTensor` of a safetensors file. dtype: F32, BF16, F16, or one that `check` refuses. offset: of its first
    byte in the file. part: the matrix of a stack, its first row, and its end row; None: everything.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    offset: int
    part: tuple[int, int, int] | None = None

    def rows_of(self, number: int, begin: int, end: int) -> SafetensorsTensor:
        """Return rows of one matrix of a stack that `check` has passed."""
        matrices, rows, columns = self.shape
        size = self.size_bytes // (matrices * rows) * (end - begin)
        return replace(self, shape=(end - begin, columns), size_bytes=size, part=(number, begin, end))

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError unless the tensor has this shape and a supported dtype."""
        if self.dtype not in _ITEM_BYTES:
            supported = ", ".join(_ITEM_BYTES)
            raise CheckpointError(
                f"tensor {self.name} is stored as {self.dtype}; supported are {supported}: where the model is "
                f"quantised, {UNQUANTIZED}; else let transformers save it with dtype='bfloat16'"
            )
        if self.shape != shape:
            raise CheckpointError(
                f"tensor {self.name} has shape {list(self.shape)}; config.json asks for {list(shape)}"
            )
        if self.size_bytes != math.prod(shape) * _ITEM_BYTES[self.dtype]:
            raise CheckpointError(
                f"tensor {self.name} spans {self.size_bytes} bytes, which is not what its shape takes; {AGAIN}"
            )


def read_header(path: Path) -> dict[str, SafetensorsTensor]:
    """Read a file's header. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            prefix = file.read(8)
            refuse_lfs_pointer(path, prefix + file.read(16))
            file.seek(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            header = file.read(length) if 0 < length <= min(_MAX_HEADER_BYTES, size - 8) else b""
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    if not header:
        raise CheckpointError(f"{path} is truncated or no safetensors file: its header is incomplete; {AGAIN}")
    try:
        described = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries = {
            name: msgspec.json.decode(entry, type=_Entry) for name, entry in described.items() if name != "__metadata__"
        }
        tensors = [_stored(path, name, entry, 8 + length) for name, entry in entries.items()]
    except _NOT_AS_EXPECTED as error:
        raise CheckpointError(f"{path} has a corrupt header: {error!r}; {AGAIN}") from error
    ends = {name: entry.data_offsets[1] for name, entry in entries.items()}
    for tensor in sorted(tensors, key=lambda tensor: ends[tensor.name]):
        if 8 + length + ends[tensor.name] > size:
            raise CheckpointError(f"tensor {tensor.name} is cut off: {path} ends before it does; {AGAIN}")
    return {tensor.name: tensor for tensor in tensors}


def _stored(path: Path, name: str, entry: _Entry, data: int) -> SafetensorsTensor:
    begin, end = entry.data_offsets
    if not 0 <= begin <= end:
        raise ValueError(f"offsets of {name} are {begin} to {end}")
    return SafetensorsTensor(name, path, entry.dtype, entry.shape, end - begin, data + begin)


def read_shards(folder: Path, index: str) -> dict[str, SafetensorsTensor]:
    """Read the headers of all files in `index`. Raises CheckpointError."""
    try:
        size = (folder / index).stat().st_size
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"it has {size} bytes")
        weight_map = msgspec.json.decode((folder / index).read_bytes(), type=_Index).weight_map
    except (OSError, *_NOT_AS_EXPECTED) as error:
        raise CheckpointError(f"{folder / index} can't be read: {error!r}; {AGAIN}") from error
    stored: dict[str, SafetensorsTensor] = {}
    for shard in sorted(set(weight_map.values())):
        path = folder / shard
        if Path(shard).name != shard:
            raise CheckpointError(f"{index} names a shard outside the folder: {shard!r}")
        if not path.is_file():
            first = min(name for name, holder in weight_map.items() if holder == shard)
            raise CheckpointError(f"shard {shard} is missing from {folder}; tensor {first} is in it; {AGAIN}")
        stored |= read_header(path)
    for name, shard in weight_map.items():
        if name not in stored or stored[name].path.name != shard:
            raise CheckpointError(f"{index} says that tensor {name} is in {shard}, and it is not; {AGAIN}")
    return stored
