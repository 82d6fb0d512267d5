"""A checkpoint in one GGUF file, read with the `gguf` package.

Metadata become the equivalents of `config.json` and `tokenizer.json`, and tensors get their Hugging Face names. Numbers
are dequantized as they are read, a bounded piece at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField, dequantize
from numpy.typing import NDArray

from runahead.runtime.checkpoint.errors import CheckpointError
from runahead.runtime.checkpoint.gguf_config import ROPE_FACTORS, Metadata, config_of, name_of, permuted_heads
from runahead.runtime.checkpoint.gguf_tokenizer import template_tokens_of, tokenizer_of
from runahead.runtime.checkpoint.quantized.scheme import NumberForm
from runahead.runtime.checkpoint.refusals import AGAIN, UNQUANTIZED

_BLOCK: Final = 32
# A CPU dequantizes them while they are loaded.
FORMS: Final = {"Q4_0": NumberForm(False, 4, (1, _BLOCK), "F16", stays_on_cpu=False)}

# Supported storage types. The package reads others, which are unverified or not used in checkpoints.
SUPPORTED: Final = tuple("F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split())
_PIECE: Final = 1 << 22  # numbers dequantized at once: 16 MiB of float32
# Errors of the package for an invalid header.
_NOT_AS_EXPECTED: Final = (ValueError, KeyError, IndexError, TypeError, OverflowError, ZeroDivisionError, MemoryError)
_ALIGNMENT: Final = "general.alignment"  # of tensors: the only key that the package reads itself
_CHAT_TEMPLATE: Final = "tokenizer.chat_template"  # named templates append a dot and the name
_COUNT: Final = np.dtype("<u8")  # of characters, and of array values
_KIND: Final = np.dtype("<u4")
# Types of single numbers.
_NUMBERS: Final = {
    getattr(GGUFValueType, name): np.dtype(dtype)
    for name, dtype in {
        "UINT8": "u1", "INT8": "i1", "UINT16": "<u2", "INT16": "<i2", "UINT32": "<u4", "INT32": "<i4",
        "FLOAT32": "<f4", "UINT64": "<u8", "INT64": "<i8", "FLOAT64": "<f8", "BOOL": "?",
    }.items()
}  # fmt: skip


def parts_of(stored: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return Q4_0 numbers without signs, [rows, columns], and scales, [rows, columns / 32]. stored: [rows, bytes]."""
    rows = len(stored)
    blocks = np.ascontiguousarray(stored).view(np.uint8).reshape(rows, -1, 2 + _BLOCK // 2)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0].astype(np.float32)
    numbers = blocks[:, :, 2:]  # byte j has number j in its low bits and number 16 + j in its high bits
    return np.concatenate((numbers & 15, numbers >> 4), 2).reshape(rows, -1), scales


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A `StoredTensor` of a GGUF file.

    name: in the file. dtype: GGUF's name. heads: rows of each are stored in rotation pairs, and returned in halves; 0:
    rows are stored as used.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    heads: int
    stored: NDArray[Any]  # [rows, bytes or numbers of a row] of a matrix, in the file; [rows] of a vector

    @property
    def size_bytes(self) -> int:
        return self.stored.nbytes

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError unless the tensor has this shape and a supported type."""
        if self.dtype not in SUPPORTED:
            raise CheckpointError(
                f"tensor {self.name} is stored as {self.dtype}; supported are {', '.join(SUPPORTED)}: make another "
                "file of the unquantised model with `llama-quantize F16.gguf NEW.gguf Q4_K_M` of llama.cpp, or "
                f"{UNQUANTIZED}"
            )
        if self.shape != shape:
            raise CheckpointError(
                f"tensor {self.name} has shape {list(self.shape)}; the file's metadata ask for {list(shape)}"
            )

    def pieces(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """Yield bounded pieces: which rows, and float32 [rows, columns], or [rows] of a vector."""
        rows, order = self.shape[0], self._order
        columns = self.shape[1] if len(self.shape) > 1 else 1
        step = max(1, _PIECE // columns)
        for begin in range(0, rows, step):
            piece = slice(begin, min(begin + step, rows))
            stored = self.stored[piece] if order is None else self.stored[order[piece]]
            numbers = dequantize(stored, GGMLQuantizationType[self.dtype])
            yield piece, np.require(numbers, np.float32, ("C", "W"))

    @property
    def _order(self) -> NDArray[np.int64] | None:
        """The file's row for each row. None: they are in order."""
        return _in_halves(self.shape[0], self.heads) if self.heads else None

    @property
    def form(self) -> NumberForm | None:
        return FORMS.get(self.dtype)

    def groups(self) -> NDArray[np.integer[Any]]:
        return np.arange(self.shape[-1]) // FORMS[self.dtype].block[1]

    def quantized_rows(
        self, begin: int, end: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32] | None]:
        """As `QuantizedMatrix` has it, of a tensor with a form."""
        order = self._order
        stored = self.stored[begin:end] if order is None else self.stored[order[begin:end]]
        return *parts_of(stored), None


