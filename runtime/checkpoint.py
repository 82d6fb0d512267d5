"""Where a checkpoint lies, which files it has and what they say of themselves, in the layout of Hugging Face.

Without torch: a front end looks too, and refuses what can't be served before an engine is started.

Headers of safetensors files are read here and not by the library, so that what is wrong with a file can be said by the
tensor's name. Format: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, data_offsets), data.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

BUNDLED: Final = "bundled"  # the name of the model that comes with the package
BUNDLED_FOLDER: Final = Path(__file__).parent / "models" / BUNDLED

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
WEIGHTS: Final = "model.safetensors"
WEIGHTS_INDEX: Final = "model.safetensors.index.json"  # which of several files has which tensor
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"

_ITEM_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2}
_MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
# What reading JSON raises where it holds something else than is asked for: an infinite offset overflows, lists in lists
# without end are a recursion.
_NOT_AS_EXPECTED: Final = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)


class CheckpointError(ValueError):
    """A checkpoint that is not served. The sentence names the file, the key or the tensor."""


def check_files(folder: Path, *, has_weights: bool) -> None:
    """Raises CheckpointError where `config.json` can't be read, or where weights are asked for and their headers are
    missing or wrong. What is in `config.json`, the engine looks at."""
    read_config(folder)
    if has_weights:
        stored_tensors(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """What `config.json` holds. Raises CheckpointError where it is missing or no JSON object."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} is no checkpoint: it has no {CONFIG}")
    return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """Raises CheckpointError for a file that is no JSON object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return raw


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


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by name, from the sharded index if there is one, else from model.safetensors.

    Raises CheckpointError for a missing file or shard, an unreadable header, a tensor that the file ends before, and
    an index that does not agree with its shards.
    """
    if (folder / WEIGHTS_INDEX).is_file():
        return _sharded(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}")
    return _read_header(path)


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """What the header of one file says. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            header = file.read(length) if 0 < length <= min(_MAX_HEADER_BYTES, size - 8) else b""
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    if not header:
        raise CheckpointError(f"{path} is truncated or no safetensors file: its header is incomplete")
    try:
        entries = json.loads(header)
        tensors = [_stored(path, name, entry) for name, entry in entries.items() if name != "__metadata__"]
        ends = {name: int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__"}
    except _NOT_AS_EXPECTED as error:
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


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    try:
        entries = json.loads((folder / WEIGHTS_INDEX).read_text(encoding="utf-8"))["weight_map"]
        weight_map = {str(name): str(shard) for name, shard in entries.items()}
    except (OSError, *_NOT_AS_EXPECTED) as error:
        raise CheckpointError(f"{folder / WEIGHTS_INDEX} can't be read: {error!r}") from error
    stored: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        path = folder / shard
        if Path(shard).name != shard:
            raise CheckpointError(f"{WEIGHTS_INDEX} names a shard outside the folder: {shard!r}")
        if not path.is_file():
            first = min(name for name, holder in weight_map.items() if holder == shard)
            raise CheckpointError(f"shard {shard} is missing from {folder}; tensor {first} is in it")
        stored |= _read_header(path)
    for name, shard in weight_map.items():
        if name not in stored or stored[name].path.name != shard:
            raise CheckpointError(f"{WEIGHTS_INDEX} says that tensor {name} is in {shard}, and it is not")
    return stored
