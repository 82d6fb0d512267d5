"""The safetensors files of a checkpoint folder, one or many, seen as one set of named tensors.

Headers are read here and not by the library, so that what is wrong with a file can be said by the tensor's name.
Format: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, data_offsets), the data.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from runahead.runtime.checkpoint import WEIGHTS, WEIGHTS_INDEX, CheckpointError

_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header describes it."""

    name: str
    path: Path
    dtype: str  # F32, BF16, F16, or one that `check` refuses
    shape: tuple[int, ...]
    size_bytes: int

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError unless the tensor has this shape and a dtype that can be served."""
        if self.dtype not in _ITEM_BYTES:
            raise CheckpointError(
                f"tensor {self.name} is stored as {self.dtype}; supported are {', '.join(_ITEM_BYTES)}"
            )
        if self.shape != shape:
            raise CheckpointError(
                f"tensor {self.name} has shape {list(self.shape)}; config.json asks for {list(shape)}"
            )
        if self.size_bytes != math.prod(shape) * _ITEM_BYTES[self.dtype]:
            raise CheckpointError(
                f"tensor {self.name} spans {self.size_bytes} bytes, which is not what its shape takes"
            )

    def read(self) -> torch.Tensor:
        """The tensor on the CPU, in the dtype it is stored in. Raises CheckpointError."""
        try:
            with safe_open(self.path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(self.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"tensor {self.name} can't be read from {self.path}: {error}") from error
        return tensor


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by name, from the sharded index if there is one, else from model.safetensors.

    Raises CheckpointError for a missing file or shard, an unreadable header, a tensor that the file ends before, and
    an index that does not agree with its shards.
    """
    if (folder / WEIGHTS_INDEX).is_file():
        return _open_sharded(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}")
    return read_header(path)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """What the header of one file says. Raises CheckpointError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path} is truncated or no safetensors file: its header is incomplete")
        header = file.read(length)
    try:
        entries = json.loads(header)
        tensors = [_stored(path, name, entry) for name, entry in entries.items() if name != "__metadata__"]
        ends = {name: int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{path} has a corrupt header: {error!r}") from error
    for tensor in sorted(tensors, key=lambda tensor: ends[tensor.name]):
        if 8 + length + ends[tensor.name] > size:
            raise CheckpointError(f"tensor {tensor.name} is cut off: {path} ends before it does")
    return {tensor.name: tensor for tensor in tensors}


def _stored(path: Path, name: str, entry: dict[str, Any]) -> StoredTensor:
    begin, end = (int(offset) for offset in entry["data_offsets"])
    if not 0 <= begin <= end:
        raise ValueError(f"offsets of {name} are {begin} to {end}")
    return StoredTensor(name, path, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), end - begin)


def _open_sharded(folder: Path) -> dict[str, StoredTensor]:
    try:
        entries = json.loads((folder / WEIGHTS_INDEX).read_text(encoding="utf-8"))["weight_map"]
        weight_map = {str(name): str(shard) for name, shard in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / WEIGHTS_INDEX} can't be read: {error!r}") from error
    stored: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        path = folder / shard
        if Path(shard).name != shard:
            raise CheckpointError(f"{WEIGHTS_INDEX} names a shard outside the folder: {shard!r}")
        if not path.is_file():
            first = min(name for name, holder in weight_map.items() if holder == shard)
            raise CheckpointError(f"shard {shard} is missing from {folder}; tensor {first} is in it")
        stored |= read_header(path)
    for name, shard in weight_map.items():
        if name not in stored or stored[name].path.name != shard:
            raise CheckpointError(f"{WEIGHTS_INDEX} says that tensor {name} is in {shard}, and it is not")
    return stored
