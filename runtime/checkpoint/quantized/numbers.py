"""Bytes of a safetensors file as numbers, with NumPy.

The file is mapped: only the rows that are taken are read.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.checkpoint.errors import CheckpointError
from runahead.runtime.checkpoint.safetensors_header import SafetensorsTensor

# bfloat16 and FP8 have no dtype in NumPy and are taken as integers of their width.
_DTYPES: Final = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8",
}  # fmt: skip
FLOATS: Final = ("F32", "F16", "BF16")


def mapped(stored: SafetensorsTensor) -> NDArray[Any]:
    """The tensor in the file, in its shape. Raises CheckpointError."""
    if not math.prod(stored.shape):
        return np.zeros(stored.shape, _DTYPES[stored.dtype])
    try:
        whole = np.memmap(stored.path, _DTYPES[stored.dtype], "r", stored.offset, stored.shape or (1,))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"tensor {stored.name} can't be read from {stored.path}: {error}") from error
    return whole.view(np.ndarray)


def item_bytes(dtype: str) -> int | None:
    """Bytes of a number. None: the dtype is not read here."""
    return np.dtype(_DTYPES[dtype]).itemsize if dtype in _DTYPES else None


def as_float32(numbers: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Numbers of one of `FLOATS`, exactly."""
    if dtype == "BF16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)


def _e4m3() -> NDArray[np.float32]:
    """The 256 numbers of FP8 e4m3: a sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa, no infinity."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[code & 127 == 127] = np.nan
    return np.where(code & 128, -size, size).astype(np.float32)


E4M3: Final = _e4m3()
