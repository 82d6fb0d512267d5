"""A quantized weight that dequantizes itself, a bounded number of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.checkpoint.errors import CheckpointError
from runahead.runtime.checkpoint.quantized.numbers import E4M3, as_float32, mapped
from runahead.runtime.checkpoint.quantized.scheme import NumberForm
from runahead.runtime.checkpoint.refusals import AGAIN
from runahead.runtime.checkpoint.safetensors_header import SafetensorsTensor
from runahead.runtime.rounding import ceil_div

_PIECE: Final = 1 << 22  # numbers that are dequantized at once: 16 MiB of float32
_ROWS: Final = 8  # in a word of AWQ lie numbers of so many rows
_SIGN: Final = 128  # what an int8 is above zero where it has no sign
# AWQ: column c of eight lies in bits 4 * _AWQ[c] and up of a word.
_AWQ: Final = np.array([0, 4, 1, 5, 2, 6, 3, 7])


@dataclass(frozen=True, slots=True)
class ByteCodes:
    """One number a byte, FP8 e4m3 or int8, [rows, columns], or a stack of such matrices."""

    stored: SafetensorsTensor
    bits: int = 8
    offset: int = _SIGN

    def codes(self, begin: int, end: int, matrix: int | None) -> NDArray[np.uint8]:
        """The bits of each number, an integer's without a sign, [end - begin, columns]. matrix: of a stack of them
        which one. Raises CheckpointError for NaN."""
        whole = mapped(self.stored)
        part = (whole if matrix is None else whole[matrix])[begin:end]
        if self.stored.dtype == "I8":
            return part.view(np.uint8) ^ np.uint8(_SIGN)
        if (part & 127 == 127).any():
            raise CheckpointError(f"tensor {self.stored.name} holds NaN; {AGAIN}")
        return np.array(part)


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """Integers in words of 32 bits, the first in the lowest bits.

    stored: [rows, words of a row], or [words of a column, rows] if the layout is gptq, or [columns, words of rows] if
    it is awq. columns: of the weight. offset: that was added to each.
    """

    stored: SafetensorsTensor
    layout: str
    bits: int
    columns: int
    offset: int = 0

    def codes(self, begin: int, end: int, matrix: int | None) -> NDArray[np.uint8]:
        """As `ByteCodes.codes`."""
        words = mapped(self.stored)
        if self.layout == "awq":
            first = begin // _ROWS
            packed = words[:, first : ceil_div(end, _ROWS)]
            return in_awq_order(unpacked(packed, self.bits)).T[begin - first * _ROWS : end - first * _ROWS]
        packed = words[:, begin:end].T if self.layout == "gptq" else words[begin:end]
        return unpacked(packed, self.bits)[:, : self.columns]


def unpacked(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Unpack words into numbers, the lowest bits first. words: int32 [n, w]. Returns uint8 [n, w * 32 // bits]."""
    in_order = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return in_order
    both = np.empty((*in_order.shape, 2), np.uint8)
    np.bitwise_and(in_order, 15, out=both[..., 0])
    np.right_shift(in_order, 4, out=both[..., 1])
    return both.reshape(len(words), -1)