def _in_halves(rows: int, heads: int) -> NDArray[np.int64]:
    """Return the file's row for each row as used, int64 [rows].

    The file interleaves the two numbers that are rotated together; they are used in two halves of a head.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True, slots=True)
class GgufCheckpoint:
    """A `Checkpoint` of one file. metadata: keys and values. files_tensors: by name in the file."""

    path: Path
    metadata: Metadata
    files_tensors: Mapping[str, GgufTensor]

    @property
    def has_tokenizer(self) -> bool:
        return "tokenizer.ggml.tokens" in self.metadata

    def config(self) -> Mapping[str, Any]:
        tensors = {name: (tensor.dtype, tensor.shape) for name, tensor in self.files_tensors.items()}
        factors = self.files_tensors.get(ROPE_FACTORS)
        return config_of(self.path, self.metadata, tensors, None if factors is None else _whole(factors))

    def generation_config(self) -> Mapping[str, Any]:
        return {}

    def tensors(self) -> Mapping[str, GgufTensor]:
        """Return all tensors except the rotary factors, which are part of the configuration."""
        return {name_of(name): tensor for name, tensor in self.files_tensors.items() if name != ROPE_FACTORS}

    def tensor_in_file(self, name: str) -> str:
        known = {name_of(own): own for own in self.files_tensors}
        return known.get(name, name)

    def tokenizer(self) -> str:
        return json.dumps(tokenizer_of(self.path, self.metadata), ensure_ascii=False)

    def chat_templates(self) -> Mapping[str, str]:
        named = {key.partition(_CHAT_TEMPLATE): text for key, text in self.metadata.items() if isinstance(text, str)}
        return {
            name.removeprefix(".") or "default": text
            for (before, key, name), text in named.items()
            if key and not before and name[:1] in ("", ".")
        }

    def template_tokens(self) -> Mapping[str, str]:
        return template_tokens_of(self.metadata)


def open_gguf(path: Path) -> GgufCheckpoint:
    """Read the file's header. Raises CheckpointError for an invalid or truncated file, naming the first tensor that is
    cut off.
    """
    try:
        reader = _Reader(path)
        metadata = reader.metadata
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    except _NOT_AS_EXPECTED as error:
        raise CheckpointError(f"{path} is truncated or has a corrupt header: {error!r}; {AGAIN}") from error
    heads = permuted_heads(metadata)
    tensors = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        of_name = heads.get(name_of(tensor.name).rpartition(".")[0].rpartition(".")[2], 0)
        if of_name and shape[0] % (2 * of_name):
            raise CheckpointError(f"tensor {tensor.name} has {shape[0]} rows, which are no pairs in {of_name} heads")
        tensors[tensor.name] = GgufTensor(
            tensor.name, path, tensor.tensor_type.name, shape, of_name, tensor.data.view(np.ndarray)
        )
    return GgufCheckpoint(path, metadata, tensors)


def _whole(tensor: GgufTensor) -> NDArray[np.float32]:
    return np.concatenate([numbers for _, numbers in tensor.pieces()])


class _Bytes:
    """A file's bytes that refuses ranges beyond the end.

    NumPy would shorten such a range silently, and the package would continue. A plain array, because slices of a
    `memmap` take three times as long, and a vocabulary has some hundred thousand.
    """

    def __init__(self, mapped: NDArray[np.uint8]) -> None:
        self._all = mapped.view(np.ndarray)

    def __getitem__(self, part: slice) -> NDArray[np.uint8]:
        if part.stop > self._all.size:
            raise ValueError(f"it has {self._all.size} bytes and should have {part.stop} or more")
        return self._all[part]

    def numbers(self, begin: int, dtype: np.dtype[Any], count: int = 1) -> tuple[list[Any], int]:
        """Read consecutive numbers and return them with their end. Raises ValueError beyond the file's end."""
        end = begin + count * dtype.itemsize
        return self[begin:end].view(dtype).tolist(), end

    def text(self, begin: int) -> tuple[str, int]:
        """Read a length-prefixed text and return it with its end. Raises ValueError."""
        (length,), begin = self.numbers(begin, _COUNT)
        return self[begin : begin + length].tobytes().decode(), begin + length