def in_awq_order(numbers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Reorder numbers from AWQ's order within a word to the order of columns. numbers: [n, multiple of 8]."""
    return numbers.reshape(len(numbers), -1, 8)[..., _AWQ].reshape(numbers.shape)


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of a weight, and its zero points.

    stored: of a floating-point dtype. zero_points: None: there are none. layout, bits: of the zero points, as in
    `PackedCodes`; where the layout is scaled, a zero point is a byte. group_of: of each column its group, int32
    [columns]; None: in order. block: rows and columns that share a scale. grid: rows and columns of the scales.
    zero_point_bias: added to each stored zero point.
    """

    stored: SafetensorsTensor
    block: tuple[int, int]
    grid: tuple[int, int]
    layout: str
    bits: int
    zero_points: SafetensorsTensor | None = None
    group_of: SafetensorsTensor | None = None
    zero_point_bias: int = 0

    def read(self, matrix: int | None) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """The scales, float32 [grid], and the zero points likewise. matrix: of a stack which one.

        Raises CheckpointError for a scale that is zero or not finite.
        """
        whole = mapped(self.stored)
        scales = self._by_row(as_float32(whole if matrix is None else whole[matrix], self.stored.dtype))
        if not np.isfinite(scales).all():
            raise CheckpointError(f"tensor {self.stored.name} holds a scale that is not finite; {AGAIN}")
        if not scales.all():
            raise CheckpointError(f"tensor {self.stored.name} holds a scale of zero; {AGAIN}")
        return scales, None if self.zero_points is None else self._read_zero_points(self.zero_points)

    def _by_row(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """GPTQ and AWQ have a column for each row of the weight."""
        if self.layout in ("gptq", "awq"):
            return np.ascontiguousarray(numbers.T)
        return numbers.reshape(self.grid)

    def _read_zero_points(self, stored: SafetensorsTensor) -> NDArray[np.float32]:
        words = mapped(stored)
        if self.layout == "scaled":
            return words.reshape(self.grid).astype(np.float32) + np.float32(_SIGN)
        if self.layout == "packed":  # words of a column
            found = unpacked(words.T, self.bits)[:, : self.grid[0]].T
        elif self.layout == "awq":
            found = in_awq_order(unpacked(words, self.bits)).T
        else:
            found = unpacked(words, self.bits).T
        biased = found.astype(np.int32) + self.zero_point_bias & (1 << self.bits) - 1
        return biased.astype(np.float32)

    def groups(self, columns: int) -> NDArray[np.integer[Any]]:
        """Return each weight column's column in the grid of scales. Raises CheckpointError for one beyond the grid."""
        if self.group_of is None:
            return np.arange(columns) // self.block[1]
        found = mapped(self.group_of)
        if (found == -1).all():  # compressed-tensors: the columns are in order
            return np.arange(columns) // self.block[1]
        if found.min() < 0 or found.max() >= self.grid[1]:
            raise CheckpointError(
                f"tensor {self.group_of.name} holds groups from {found.min()} to {found.max()}, and there are "
                f"{self.grid[1]}; {AGAIN}"
            )
        return found


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A `StoredTensor` that is made of several tensors of safetensors files.

    name: of the weight. dtype: how it is stored, in words. shape: of the weight. codes, scales: what it is made of.
    matrix: of a stack of matrices which one. first_row: of that one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    codes: ByteCodes | PackedCodes
    scales: Scales
    matrix: int | None = None
    first_row: int = 0

    def rows_of(self, number: int, begin: int, end: int) -> QuantizedTensor:
        """Rows of one matrix, of a stack of them that `check` has passed."""
        matrices, rows, columns = self.shape
        size = self.size_bytes * (end - begin) // (matrices * rows)
        return replace(self, shape=(end - begin, columns), size_bytes=size, matrix=number, first_row=begin)

    @property
    def form(self) -> NumberForm:
        scales, is_float = self.scales, self.codes.stored.dtype == "F8_E4M3"
        return NumberForm(is_float, self.codes.bits, scales.block, scales.stored.dtype, scales.zero_points is not None)

    def groups(self) -> NDArray[np.integer[Any]]:
        return self.scales.groups(self.shape[-1])

    def quantized_rows(
        self, begin: int, end: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32] | None]:
        """As `QuantizedMatrix` has it. Raises CheckpointError as `pieces`."""
        codes = self.codes.codes(self.first_row + begin, self.first_row + end, self.matrix)
        scales, zero_points = self.scales.read(self.matrix)
        of_rows = np.arange(self.first_row + begin, self.first_row + end) // self.scales.block[0]
        return codes, scales[of_rows], None if zero_points is None else zero_points[of_rows]

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError unless the weight has this shape."""
        if self.shape != shape:
            raise CheckpointError(
                f"tensor {self.codes.stored.name} holds a weight of shape {list(self.shape)}; config.json asks for "
                f"{list(shape)}"
            )

    def pieces(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """The weight, a bounded piece at a time: which rows, and float32 [rows, columns]. Of a stack, a whole matrix:
        float32 [1, rows, columns].

        Raises CheckpointError, naming the tensor, for a scale that is zero or not finite, an FP8 number that is NaN,
        and a group that is not there.
        """
        if len(self.shape) == 3:
            for number in range(self.shape[0]):
                parts = [part for _, part in self.rows_of(number, 0, self.shape[1]).pieces()]
                yield slice(number, number + 1), np.concatenate(parts)[None]
            return
        rows, columns = self.shape
        groups = self.scales.groups(columns)
        step = max(1, _PIECE // columns)
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            codes, scales, zero_points = self.quantized_rows(begin, end)
            if self.codes.stored.dtype == "F8_E4M3":
                numbers = E4M3[codes]
            else:
                numbers = codes.astype(np.float32)
                numbers -= np.float32(self.codes.offset) if zero_points is None else zero_points[:, groups]
            numbers *= scales[:, groups]
            yield slice(begin, end), np.ascontiguousarray(numbers)