class _Reader(GGUFReader):
    """The package's reader, which also names the faulty tensor, and reads metadata in time and memory proportional to
    their size: the package makes several objects for each byte of an array.
    """

    tensors: list[Any]
    metadata: dict[str, Any]

    @property
    def data(self) -> _Bytes:
        return self._bytes

    @data.setter
    def data(self, mapped: NDArray[np.uint8]) -> None:
        self._bytes = _Bytes(mapped)

    def _build_fields(self, offs: int, count: int) -> int:
        self.metadata = {}
        for _ in range(count):
            begin = offs
            key, offs = self._bytes.text(offs)
            if key in self.metadata:
                raise KeyError(f"the key {key} is there twice")
            (kind,), offs = self._bytes.numbers(offs, _KIND)
            self.metadata[key], offs = self._value(kind, offs)
            if key == _ALIGNMENT:
                own = [np.array([self.metadata[key]])]
                self._push_field(ReaderField(begin, key, own, [0], [GGUFValueType(kind)]), skip_sum=True)
        return int(super()._build_fields(offs, 0))  # leaves none to the package

    def _value(self, kind: int, offs: int) -> tuple[Any, int]:
        """Read a key's value and return it with its end."""
        if kind == GGUFValueType.STRING:
            return self._bytes.text(offs)
        if kind in _NUMBERS:
            (number,), offs = self._bytes.numbers(offs, _NUMBERS[GGUFValueType(kind)])
            return number, offs
        if kind != GGUFValueType.ARRAY:
            raise ValueError(f"a value is of the unknown kind {kind}")
        (inner,), offs = self._bytes.numbers(offs, _KIND)
        (count,), offs = self._bytes.numbers(offs, _COUNT)
        if inner in _NUMBERS:
            return self._bytes.numbers(offs, _NUMBERS[GGUFValueType(inner)], count)
        if inner != GGUFValueType.STRING:
            raise ValueError(f"an array has values of the kind {inner}, which are neither numbers nor texts")
        texts = []
        for _ in range(count):
            text, offs = self._bytes.text(offs)
            texts.append(text)
        return texts, offs

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        tensors = {}
        for field in fields:
            try:
                super()._build_tensors(start_offs, [field])
            except _NOT_AS_EXPECTED as error:
                raise CheckpointError(
                    f"tensor {field.name} of {self._path} is cut off or its header is corrupt: {error}; {AGAIN}"
                ) from error
            tensors[field.name] = self.tensors[0]
        if len(tensors) != len(fields):
            raise ValueError("two tensors have the same name")
        self.tensors = list(tensors.values())

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path)
